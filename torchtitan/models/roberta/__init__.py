"""RoBERTa: the arguments and the published sizes. No torch here, so `torchtitan check` stays quick."""

from dataclasses import dataclass
from typing import ClassVar

from torchtitan.models.learned_positions import ClassicArgs
from torchtitan.models.sizes import HEAD, Names, Sizes


@dataclass(frozen=True, kw_only=True)
class RobertaArgs(ClassicArgs):
    """Arguments of RoBERTa."""

    vocab_size: int = 50265
    max_seq_len: int = 512
    pad_id: int = 1  # positions are numbered from pad_id + 1
    n_types: int = 1  # rows of the token type embedding; every token has type 0
    causal: ClassVar = False
    may_be_zero: ClassVar = (*ClassicArgs.may_be_zero, "pad_id")

    @property
    def end_others(self) -> Names:
        entrance = ("positions.weight", "types.weight", "norm.weight", "norm.bias")
        norm = () if self.n_classes else ("norm.norm.weight", "norm.norm.bias")
        return (
            "tok_embeddings.weight",
            *(f"entrance.{name}" for name in entrance),
            "norm.dense.bias",
            *norm,
            "output.bias",
        )

    @property
    def head_linears(self) -> Sizes:
        return {"norm.dense": (self.dim, self.dim), HEAD: (self.outputs, self.dim)}

    @property
    def _other_parameters(self) -> int:
        rows = self.pad_id + 1 + self.max_seq_len + self.n_types
        norms = 2 * self.dim + (0 if self.n_classes else 2 * self.dim)  # of the embeddings, and of a head of words
        return rows * self.dim + norms + self.dim + self.outputs


def _sizes(width: int, layers: int, heads: int, **sizes: int) -> RobertaArgs:
    return RobertaArgs(dim=width, n_layers=layers, n_heads=heads, ffn_dim=4 * width, **sizes)


ROBERTA = {
    "debugmodel": _sizes(256, 6, 8, vocab_size=2048, max_seq_len=2048),
    "125M": _sizes(768, 12, 12),
    "355M": _sizes(1024, 24, 16),
}
