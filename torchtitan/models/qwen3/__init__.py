"""Qwen 3 without experts: the arguments and the published sizes. No torch here, so `torchtitan check` stays quick."""

from dataclasses import dataclass
from typing import Any

from torchtitan.models.linears import Sizes, gated, grouped_attention
from torchtitan.models.sizes import check_grouped_heads, check_positive, check_turned


@dataclass(frozen=True, kw_only=True)
class Qwen3Args:
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    head_dim: int = 128  # of queries, keys and values; n_heads of them need not add up to dim
    vocab_size: int = 151936
    norm_eps: float = 1e-6
    rope_theta: float = 1000000.0
    tied_embeddings: bool = False  # the output head is the embedding matrix
    max_seq_len: int = 40960  # what the family was trained for; nothing in the model depends on it

    def __post_init__(self) -> None:
        check_positive(
            self, "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "head_dim", "vocab_size", "max_seq_len"
        )
        check_turned(self, "head_dim")
        check_grouped_heads(self)

    @property
    def num_kv_heads(self) -> int:
        return self.n_kv_heads

    def block_linears(self, layer: int) -> Sizes:
        attention = grouped_attention(self.dim, self.n_heads, self.n_kv_heads, self.head_dim)
        return attention | gated("feed_forward", self.dim, self.ffn_dim)

    @property
    def num_matmul_parameters(self) -> int:
        """Weights that a token is multiplied with: the layers' matrices and the output head (tied or not)."""
        attention = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads)
        return self.n_layers * (attention + 3 * self.dim * self.ffn_dim) + self.dim * self.vocab_size

    @property
    def num_parameters(self) -> int:
        norms = self.n_layers * (2 * self.dim + 2 * self.head_dim) + self.dim
        embedding = 0 if self.tied_embeddings else self.vocab_size * self.dim
        return self.num_matmul_parameters + norms + embedding


_small: dict[str, Any] = dict(n_heads=16, n_kv_heads=8, tied_embeddings=True)
QWEN3 = {
    "debugmodel": Qwen3Args(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, head_dim=32, ffn_dim=768, vocab_size=2048),
    "0.6B": Qwen3Args(dim=1024, n_layers=28, ffn_dim=3072, **_small),
    "1.7B": Qwen3Args(dim=2048, n_layers=28, ffn_dim=6144, **_small),
    "4B": Qwen3Args(dim=2560, n_layers=36, ffn_dim=9728, **_small | {"n_heads": 32}),
    "8B": Qwen3Args(dim=4096, n_layers=36, n_heads=32, n_kv_heads=8, ffn_dim=12288),
    "14B": Qwen3Args(dim=5120, n_layers=40, n_heads=40, n_kv_heads=8, ffn_dim=17408),
    "32B": Qwen3Args(dim=5120, n_layers=64, n_heads=64, n_kv_heads=8, ffn_dim=25600),
}
