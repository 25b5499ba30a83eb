"""Arguments that GPT-2, OPT and RoBERTa share. No torch; model.py has the modules.

These models have learned positions, norms with means and biases, biases in all linear layers, a feed-forward without a
gate, and a head that is tied to the embedding or classifies.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.models.hf.config import read_number
from torchtitan.models.sizes import (
    NORMS,
    Names,
    Sizes,
    check_not_negative,
    check_positive,
    check_probabilities,
    check_whole_heads,
    grouped_attention,
    ungated,
)


@dataclass(frozen=True, kw_only=True)
class LearnedPositionArgs(ABC):
    """Arguments that families with learned positions inherit, so that a job can override each by its name."""

    dim: int
    n_layers: int
    n_heads: int
    ffn_dim: int
    vocab_size: int
    max_seq_len: int  # number of learned positions, so no sequence is longer
    norm_eps: float = 1e-5
    dropout: float = 0.0  # of embeddings, and of the outputs of attention and feed-forward
    attention_dropout: float = 0.0  # of attention probabilities
    n_classes: int = 0  # 0: the head predicts words
    causal: ClassVar = True  # False: tokens attend to the full document
    may_be_zero: ClassVar = ("dropout", "attention_dropout", "n_classes")
    """Sizes that may be 0, which removes a part of the model."""

    def __post_init__(self) -> None:
        check_positive(self, "dim", "n_layers", "n_heads", "ffn_dim", "vocab_size", "max_seq_len")
        check_not_negative(self, "n_classes")
        check_probabilities(self, "dropout", "attention_dropout")
        check_whole_heads(self)

    @property
    def learned_positions(self) -> int:
        """Number of positions with a learned embedding, which limits the length of sequences."""
        return self.max_seq_len

    @property
    def num_kv_heads(self) -> int:
        return self.n_heads

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def tied_embeddings(self) -> bool:
        """True unless the model classifies: the head over the vocabulary is the embedding matrix."""
        return not self.n_classes

    @property
    def word_dim(self) -> int:
        """Width of the word embedding."""
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
        """Names of parameters outside of the layers, except weights of linear layers."""

    @property
    @abstractmethod
    def head_linears(self) -> Sizes:
        """Linear layers after the last block, by name."""

    @property
    @abstractmethod
    def _other_parameters(self) -> int:
        """Number of parameters outside of the layers, except linear layers and the word embedding."""

    @property
    def num_matmul_parameters(self) -> int:
        """Number of weights that a token is multiplied with: the layers' matrices and the output head (tied or not)."""
        layer = 4 * self.dim**2 + 2 * self.dim * self.ffn_dim
        return self.n_layers * layer + sum(outputs * inputs for outputs, inputs in self.head_linears.values())

    @property
    def num_parameters(self) -> int:
        biases_and_norms = self.n_layers * (4 * self.dim + self.ffn_dim + self.dim + 4 * self.dim)
        embedding = 0 if self.tied_embeddings else self.vocab_size * self.word_dim
        return self.num_matmul_parameters + biases_and_norms + embedding + self._other_parameters


NOT_COMPARED = ("dropout", "attention_dropout", "n_classes")
"""Arguments that a job may set differently than the folder that it starts from. Positions are compared: they are
weights."""


def shared_dropout(config: Mapping[str, Any], defaults: Mapping[str, float]) -> float:
    """Return the one value of these dropout probabilities. Raises JobError if they differ."""
    probabilities = {name: read_number(config, name, default) for name, default in defaults.items()}
    if len(set(probabilities.values())) > 1:
        description = " and ".join(f"{name} = {share!r}" for name, share in probabilities.items())
        raise JobError(f"{description}, but this model has one share for both")
    return next(iter(probabilities.values()))
