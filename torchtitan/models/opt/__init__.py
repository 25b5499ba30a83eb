"""OPT: the arguments and the published sizes. No torch here, so `torchtitan check` stays quick."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torchtitan.models.learned_positions import ClassicArgs
from torchtitan.models.sizes import HEAD, Names, Sizes, check_not_negative


@dataclass(frozen=True, kw_only=True)
class OPTArgs(ClassicArgs):
    vocab_size: int = 50272
    max_seq_len: int = 2048
    order: Literal["pre", "post"] = "pre"  # norms before attention and feed-forward, or after the residual sums
    embed_dim: int = 0  # width of the embedding of words, projected to the model's and back; 0: the same
    may_be_zero: ClassVar = (*ClassicArgs.may_be_zero, "embed_dim")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self, "embed_dim")

    @property
    def word_dim(self) -> int:
        return self.embed_dim or self.dim

    @property
    def projects(self) -> bool:
        return self.word_dim != self.dim

    @property
    def end_others(self) -> Names:
        norm = ("norm.norm.weight", "norm.norm.bias") if self.order == "pre" else ()
        return ("tok_embeddings.weight", "entrance.positions.weight", *norm)

    @property
    def head_linears(self) -> Sizes:
        """Linear layers of the head, and the projections after the embedding and before the head."""
        into, back = (self.dim, self.word_dim), (self.word_dim, self.dim)
        projects = {"entrance.project": into, "norm.project": back} if self.projects else {}
        return projects | {HEAD: (self.outputs, self.word_dim)}

    @property
    def _other_parameters(self) -> int:
        return (UNUSED + self.max_seq_len) * self.dim + 2 * self.dim * (self.order == "pre")


UNUSED = 2
"""Number of unused rows before the first position's embedding."""


def _sizes(width: int, layers: int, heads: int, **sizes: int) -> OPTArgs:
    return OPTArgs(dim=width, n_layers=layers, n_heads=heads, ffn_dim=4 * width, **sizes)


OPT = {
    "debugmodel": _sizes(256, 6, 8, vocab_size=2048),
    "125M": _sizes(768, 12, 12),
    "350M": OPTArgs(dim=1024, n_layers=24, n_heads=16, ffn_dim=4096, order="post", embed_dim=512),
    "1.3B": _sizes(2048, 24, 32),
    "2.7B": _sizes(2560, 32, 32),
    "6.7B": _sizes(4096, 32, 32),
}
