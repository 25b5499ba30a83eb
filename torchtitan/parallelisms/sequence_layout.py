"""The layout of a sequence over context-parallel ranks: the tokens of each rank, and which of them attend to which.

A sequence is cut into equal pieces. In the plain layout, rank r holds piece r. Causal attention then gives the last
rank most of the work and the first rank almost none. So "headtail" cuts twice as many pieces and gives rank r the
pieces r and 2 ranks - 1 - r: an early and a late piece, together the same amount of work on every rank.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch


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
