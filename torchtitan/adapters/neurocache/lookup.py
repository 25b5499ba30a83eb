"""Lookup of the entries that a token retrieves: the nearest ones and their neighbours in the document.

Entries are identified by their age: 0 for the one that was stored last, 1 for the one before. Neighbours in the
document have adjacent ages, wherever the ring buffer wraps.

A cache can be sharded over the ranks of tensor parallel: each has every n-th place, and so every n-th entry of a
document. All ranks have the same queries. Each finds the best of its local entries, and the best of these are the best
of all. The rows are then combined by a sum, to which a rank contributes its local entries and zeros otherwise.

Shapes: B lanes, S tokens, M places of a cache, C width of a key, k hits, N entries of a token, W their width.
"""

from typing import Any, NamedTuple

import torch

from torchtitan.adapters.neurocache.sizes import BUCKETS, KEY
from torchtitan.core.errors import JobError
from torchtitan.models.layers import autocast_off


class Share:
    """One rank's share of a cache. `border`: that of tensor parallel; None if each rank has the full cache."""

    def __init__(self, border: Any = None):
        self.border = border
        self.rank, self.ranks = (0, 1) if border is None else (border.rank, border.size)

    def part(self, size: int) -> int:
        """Return the number of a rank's places out of `size`. Raises JobError if the ranks do not divide it."""
        if size % self.ranks:
            remedy = f'write {max(1, size // self.ranks) * self.ranks}, or {KEY}cache_shard = "none"'
            raise JobError(f"{KEY}cache_size: given {size}; allowed: a multiple of {self.ranks} ranks; {remedy}")
        return size // self.ranks

    def places(self, size: int, device: torch.device) -> torch.Tensor:
        """Return the indices of this rank's places, [size / ranks]."""
        return torch.arange(self.rank, size, self.ranks, device=device)

    def tokens(self, first: torch.Tensor, length: int) -> torch.Tensor:
        """Return the tokens of segments that this rank stores, [b, n]; some may lie beyond the segment's end.

        `first` [b]: entry numbers of the segments' first tokens. `length`: tokens of a segment.
        """
        offsets = torch.arange(-(-length // self.ranks), device=first.device) * self.ranks
        return (self.rank - first)[:, None] % self.ranks + offsets

    def best(self, ranked: torch.Tensor) -> torch.Tensor:
        """Reduce each rank's k best [B, S, k] (a larger number is better) to the k best of all ranks, in order."""
        if self.ranks == 1:
            return ranked
        return self.border.gathered(ranked.mT).mT.topk(ranked.shape[-1], dim=-1).values

    def whole(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Combine rows [B, S, N, W] of entries at places [B, S, N], of which each rank has valid values for its own.

        In backward, a rank gets the gradients of its rows from all ranks.
        """
        if self.ranks == 1:
            return rows
        is_local = places % self.ranks == self.rank
        return self.border.enter(self.border.leave(rows.where(is_local[..., None], 0)))


WHOLE = Share()
_NOTHING = torch.iinfo(torch.int64).min


class Found(NamedTuple):
    """Retrieved entries of each token."""

    ages: torch.Tensor  # int64 [B, S, N]
    there: torch.Tensor  # bool [B, S, N], True for existing entries; other ages are meaningless


def nearest(
    queries: torch.Tensor,
    keys: torch.Tensor,
    counts: torch.Tensor,
    topk: int,
    *,
    similarity: str = "l2",
    bucketed: bool = False,
    block_bytes: int = 2**28,
    share: Share = WHOLE,
) -> Found:
    """Return the `topk` best entries for queries [B, S, C] among keys [B or 1, M, C], best first.

    `counts` [B]: number of entries ever stored; entry n lies at place n mod M. In a sharded cache, keys are those of
    this rank's `share`, and the result covers all ranks.

    Scores are 2 q k' - |k|^2 ("l2") or q k' ("dot"), in float32 (or float64). Of equal scores the later entry wins.
    `bucketed`: place i is in bucket i mod 512, and a bucket yields only its best entry. `block_bytes` limits the
    memory of scores that are computed at a time.
    """
    dtype = torch.promote_types(queries.dtype, torch.float32)
    size = keys.shape[1]
    ages, there = ages_of(size * share.ranks, counts, share)  # [B, M]
    rows = max(1, block_bytes // (4 * size))
    parts = []
    with torch.no_grad(), autocast_off(queries.device.type):
        for lane, lane_queries in enumerate(queries):
            lane_keys = keys[lane % len(keys)].to(dtype)
            squares = lane_keys.square().sum(-1) if similarity == "l2" else None
            for part in lane_queries.to(dtype).split(rows):
                scores = part @ lane_keys.t()
                scores = scores if squares is None else scores.mul_(2).sub_(squares)
                parts.append(_best(scores, ages[lane], there[lane], topk, bucketed))
    best = share.best(torch.cat(parts).view(*queries.shape[:2], topk))
    return Found(_ages(best), best != _NOTHING)


def ages_of(size: int, counts: torch.Tensor, share: Share = WHOLE) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ages of a rank's places, [B, M], and a mask of those that hold an entry."""
    places = share.places(size, counts.device)
    ages = (counts[:, None] - 1 - places) % size
    return ages, ages < counts[:, None]


def beside(hits: Found, window: int, size: int, counts: torch.Tensor) -> Found:
    """Extend each hit by its neighbours, [B, S, k] -> [B, S, k window].

    These are the entries from window / 2 - 1 before to window / 2 after it in the document, if they are in a cache of
    that size.
    """
    offsets = torch.arange(-(window // 2) + 1 if window > 1 else 0, window // 2 + 1, device=counts.device)
    ages = hits.ages[..., None] - offsets
    there = hits.there[..., None] & (ages >= 0) & (ages < counts.clamp(max=size)[:, None, None, None])
    return Found(ages.flatten(-2), there.flatten(-2))


def places_of(found: Found, size: int, counts: torch.Tensor) -> torch.Tensor:
    """Return the places of entries, [B, S, N]; 0 for missing ones."""
    places = (counts[:, None, None] - 1 - found.ages) % size
    return places.where(found.there, 0)


def _best(scores: torch.Tensor, ages: torch.Tensor, there: torch.Tensor, topk: int, bucketed: bool) -> torch.Tensor:
    """Return the best [S, topk] of scores [S, M], ages and there [M], as numbers that order by score, then age."""
    ranked = _ordered(scores) - ages
    ranked.masked_fill_(~there, _NOTHING)
    if bucketed:
        ranked = ranked.unflatten(-1, (-1, BUCKETS)).amax(-2)
    best = ranked.topk(min(topk, ranked.shape[-1]), dim=-1).values
    return torch.nn.functional.pad(best, (0, topk - best.shape[-1]), value=_NOTHING)


def _ordered(scores: torch.Tensor) -> torch.Tensor:
    """Map float32 to int64 in the same order, with the lower 32 bits free.

    The bits of floats are ordered like integers, reversed for negative ones; 0.0 and -0.0 become equal.
    """
    bits = (scores.float() + 0.0).view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.long() << 32) + 0xFFFFFFFF


def _ages(ranked: torch.Tensor) -> torch.Tensor:
    return 0xFFFFFFFF - (ranked & 0xFFFFFFFF)
