"""The interface between context parallel and a model's attention kernel.

A kernel has `prepare`, called once per forward, and `forward`, called once per layer. Two class attributes declare the
context-parallel methods that it supports. They refer to the two methods of that class: a subclass that overrides these
has to repeat the declaration (plan.declaration_holds), or `apply_context_parallel` rejects it.

* `accepts_query_slices`: `prepare` and `forward` are correct if the queries are a part of the sequence and the keys are
  all of it.
* `plain_attention`: it computes softmax(q k' / sqrt(E)) v over the tokens of the query's document, up to the query if
  `causal`. Then ring_attention.py can compute the result by regions, without the kernel.

A kernel without declarations runs under ulysses, which passes full sequences and some of the heads. A kernel with
attention dropout (`has_dropout`) also takes random keys of its queries. It needs all keys and values under their
original heads.
"""

from typing import Any, NamedTuple, Protocol

import torch

from torchtitan.parallelisms.plan import declaration_holds


class Tokens(NamedTuple):
    """The tokens of queries or of keys."""

    indices: torch.Tensor  # [S], indices in the full sequence
    documents: torch.Tensor | None  # [B, S]; None: one document


def default_positions(tokens: torch.Tensor) -> torch.Tensor:
    """Return the default positions of tokens [B, S]: 0..S-1 for every sample, [1, S]."""
    return torch.arange(tokens.shape[1], device=tokens.device)[None]


class Kernel(Protocol):
    causal: bool
    has_dropout: bool  # optional, default False

    def prepare(self, queries: Tokens, keys: Tokens | None = None) -> Any:
        """Return the mask for `forward`. `keys`: None if they are the same tokens as the queries."""
        ...

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
        """Attend: q [B, H, Q, E], k [B, K, S, E], v [B, K, S, V] -> [B, H, Q, V]."""
        ...


def declares(kernel: Kernel, attribute: str) -> bool:
    """Return True if the kernel's class declares this attribute for the methods that it runs."""
    return getattr(kernel, attribute, False) is True and declaration_holds(kernel, attribute, "prepare", "forward")


def has_dropout(kernel: Any) -> bool:
    """Return True if the kernel takes its queries' dropout keys [B, Q], as an argument after the mask."""
    return getattr(kernel, "has_dropout", False)


def depends_on_head_index(kernel: Any) -> bool:
    """Return True if the kernel treats heads differently by index. Its `head_shard` is then set to the tensor-parallel
    rank: the index of this rank's equal share of the heads.
    """
    return hasattr(kernel, "head_shard")
