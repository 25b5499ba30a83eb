"""Sizes of decoders with grouped heads, rotary positions and gated feed-forwards: what families share. No torch."""

from dataclasses import dataclass

from torchtitan.models.linears import ENDS, NORMS, Names, Sizes, gated, grouped_attention
from torchtitan.models.sizes import RopeScaling, check_grouped_heads, check_positive, check_turned


@dataclass(frozen=True, kw_only=True)
class GatedArgs:
    """A family gives its own defaults, and says how many weights its norms have (`_norm_parameters`)."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    head_dim: int = 128  # of queries, keys and values; n_heads of them need not add up to dim
    vocab_size: int = 32000
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False  # the output head is the embedding matrix
    max_seq_len: int = 32768  # what the family was trained for; nothing in the model depends on it

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

    def block_others(self, layer: int) -> Names:
        return NORMS

    @property
    def end_others(self) -> Names:
        return ENDS

    @property
    def num_matmul_parameters(self) -> int:
        """Weights that a token is multiplied with: the layers' matrices and the output head (tied or not)."""
        attention = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads)
        return self.n_layers * (attention + 3 * self.dim * self.ffn_dim) + self.dim * self.vocab_size

    @property
    def _norm_parameters(self) -> int:
        return (2 * self.n_layers + 1) * self.dim

    @property
    def num_parameters(self) -> int:
        embedding = 0 if self.tied_embeddings else self.vocab_size * self.dim
        return self.num_matmul_parameters + self._norm_parameters + embedding
