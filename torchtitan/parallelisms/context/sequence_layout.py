"""The layout of a sequence over context-parallel ranks: the tokens of each rank, and which of them attend to which.

A sequence is cut into equal pieces. In order, rank r holds piece r. Under causal attention the last rank then has all
the work and the first almost none, so "headtail" cuts twice as many pieces and gives rank r the pieces r and
2 ranks - 1 - r: an early and a late one, whose work adds up to the same on every rank.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Region(NamedTuple):
    """A rectangle of queries x keys, where every query sees every key, or those up to its own if `causal`.

    Numbers count tokens in the tensors that are attended with, not in the whole sequence.
    """

    first_query: int
    last_query: int  # exclusive, as in slices
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
        """Numbers of its pieces in the order in which the rank holds them, which is that of the sequence."""
        return [rank, self.pieces - 1 - rank] if self.headtail else [rank]

    @property
    def rank_order(self) -> list[int]:
        """Numbers of all pieces as they stand one behind the other when the ranks' shares are joined."""
        return [piece for rank in range(self.ranks) for piece in self.pieces_of(rank)]

    @property
    def sequence_order(self) -> list[int]:
        """Return where in the joined shares each piece of the sequence is: the inverse of `rank_order`."""
        order = self.rank_order
        return [order.index(piece) for piece in range(self.pieces)]

    def share(self, x: torch.Tensor, rank: int, dim: int = 1) -> torch.Tensor:
        """Return the share of `rank` of a full sequence that runs along `dim` of x: [.., S, ..] -> [.., S /
        ranks, ..]
        """
        every = x.unflatten(dim, (self.pieces, -1)).unbind(dim)
        return torch.cat([every[piece] for piece in self.pieces_of(rank)], dim)

    def seen_in_share(self, rank: int, source: int, length: int, causal: bool = True) -> Region | None:
        """Return what the queries of `rank` see of the keys of rank `source`; both have `length` tokens.
        None: nothing.
        """
        if not causal:
            return Region(0, length, 0, length, False)
        if source == rank:  # pieces in order, so causal in the whole
            return Region(0, length, 0, length, True)
        if not self.headtail:
            return Region(0, length, 0, length, False) if source < rank else None
        half = length // 2
        if source < rank:  # its head is before both of ours, its tail behind both
            return Region(0, length, 0, half, False)
        return Region(half, length, 0, length, False)  # both of its pieces are between our head and our tail

    def seen_in_sequence(self, rank: int, length: int, causal: bool = True) -> list[Region]:
        """Return what the `length` queries of `rank` see of the keys of the full sequence, which are in its order."""
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
        """Place in the whole sequence of each of the `length` tokens that `rank` holds, [length]."""
        return self.share(torch.arange(length * self.ranks, device=device), rank, dim=0)
