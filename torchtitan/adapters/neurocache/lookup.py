"""A cache over the ranks of tensor parallel: each has every n-th place, and with it every n-th entry of a document.

All ranks have the same queries, so each finds the best of its own entries, and the best of these are the best of all.
What was found is then brought together as a sum to which the rank that has an entry gives it, and the others nothing.

Letters of the shapes: B lanes, S tokens, k hits, N entries of a token, W their width.

Which entries of a cache a token finds: the nearest ones, and those that stand beside them.

Entries are told by their age: 0 for the one that was stored last, 1 for the one before. However they lie in memory (a
ring, whose seam means nothing), neighbours in the document have neighbouring ages.

Letters of the shapes: B lanes, S tokens, M places of a cache, C width of a key, k hits, N entries of a token.
"""

from typing import Any, NamedTuple

import torch

from torchtitan.adapters.neurocache.sizes import BUCKETS, KEY
from torchtitan.core.errors import JobError
from torchtitan.models.layers import autocast_off


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


WHOLE = Share()
_NOTHING = torch.iinfo(torch.int64).min


class Found(NamedTuple):
    """Entries for each token."""

    ages: torch.Tensor  # int64 [B, S, N]
    there: torch.Tensor  # bool [B, S, N]; where not, the age means nothing


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
    """The `topk` best entries for queries [B, S, C] among keys [B or 1, M, C], of whose places counts [B] say how many
    entries were ever stored: entry n lies at place n mod M. In order, the best first. Of a cache that several ranks
    have, keys are those of this rank's `share`, and what is found is of all.

    Scores are 2 q k' - |k|^2 ("l2") or q k' ("dot"), in float32 (or float64), of equal ones the later entry is the
    better. `bucketed`: place i is in bucket i mod 512, and a bucket gives its best entry alone. Scores are made for as
    many tokens at a time as `block_bytes` hold.
    """
    wide = torch.promote_types(queries.dtype, torch.float32)
    size = keys.shape[1]
    ages, there = ages_of(size * share.ranks, counts, share)  # [B, M]
    rows = max(1, block_bytes // (4 * size))
    parts = []
    with torch.no_grad(), autocast_off(queries.device.type):
        for lane, of_lane in enumerate(queries):
            each = keys[lane % len(keys)].to(wide)
            squares = each.square().sum(-1) if similarity == "l2" else None
            for part in of_lane.to(wide).split(rows):
                scores = part @ each.t()
                scores = scores if squares is None else scores.mul_(2).sub_(squares)
                parts.append(_best(scores, ages[lane], there[lane], topk, bucketed))
    best = share.best(torch.cat(parts).view(*queries.shape[:2], topk))
    return Found(_ages(best), best != _NOTHING)


def ages_of(size: int, counts: torch.Tensor, share: Share = WHOLE) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the places of caches that a rank has, [B, M], and whether there is an entry."""
    places = share.places(size, counts.device)
    ages = (counts[:, None] - 1 - places) % size
    return ages, ages < counts[:, None]


def beside(hits: Found, window: int, size: int, counts: torch.Tensor) -> Found:
    """With each hit the entries around it, [B, S, k] -> [B, S, k window]: those from window / 2 - 1 before it to
    window / 2 behind it in the document, as far as a cache of that size has them.
    """
    behind = torch.arange(-(window // 2) + 1 if window > 1 else 0, window // 2 + 1, device=counts.device)
    ages = hits.ages[..., None] - behind
    there = hits.there[..., None] & (ages >= 0) & (ages < counts.clamp(max=size)[:, None, None, None])
    return Found(ages.flatten(-2), there.flatten(-2))


def places_of(found: Found, size: int, counts: torch.Tensor) -> torch.Tensor:
    """Where entries lie, [B, S, N]; 0 for those that are not there."""
    places = (counts[:, None, None] - 1 - found.ages) % size
    return places.where(found.there, 0)


def _best(scores: torch.Tensor, ages: torch.Tensor, there: torch.Tensor, topk: int, bucketed: bool) -> torch.Tensor:
    """scores [S, M], ages and there [M] -> [S, topk]: score and age in one number, so that one choice is by both."""
    ranked = _ordered(scores) - ages
    ranked.masked_fill_(~there, _NOTHING)
    if bucketed:
        ranked = ranked.unflatten(-1, (-1, BUCKETS)).amax(-2)
    best = ranked.topk(min(topk, ranked.shape[-1]), dim=-1).values
    return torch.nn.functional.pad(best, (0, topk - best.shape[-1]), value=_NOTHING)


def _ordered(scores: torch.Tensor) -> torch.Tensor:
    """float32 -> int64 in the same order, with 32 bits to spare below. The bits of a float are in order as a whole
    number's are, backwards where it is negative; 0.0 and -0.0 are one.
    """
    bits = (scores.float() + 0.0).view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.long() << 32) + 0xFFFFFFFF


def _ages(ranked: torch.Tensor) -> torch.Tensor:
    return 0xFFFFFFFF - (ranked & 0xFFFFFFFF)
