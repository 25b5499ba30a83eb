"""A cache over the ranks of tensor parallel: each has every n-th place, and with it every n-th entry of a document.

All ranks have the same queries, so each finds the best of its own entries, and the best of these are the best of all.
What was found is then brought together as a sum to which the rank that has an entry gives it, and the others nothing.

Letters of the shapes: B lanes, S tokens, k hits, N entries of a token, W their width.
"""

from typing import Any

import torch

from torchtitan.adapters.neurocache.sizes import KEY
from torchtitan.errors import JobError


class Share:
    """One rank's. `border`: that of tensor parallel; None where a rank has all of the cache."""

    def __init__(self, border: Any = None):
        self.border = border
        self.rank, self.ranks = (0, 1) if border is None else (border.rank, border.size)

    def part(self, size: int) -> int:
        """Places of a rank, of so many. JobError where they do not divide."""
        if size % self.ranks:
            remedy = f'write {max(1, size // self.ranks) * self.ranks}, or {KEY}cache_shard = "none"'
            raise JobError(f"{KEY}cache_size: given {size}; allowed: a multiple of {self.ranks} ranks; {remedy}")
        return size // self.ranks

    def places(self, size: int, device: torch.device) -> torch.Tensor:
        """Which of all places this rank has, [size / ranks]."""
        return torch.arange(self.rank, size, self.ranks, device=device)

    def tokens(self, first: torch.Tensor, length: int) -> torch.Tensor:
        """Of segments of so many tokens, whose first ones [b] are entries of these numbers, those that this rank
        stores, [b, n]; some of them may lie behind the segment's end.
        """
        own = torch.arange(-(-length // self.ranks), device=first.device) * self.ranks
        return (self.rank - first)[:, None] % self.ranks + own

    def best(self, ranked: torch.Tensor) -> torch.Tensor:
        """Each rank's k best [B, S, k], in numbers of which a larger one is better, -> the k best of all, in order."""
        if self.ranks == 1:
            return ranked
        return self.border.gathered(ranked.mT).mT.topk(ranked.shape[-1], dim=-1).values

    def whole(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """rows [B, S, N, W] of entries at places [B, S, N], of which a rank's own are right, -> all of them right; a
        rank gets the gradients of its own from all ranks.
        """
        if self.ranks == 1:
            return rows
        mine = places % self.ranks == self.rank
        return self.border.enter(self.border.leave(rows.where(mine[..., None], 0)))
