"""The interface between context parallel and a model's attention kernel.

A kernel has `prepare`, once per forward, and `forward`, once per layer. What may be done with it where a rank has a
part of the sequence, two attributes of its class say. They hold for the two methods of that class: a subclass with
others has to say them again (plan.declaration_holds), or is refused by its name.

* `takes_parts`: `prepare` and `forward` do right where the queries are a part of the sequence and the keys all of it.
* `plain_attention`: it is softmax(q k' / sqrt(E)) v over the tokens of the query's document, earlier ones where
  `causal`. Then its result can be computed piece by piece (block_attention), without asking it.

A kernel that says neither runs under ulysses, which gives it whole sequences and some of the heads. One that `drops`
probabilities also takes the keys of its queries' draws, and has to see all keys and values under their own heads.
"""

from typing import Any, NamedTuple, Protocol

import torch

from torchtitan.core.errors import JobError
from torchtitan.parallelisms.degrees import check_dropped, check_shifted
from torchtitan.parallelisms.plan import declaration_holds


class Tokens(NamedTuple):
    """The tokens of queries or of keys."""

    places: torch.Tensor  # [S], which of the sequence's tokens they are
    documents: torch.Tensor | None  # [B, S]; None: one document


def counted(tokens: torch.Tensor) -> torch.Tensor:
    """tokens [B, S] -> their positions where nothing else is said, 0..S-1 in every sample: [1, S]"""
    return torch.arange(tokens.shape[1], device=tokens.device)[None]


class Kernel(Protocol):
    causal: bool
    drops: bool  # False unless said

    def prepare(self, queries: Tokens, keys: Tokens | None = None) -> Any:
        """The mask that `forward` takes. keys None: those are the queries' own."""
        ...

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
        """q [B, H, Q, E], k [B, K, S, E], v [B, K, S, V] -> [B, H, Q, V]"""
        ...


def says(kernel: Kernel, statement: str) -> bool:
    return getattr(kernel, statement, False) is True and declaration_holds(kernel, statement, "prepare", "forward")


def drops(kernel: Any) -> bool:
    """Return True if the kernel takes its queries' dropout keys [B, Q], as an argument after the mask."""
    return getattr(kernel, "drops", False)


def knows_heads(kernel: Any) -> bool:
    """Return True if the kernel treats heads differently by their numbers. `share` then tells it which of as many equal
    shares of them as tensor parallel has made is here.
    """
    return hasattr(kernel, "share")


def require_part(kernel: Kernel, method: str) -> None:
    """JobError where the kernel does not say that it can be used by this method of context parallel."""
    if drops(kernel):
        check_dropped(method)
    elif knows_heads(kernel):
        check_shifted(method)
    needs = {"ulysses": (), "allgather": ("takes_parts", "plain_attention")}.get(method, ("plain_attention",))
    if needs and not any(says(kernel, statement) for statement in needs):
        raise JobError(
            f"context_parallel_rotate_method {method!r} with the attention kernel {type(kernel).__name__}, whose class "
            f"does not say {' or '.join(needs)}; allowed: what it says, or ulysses. Choose one, or say so "
            "(parallelisms/context/kernel.py)"
        )
