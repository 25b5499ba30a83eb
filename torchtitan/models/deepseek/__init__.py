"""DeepSeek V2 and V3: the arguments, their limits on a job, and the published sizes. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.constraints import LimitError
from torchtitan.core.errors import JobError
from torchtitan.models.moe import ROUTER, MoEArgs, MoEDecoderArgs
from torchtitan.models.sizes import NORMS, Names, Sizes, check_not_negative, check_positive, check_turned, gated


def multi_token_limits(depths: int, overrides: Mapping[str, Any], *, tp: int, cp: int, pp: int) -> Iterator[LimitError]:
    """Yield the limits that multi-token prediction with `depths` depths sets: only data and expert parallel support it.

    `overrides` are the sizes that the job sets.
    """
    axes = {
        "tensor": (tp, "whose last norm and head are not split"),
        "context": (cp, "which needs tokens of other ranks"),
        "pipeline": (pp, "which needs the embedding in the last stage"),
    }
    for axis, (degree, reason) in axes.items():
        if depths and degree > 1:
            allowed = f"1 with multi-token prediction (n_mtp_layers = {depths} in model.overrides), {reason}"
            remedy = "write 1, or leave n_mtp_layers out"
            yield LimitError(f"parallelism.{axis}_parallel_degree", degree, allowed, remedy)
    weight = overrides.get("mtp_loss_weight")
    if weight is not None and not depths:
        allowed = "mtp_loss_weight with n_mtp_layers of at least 1, whose loss it weighs"
        remedy = "set n_mtp_layers too, or leave it out"
        yield LimitError("model.overrides", f"mtp_loss_weight = {weight}", allowed, remedy)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN's scaling of rotary wavelengths (arXiv:2309.00071), with DeepSeek's two factors.

    Features that turn less than beta_slow times within original_max_seq_len tokens become `factor` times slower, those
    that turn more than beta_fast times stay, and those between are blended. Longer contexts flatten attention, so
    scores are multiplied by (0.1 mscale_all_dim ln factor + 1)^2, and rotated features by (0.1 mscale ln factor + 1) /
    (0.1 mscale_all_dim ln factor + 1).
    """

    factor: float = 40.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_seq_len: int = 4096
    mscale: float = 1.0
    mscale_all_dim: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DeepseekArgs(MoEDecoderArgs):
    """Arguments of DeepSeek models, with experts from layer `n_dense_layers` on.

    Keys and values of a token are computed from kv_lora_rank numbers. The rotated part of a key, qk_rope_head_dim
    features, is shared by all heads. After the layers, n_mtp_layers depths of multi-token prediction learn to predict
    further tokens (model.py), in training only.
    """

    ffn_dim: int  # of the dense layers
    n_dense_layers: int = 1
    q_lora_rank: int = 0  # 0: queries are not compressed
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_theta: float = 10000.0
    rope_scaling: YarnScaling | None = YarnScaling()
    max_seq_len: int = 163840
    n_mtp_layers: int = 0
    mtp_loss_weight: float = 0.3  # of the mean of the depths' losses, added to the main loss
    may_be_zero: ClassVar = (*MoEArgs.may_be_zero, "n_dense_layers", "q_lora_rank", "n_mtp_layers", "mtp_loss_weight")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "ffn_dim", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        check_not_negative(self, "n_mtp_layers", "mtp_loss_weight")
        if self.q_lora_rank < 0:
            raise JobError(f"q_lora_rank = {self.q_lora_rank}: must be 0 (queries are not compressed) or more")
        if not 0 <= self.n_dense_layers <= self.n_layers:
            raise JobError(
                f"n_dense_layers = {self.n_dense_layers} with n_layers = {self.n_layers}: must be from 0 to n_layers"
            )
        check_turned(self, "qk_rope_head_dim")
        if self.v_head_dim > self.qk_head_dim:
            raise JobError(
                f"v_head_dim = {self.v_head_dim}: must be at most qk_nope_head_dim + qk_rope_head_dim = "
                f"{self.qk_head_dim}, as attention kernels take values as wide as keys, or narrower"
            )

    def limits(self, overrides: Mapping[str, Any], *, tp: int, cp: int, pp: int) -> Iterator[LimitError]:
        """Yield the limits on a job's parallel degrees and on the sizes that the job sets."""
        return multi_token_limits(self.n_mtp_layers, overrides, tp=tp, cp=cp, pp=pp)

    @property
    def expert_layers(self) -> int:
        return self.n_layers - self.n_dense_layers + self.n_mtp_layers

    @property
    def num_kv_heads(self) -> int:
        return self.n_heads

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def _attention_matrices(self) -> int:
        queries = self.n_heads * self.qk_head_dim
        query = self.q_lora_rank * (self.dim + queries) if self.q_lora_rank else self.dim * queries
        latent = self.dim * (self.kv_lora_rank + self.qk_rope_head_dim)
        unfold = self.kv_lora_rank * self.n_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return query + latent + unfold + self.n_heads * self.v_head_dim * self.dim

    def block_linears(self, layer: int) -> Sizes:
        queries, unfolded = self.n_heads * self.qk_head_dim, self.n_heads * (self.qk_nope_head_dim + self.v_head_dim)
        sizes = {"attention.wq": (queries, self.q_lora_rank or self.dim)}
        if self.q_lora_rank:
            sizes["attention.wq_a"] = (self.q_lora_rank, self.dim)
        sizes["attention.wkv_a"] = (self.kv_lora_rank + self.qk_rope_head_dim, self.dim)
        sizes["attention.wkv_b"] = (unfolded, self.kv_lora_rank)
        sizes["attention.wo"] = (self.dim, self.n_heads * self.v_head_dim)
        if layer >= self.n_layers:  # a depth of multi-token prediction
            sizes["eh_proj"] = (self.dim, 2 * self.dim)
        dense = layer < self.n_dense_layers
        return sizes | (gated("feed_forward", self.dim, self.ffn_dim) if dense else self.moe_linears)

    def block_others(self, layer: int) -> Names:
        compressed = ("attention.q_norm.weight",) if self.q_lora_rank else ()
        routed = (ROUTER,) if layer >= self.n_dense_layers else ()
        depth = ("enorm.weight", "hnorm.weight", "norm.weight") if layer >= self.n_layers else ()
        return (*NORMS, "attention.kv_norm.weight", *compressed, *routed, *depth)

    def _matrices(self, moe: int) -> int:
        dense = self.n_dense_layers * 3 * self.dim * self.ffn_dim
        experts = (self.n_layers - self.n_dense_layers) * moe
        depths = self.n_mtp_layers * (self._attention_matrices + moe + 2 * self.dim**2)
        return self.n_layers * self._attention_matrices + dense + experts + depths + self.dim * self.vocab_size

    @property
    def num_matmul_parameters(self) -> int:
        """Number of weights that a token is multiplied with. The head counts once more for each depth."""
        return super().num_matmul_parameters + self.n_mtp_layers * self.dim * self.vocab_size

    @property
    def _norm_parameters(self) -> int:
        of_layers = (self.n_layers + self.n_mtp_layers) * (2 * self.dim + self.q_lora_rank + self.kv_lora_rank)
        return of_layers + (3 * self.n_mtp_layers + 1) * self.dim


def _v2(**sizes: object) -> DeepseekArgs:
    shared = {"vocab_size": 102400, "top_k": 6, "n_shared_experts": 2}
    return DeepseekArgs(**shared, rope_scaling=YarnScaling(mscale=0.707, mscale_all_dim=0.707), **sizes)


def _v3(**sizes: object) -> DeepseekArgs:
    return DeepseekArgs(score="sigmoid", normalize_top_k=True, expert_bias=True, **sizes)


DEEPSEEK = {
    # The proportions of V2-Lite's attention, routed as V3. With torchtitan's debug model's attention, eight times as
    # wide as the model, AdamW pushes all tokens in one direction within ten steps and no router tells them apart.
    "debugmodel": _v3(
        dim=256,
        n_layers=6,
        n_heads=8,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        vocab_size=2048,
        ffn_dim=1024,
        expert_dim=256,
        n_experts=8,
        top_k=3,
        n_shared_experts=2,
        bias_rate=0.01,  # ten times V3's: the 60 steps of deepseek_debug.toml must suffice
        max_seq_len=16384,
    ),
    # V2-Lite
    "16B": _v2(
        dim=2048,
        n_layers=27,
        n_heads=16,
        ffn_dim=10944,
        expert_dim=1408,
        n_experts=64,
        aux_loss_weight=0.001,
    ),
    # V2
    "236B": _v2(
        dim=5120,
        n_layers=60,
        n_heads=128,
        ffn_dim=12288,
        q_lora_rank=1536,
        expert_dim=1536,
        n_experts=160,
        n_groups=8,
        top_groups=3,
        route_scale=16.0,
        aux_loss_weight=0.003,
    ),
    # V3
    "671B": _v3(
        dim=7168,
        n_layers=61,
        n_dense_layers=3,
        n_heads=128,
        vocab_size=129280,
        ffn_dim=18432,
        q_lora_rank=1536,
        expert_dim=2048,
        n_experts=256,
        top_k=8,
        n_shared_experts=1,
        route_scale=2.5,
        n_groups=8,
        top_groups=4,
        group_score="top2",
        aux_loss_weight=0.0001,
    ),
}
