"""Qwen 3 with experts: the arguments and the published sizes. No torch here, so `torchtitan check` stays quick."""

from dataclasses import dataclass

from torchtitan.models.moe import ROUTER, MoEDecoderArgs
from torchtitan.models.sizes import (
    NORMS,
    QK_NORMS,
    Names,
    RopeScaling,
    Sizes,
    check_grouped_heads,
    check_positive,
    check_turned,
    grouped_attention,
)


@dataclass(frozen=True, kw_only=True)
class Qwen3MoEArgs(MoEDecoderArgs):
    """Arguments of Qwen 3 with experts in all layers."""

    n_kv_heads: int
    head_dim: int = 128  # of queries, keys and values; n_heads of them need not add up to dim
    vocab_size: int = 151936
    rope_theta: float = 1000000.0
    rope_scaling: RopeScaling | None = None
    max_seq_len: int = 40960

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "n_kv_heads", "head_dim")
        check_turned(self, "head_dim")
        check_grouped_heads(self)

    @property
    def num_kv_heads(self) -> int:
        return self.n_kv_heads

    def block_linears(self, layer: int) -> Sizes:
        return grouped_attention(self.dim, self.n_heads, self.n_kv_heads, self.head_dim) | self.moe_linears

    def block_others(self, layer: int) -> Names:
        return (*NORMS, *QK_NORMS, ROUTER)

    def _matrices(self, moe: int) -> int:
        attention = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads)
        return self.n_layers * (attention + moe) + self.dim * self.vocab_size

    @property
    def _norm_parameters(self) -> int:
        return self.n_layers * (2 * self.dim + 2 * self.head_dim) + self.dim


def _qwen3(**sizes: object) -> Qwen3MoEArgs:
    return Qwen3MoEArgs(**{"n_experts": 128, "top_k": 8, "normalize_top_k": True, "aux_loss_weight": 0.001} | sizes)


QWEN3_MOE = {
    "debugmodel": _qwen3(
        dim=256,
        n_layers=6,
        n_heads=8,
        n_kv_heads=4,
        head_dim=32,
        vocab_size=2048,
        expert_dim=256,
        n_experts=8,
        top_k=3,
        aux_loss_weight=0.01,  # ten times the others': the 60 steps of qwen3_moe_debug.toml must suffice
    ),
    "30B-A3B": _qwen3(dim=2048, n_layers=48, n_heads=32, n_kv_heads=4, expert_dim=768),
    "235B-A22B": _qwen3(dim=4096, n_layers=94, n_heads=64, n_kv_heads=4, expert_dim=1536),
}
