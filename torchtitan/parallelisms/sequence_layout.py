"""The layout of a sequence over context-parallel ranks: the tokens of each rank, and which of them attend to which.

A sequence is cut into equal pieces. In the plain layout, rank r holds piece r. Causal attention then gives the last
rank most of the work and the first rank almost none. So "headtail" cuts twice as many pieces and gives rank r the
pieces r and 2 ranks - 1 - r: an early and a late piece, together the same amount of work on every rank. `Kernel` is the
interface of attention kernels that attend from a rank's queries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from torchtitan.parallelisms.plan import declaration_holds


class Region(NamedTuple):
    """A rectangle of queries x keys. Every query sees every key in it or, if `causal`, keys up to the diagonal.

    The indices refer to the tensors passed to attention, not to the full sequence.
    """

    first_query: int
    last_query: int  # exclusive, like last_key
    first_key: int
    last_key: int
    causal: bool


@dataclass(frozen=True)
class SequenceLayout:
    ranks: int
    headtail: bool

    @property
    def pieces_per_rank(self) -> int:
        return 2 if self.headtail else 1

    @property
    def pieces(self) -> int:
        return self.ranks * self.pieces_per_rank

    def pieces_of(self, rank: int) -> list[int]:
        """Return the indices of the rank's pieces, in the sequence's order."""
        return [rank, self.pieces - 1 - rank] if self.headtail else [rank]

    @property
    def rank_order(self) -> list[int]:
        """Return the indices of all pieces in the order of the concatenated shards of all ranks."""
        return [piece for rank in range(self.ranks) for piece in self.pieces_of(rank)]

    @property
    def sequence_order(self) -> list[int]:
        """Return the position of each piece in the concatenated shards: the inverse of `rank_order`."""
        order = self.rank_order
        return [order.index(piece) for piece in range(self.pieces)]

    def shard(self, x: torch.Tensor, rank: int, dim: int = 1) -> torch.Tensor:
        """Return the shard of `rank` of the sequence in dimension `dim`: x [.., S, ..] -> [.., S / ranks, ..]."""
        pieces = x.unflatten(dim, (self.pieces, -1)).unbind(dim)
        return torch.cat([pieces[piece] for piece in self.pieces_of(rank)], dim)

    def unshard(self, shards: torch.Tensor) -> torch.Tensor:
        """Return the full sequence of the shards of all ranks: [ranks, B, s, ..] -> [B, S, ..]."""
        pieces = shards.unflatten(2, (self.pieces_per_rank, -1)).transpose(1, 2).flatten(0, 1)
        return torch.cat([pieces[index] for index in self.sequence_order], dim=1)

    def visible_in_shard(self, rank: int, source: int, length: int, causal: bool = True) -> Region | None:
        """Return the region of the keys of rank `source` that the queries of `rank` see, or None if they see none.

        Both ranks have `length` tokens.
        """
        if not causal:
            return Region(0, length, 0, length, False)
        if source == rank:  # the pieces are in order, so the whole shard is causal
            return Region(0, length, 0, length, True)
        if not self.headtail:
            return Region(0, length, 0, length, False) if source < rank else None
        half = length // 2
        if source < rank:  # its head precedes both of our pieces, its tail follows both
            return Region(0, length, 0, half, False)
        return Region(half, length, 0, length, False)  # both of its pieces are between our head and our tail

    def visible_in_sequence(self, rank: int, length: int, causal: bool = True) -> list[Region]:
        """Return the regions that the `length` queries of `rank` see of the keys of the full, ordered sequence."""
        if not causal:
            return [Region(0, length, 0, length * self.ranks, False)]
        size = length // self.pieces_per_rank
        regions = []
        for index, piece in enumerate(self.pieces_of(rank)):
            queries, first_key = (index * size, (index + 1) * size), piece * size
            if first_key:
                regions.append(Region(*queries, 0, first_key, False))
            regions.append(Region(*queries, first_key, first_key + size, True))
        return regions

    def positions(self, rank: int, length: int, device: torch.device) -> torch.Tensor:
        """Return the positions in the full sequence of the `length` tokens of `rank`, [length]."""
        return self.shard(torch.arange(length * self.ranks, device=device), rank, dim=0)


class Tokens(NamedTuple):
    """The tokens of queries or of keys."""

    indices: torch.Tensor  # [S], indices in the full sequence
    documents: torch.Tensor | None  # [B, S]; None: one document


def default_positions(tokens: torch.Tensor) -> torch.Tensor:
    """Return the default positions of tokens [B, S]: 0..S-1 for every sample, [1, S]."""
    return torch.arange(tokens.shape[1], device=tokens.device)[None]


class Kernel(Protocol):
    """The interface between context parallel and a model's attention kernel.

    A kernel has `prepare`, called once per forward, and `__call__`, called once per layer. Two class attributes declare
    the context-parallel methods that it supports. They refer to the two methods of that class: a subclass that
    overrides these has to repeat the declaration (plan.declaration_holds), or `apply_context_parallel` rejects it.

    * `accepts_query_slices`: the methods are correct if the queries are a part of the sequence and the keys are all of
      it.
    * `plain_attention`: it computes softmax(q k' / sqrt(E)) v over the tokens of the query's document, up to the query
      if `causal`. Then ring_attention.py can compute the result by regions, without the kernel.

    A kernel of a model with attention sinks (attention_sinks.py) also takes `sinks` [H], those of its query heads.

    A kernel without declarations runs under ulysses, which passes full sequences and some of the heads. A kernel with
    attention dropout (`has_dropout`) also takes random keys of its queries. It needs all keys and values under their
    original heads.
    """

    causal: bool
    has_dropout: bool  # optional, default False, as the two declarations
    accepts_query_slices: bool
    plain_attention: bool

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


def with_sinks(sinks: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return the further argument of a kernel for sinks [H]: none without them, as not every kernel takes them."""
    return {} if sinks is None else {"sinks": sinks}


def depends_on_head_index(kernel: Any) -> bool:
    """Return True if the kernel treats heads differently by index. Its `head_shard` is then set to the tensor-parallel
    rank: the index of this rank's equal share of the heads.
    """
    return hasattr(kernel, "head_shard")


def all_parts(kernels: Any) -> list[Any]:
    """Return the kernels of a model, with its `parts` in place of one that runs several side by side."""
    return [part for kernel in kernels for part in getattr(kernel, "parts", (kernel,))]


def replace_parts(kernel: Any, replace: Callable[[Any], Any]) -> Any:
    """Return what `replace` makes of a kernel, or a kernel that combines what it makes of its parts."""
    return kernel.with_parts(replace) if hasattr(kernel, "with_parts") else replace(kernel)
