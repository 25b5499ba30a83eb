"""What GPT-2, OPT and RoBERTa share, transformers as of 2018: the arguments. No torch here; model.py has the rest.

Learned positions, norms with means and biases, biases everywhere, a feed-forward without a gate, and a head that is the
embedding's matrix, or tells classes apart.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.models.hf.config import number_of
from torchtitan.models.sizes import (
    NORMS,
    Names,
    Sizes,
    check_not_negative,
    check_positive,
    check_shares,
    check_whole_heads,
    grouped_attention,
    ungated,
)


@dataclass(frozen=True, kw_only=True)
class ClassicArgs(ABC):
    """A family's arguments inherit these, so that each can be overridden by its name."""

    dim: int
    n_layers: int
    n_heads: int
    ffn_dim: int
    vocab_size: int
    max_seq_len: int  # as many positions are learned, so no sequence is longer
    norm_eps: float = 1e-5
    dropout: float = 0.0  # of embeddings, and of what attention and feed-forward add
    attention_dropout: float = 0.0  # of attention's probabilities
    n_classes: int = 0  # what the head tells apart, instead of words
    causal: ClassVar = True  # whether tokens see only those before them
    may_be_zero: ClassVar = ("dropout", "attention_dropout", "n_classes")
    """Sizes of which 0 means that a part of the model is not there."""

    def __post_init__(self) -> None:
        check_positive(self, "dim", "n_layers", "n_heads", "ffn_dim", "vocab_size", "max_seq_len")
        check_not_negative(self, "n_classes")
        check_shares(self, "dropout", "attention_dropout")
        check_whole_heads(self)

    @property
    def learned_positions(self) -> int:
        """Positions of a sequence that there are, for a family whose are learned."""
        return self.max_seq_len

    @property
    def num_kv_heads(self) -> int:
        return self.n_heads

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def tied_embeddings(self) -> bool:
        """The output head is the embedding matrix wherever it makes words."""
        return not self.n_classes

    @property
    def word_dim(self) -> int:
        """Width of the embedding of words."""
        return self.dim

    @property
    def outputs(self) -> int:
        return self.n_classes or self.vocab_size

    def block_linears(self, layer: int) -> Sizes:
        attention = grouped_attention(self.dim, self.n_heads, self.n_heads, self.head_dim)
        return attention | ungated("feed_forward", self.dim, self.ffn_dim)

    def block_others(self, layer: int) -> Names:
        biased = [*self.block_linears(layer), *(name.removesuffix(".weight") for name in NORMS)]
        return (*NORMS, *(f"{name}.bias" for name in biased))

    @property
    @abstractmethod
    def end_others(self) -> Names:
        """Outside of the layers, beside the matrices of linears."""

    @property
    @abstractmethod
    def head_linears(self) -> Sizes:
        """Behind the last layer, by their names."""

    @property
    @abstractmethod
    def _other_parameters(self) -> int:
        """Of the ends, beside linears and the embedding of words."""

    @property
    def num_matmul_parameters(self) -> int:
        """Weights that a token is multiplied with: the layers' matrices and the output head (tied or not)."""
        layer = 4 * self.dim**2 + 2 * self.dim * self.ffn_dim
        return self.n_layers * layer + sum(outputs * inputs for outputs, inputs in self.head_linears.values())

    @property
    def num_parameters(self) -> int:
        biases_and_norms = self.n_layers * (4 * self.dim + self.ffn_dim + self.dim + 4 * self.dim)
        embedding = 0 if self.tied_embeddings else self.vocab_size * self.word_dim
        return self.num_matmul_parameters + biases_and_norms + embedding + self._other_parameters


NOT_COMPARED = ("dropout", "attention_dropout", "n_classes")
"""Of the arguments, what a job may have otherwise than the folder that it starts from. Positions are compared: they are
weights."""


def one_dropout(config: Mapping[str, Any], defaults: Mapping[str, float]) -> float:
    """JobError where these shares are not one."""
    given = {name: number_of(config, name, default) for name, default in defaults.items()}
    if len(set(given.values())) > 1:
        told = " and ".join(f"{name} = {share!r}" for name, share in given.items())
        raise JobError(f"{told}, but this model has one share for both")
    return next(iter(given.values()))


def classes_of(config: Mapping[str, Any]) -> int:
    """0 for a model of words."""
    kinds = config.get("architectures")
    if not isinstance(kinds, list) or not any("SequenceClassification" in str(kind) for kind in kinds):
        return 0
    labels = config.get("id2label")
    return len(labels) if isinstance(labels, Mapping) else number_of(config, "num_labels", 2)


def labels_of(args: ClassicArgs) -> dict[str, Any]:
    """As transformers names classes that have no names."""
    names = [f"LABEL_{number}" for number in range(args.n_classes)]
    if not names:
        return {}
    return {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}}
