"""The cache of one model: storage of entries, lookup of the nearest ones, and statistics of hits.

Entries are identified by their age: 0 for the one that was stored last, 1 for the one before. Neighbours in the
document have adjacent ages, wherever the ring buffer wraps.

A cache can be sharded over the ranks of tensor parallel: each rank has every n-th place, and so every n-th entry
of a document. All ranks have the same queries. Each finds the best of its local entries, and the best of these are the
best of all. The rows are then combined by a sum, to which a rank contributes its local entries and zeros otherwise.

Shapes: B lanes, S tokens, M places of a cache, C width of a key, k hits, N entries of a token, W their width.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from torchtitan.core.errors import JobError
from torchtitan.models.layers import autocast_off
from torchtitan.plugins.neurocache.sizes import BUCKETS, KEY


class CacheShard:
    """One rank's share of a cache. `border`: the tensor-parallel border; None if each rank has the full cache."""

    def __init__(self, border: Any = None):
        self.border = border
        self.rank, self.ranks = (0, 1) if border is None else (border.rank, border.size)

    def local_size(self, size: int) -> int:
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
        return self.border.all_gather(ranked.mT).mT.topk(ranked.shape[-1], dim=-1).values

    def combine(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Combine rows [B, S, N, W] of entries at places [B, S, N]. Each rank has valid values for its places only.

        In backward, a rank gets the gradients of its rows from all ranks.
        """
        if self.ranks == 1:
            return rows
        is_local = places % self.ranks == self.rank
        return self.border.enter(self.border.leave(rows.where(is_local[..., None], 0)))


FULL_CACHE = CacheShard()
_NOTHING = torch.iinfo(torch.int64).min


class EntryAges(NamedTuple):
    """Retrieved entries of each token."""

    ages: torch.Tensor  # int64 [B, S, N]
    exists: torch.Tensor  # bool [B, S, N], True for existing entries; other ages are meaningless


def nearest(
    queries: torch.Tensor,
    keys: torch.Tensor,
    counts: torch.Tensor,
    topk: int,
    *,
    similarity: str = "l2",
    bucketed: bool = False,
    block_bytes: int = 2**28,
    share: CacheShard = FULL_CACHE,
) -> EntryAges:
    """Return the `topk` best entries for queries [B, S, C] among keys [B or 1, M, C], best first.

    `counts` [B]: number of entries ever stored; entry n is stored at place n mod M. In a sharded cache, `keys` holds
    only this rank's `share`, and the result covers all ranks.

    Scores are 2 q k' - |k|^2 ("l2") or q k' ("dot"), in float32 (or float64). Of equal scores the later entry wins.
    `bucketed`: place i is in bucket i mod 512, and a bucket yields only its best entry. `block_bytes` limits the
    memory of scores that are computed at a time.
    """
    dtype = torch.promote_types(queries.dtype, torch.float32)
    size = keys.shape[1]
    ages, exists = place_ages(size * share.ranks, counts, share)  # [B, M]
    rows = max(1, block_bytes // (4 * size))
    parts = []
    with torch.no_grad(), autocast_off(queries.device.type):
        for lane, lane_queries in enumerate(queries):
            lane_keys = keys[lane % len(keys)].to(dtype)
            squares = lane_keys.square().sum(-1) if similarity == "l2" else None
            for part in lane_queries.to(dtype).split(rows):
                scores = part @ lane_keys.t()
                scores = scores if squares is None else scores.mul_(2).sub_(squares)
                parts.append(_best(scores, ages[lane], exists[lane], topk, bucketed))
    best = share.best(torch.cat(parts).view(*queries.shape[:2], topk))
    return EntryAges(_ages(best), best != _NOTHING)


def place_ages(size: int, counts: torch.Tensor, share: CacheShard = FULL_CACHE) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ages of a rank's places, [B, M], and a mask of places that hold an entry."""
    places = share.places(size, counts.device)
    ages = (counts[:, None] - 1 - places) % size
    return ages, ages < counts[:, None]


def with_neighbours(hits: EntryAges, window: int, size: int, counts: torch.Tensor) -> EntryAges:
    """Extend each hit by its neighbours, [B, S, k] -> [B, S, k window].

    These are the entries from window / 2 - 1 before to window / 2 after it in the document, if they are in a cache of
    that size.
    """
    offsets = torch.arange(-(window // 2) + 1 if window > 1 else 0, window // 2 + 1, device=counts.device)
    ages = hits.ages[..., None] - offsets
    exists = hits.exists[..., None] & (ages >= 0) & (ages < counts.clamp(max=size)[:, None, None, None])
    return EntryAges(ages.flatten(-2), exists.flatten(-2))


def entry_places(entries: EntryAges, size: int, counts: torch.Tensor) -> torch.Tensor:
    """Return the places of entries, [B, S, N]; 0 for missing ones."""
    places = (counts[:, None, None] - 1 - entries.ages) % size
    return places.where(entries.exists, 0)


def _best(scores: torch.Tensor, ages: torch.Tensor, exists: torch.Tensor, topk: int, bucketed: bool) -> torch.Tensor:
    """Return the best [S, topk] of scores [S, M], as numbers that order by score, then age. `exists` masks ages [M]."""
    ranked = _ordered(scores) - ages
    ranked.masked_fill_(~exists, _NOTHING)
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


_NEVER = torch.iinfo(torch.int32).max


class CacheSegment(NamedTuple):
    """Segments of some lanes to be stored.

    `lanes`: slice of b lanes. `counts` [b]: entries stored before. `filled` [b]: tokens that are no padding. `states`:
    tensors [b, S, width] by layer and name.
    """

    lanes: slice
    counts: torch.Tensor
    filled: torch.Tensor
    states: dict[tuple[int, str], torch.Tensor]
    used: dict[int, EntryAges]  # by storing layer, its entries that were retrieved


class CacheStore:
    """Entries of `lanes` documents, `size` each, with tensors of these `widths` by name for every storing layer.

    `order`: "fifo" retains the entries that were stored last, as a ring buffer; "lru" the entries that were retrieved
    or stored last. With "lru", entries are in the document's order from place 0 on, so ages are computed alike.
    `pairs`: also store tokens and labels, for `HitStatistics`. `share`: the part of the entries that this rank has.
    """

    def __init__(
        self,
        lanes: int,
        size: int,
        layers: list[int],
        widths: Mapping[str, int],
        dtype: torch.dtype,
        device: torch.device,
        order: str = "fifo",
        pairs: bool = False,
        share: CacheShard = FULL_CACHE,
    ):
        self.lanes, self.size, self.order, self.share = lanes, size, order, share
        self.counts = torch.zeros(lanes, dtype=torch.int64, device=device)
        self.entries = {
            (layer, name): torch.zeros(lanes, share.local_size(size), width, dtype=dtype, device=device)
            for layer in layers
            for name, width in widths.items()
        }
        if pairs:
            shape = lanes, share.local_size(size), 2
            self.entries |= {(layer, "pairs"): torch.zeros(shape, dtype=torch.int32, device=device) for layer in layers}
        self.used: dict[int, torch.Tensor] = {}
        if order == "lru":
            self.used = {layer: torch.zeros(lanes, size, dtype=torch.int32, device=device) for layer in layers}
        self.time = 0  # of the last commit
        self.most = 0  # upper bound of the entries of any lane, known on the host

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.entries.values(), *self.used.values()))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the full state by names for a checkpoint. Tensors share memory; host values are copied."""
        tensors = {f"{layer}.{name}": tensor for (layer, name), tensor in self.entries.items()}
        tensors |= {f"{layer}.used": tensor for layer, tensor in self.used.items()}
        return tensors | {"counts": self.counts, "clock": torch.tensor([self.time, self.most])}

    def set_clock(self, clock: torch.Tensor) -> None:
        """Restore the host values from clock [2], as returned by `tensors`."""
        self.time, self.most = clock.tolist()

    @property
    def reach(self) -> int:
        """Return the number of places that may have an entry."""
        return min(self.most, self.size)

    @torch.no_grad()
    def commit(self, segment: CacheSegment) -> None:
        """Store a segment in place. Computations that read the old entries must have finished."""
        length = next(iter(segment.states.values())).shape[1]
        assert length <= self.size, "two tokens of a segment would have one place"
        first = segment.counts
        if self.order == "lru":
            self.time += 1
            first = self._make_room(segment)
        tokens = self.share.tokens(first, length)  # [b, n]
        is_filled = tokens < segment.filled[:, None]
        targets = (first[:, None] + tokens) % self.size // self.share.ranks
        for key, states in segment.states.items():
            stored = self.entries[key][segment.lanes]
            if self.share.ranks > 1:
                local_tokens = tokens.clamp(max=length - 1)[..., None]
                states = states.gather(1, local_tokens.expand(-1, -1, states.shape[-1]))
            index = targets[..., None].expand(-1, -1, states.shape[-1])
            stored.scatter_(
                1, index, torch.where(is_filled[..., None], states.to(stored.dtype), stored.gather(1, index))
            )
        for used in self.used.values():
            local_tokens = used[segment.lanes]
            local_tokens.scatter_(1, targets, torch.where(is_filled, self.time, local_tokens.gather(1, targets)))
        self.counts[segment.lanes] = first + segment.filled
        self.most = min(self.size, self.most + length) if self.order == "lru" else self.most + length

    def _make_room(self, segment: CacheSegment) -> torch.Tensor:
        """Evict the least recently used entries until the segment fits, compact the others and return their number.

        Entries that the segment's tokens retrieved count as used now.
        """
        counts = segment.counts
        drop = (counts + segment.filled - self.size).clamp(min=0)  # [b]
        _, exists = place_ages(self.size, counts)
        for layer, used in self.used.items():
            lane_used = used[segment.lanes]
            if layer in segment.used:
                retrieved = segment.used[layer]
                places = entry_places(retrieved, self.size, counts).flatten(1)
                stamp = torch.where(retrieved.exists.flatten(1), self.time, 0).int()
                lane_used.scatter_reduce_(1, places, stamp, "amax")
            ranks = lane_used.masked_fill(~exists, _NEVER).argsort(dim=1, stable=True).argsort(dim=1)
            order = (ranks < drop[:, None]).int().argsort(dim=1, stable=True)  # evicted entries last
            lane_used.copy_(lane_used.gather(1, order))
            for (stored_layer, _), tensor in self.entries.items():
                if stored_layer == layer:
                    lanes = tensor[segment.lanes]
                    lanes.copy_(lanes.gather(1, order[..., None].expand_as(lanes)))
        return counts - drop


UNKNOWN = -1
"""Label of an entry without a loss; no token has this id."""


class PairComparison(NamedTuple):
    """Comparison of tokens with their retrieved entries, by position in the segment."""

    is_counted: torch.Tensor  # bool [B, S], True if the token has a label and an entry
    hit: torch.Tensor  # bool [B, S]
    same: torch.Tensor  # bool [B, S, k]
    exists: torch.Tensor  # bool [B, S, k]


def pairs(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Pack tokens and labels [B, S] to int32 [B, S, 2]. Labels are negative for tokens without a loss."""
    return torch.stack((tokens, labels.clamp(min=UNKNOWN)), dim=-1).int()


def compare_pairs(token_pairs: torch.Tensor, entry_pairs: torch.Tensor, exists: torch.Tensor) -> PairComparison:
    """Compare pairs [B, S, 2] with the pairs of each token's entries, [B, S, k, 2], masked by `exists` [B, S, k]."""
    tokens, labels = token_pairs[..., None, 0], token_pairs[..., None, 1]
    hit = (exists & (entry_pairs[..., 1] == labels)).any(-1)
    return PairComparison(
        (labels[..., 0] != UNKNOWN) & exists.any(-1), hit, exists & (entry_pairs[..., 0] == tokens), exists
    )


class HitStatistics:
    """The statistics of one memory, summed since the last `take_sums`."""

    names = ("cache_hits", "cache_same_token", "cache_filled")

    def __init__(self) -> None:
        self.sums: torch.Tensor | None = None  # float64 [3, 2]: for each name the count and its total

    def note(self, reader: int, comparison: PairComparison) -> None:
        """Count the entries that a microbatch's tokens retrieved before the layer `reader`."""
        is_counted = comparison.is_counted
        self._add(0, (is_counted & comparison.hit).sum(), is_counted.sum())
        self._add(1, (comparison.same & is_counted[..., None]).sum(), (comparison.exists & is_counted[..., None]).sum())

    def note_filled(self, counts: torch.Tensor, size: int) -> None:
        """Add the fill level of the lanes' caches of `size` places. `counts` [B]: entries stored per document."""
        self._add(2, counts.clamp(max=size).sum(), torch.full((), size * len(counts)))

    def _add(self, row: int, count: torch.Tensor, total: torch.Tensor) -> None:
        if self.sums is None:
            self.sums = torch.zeros(len(self.names), 2, dtype=torch.float64, device=count.device)
        self.sums[row] += torch.stack((count, total.to(count.device)))

    def take_sums(self) -> torch.Tensor:
        """Return the sums [3, 2], on the model's device, and reset them."""
        previous, self.sums = self.sums, None
        return torch.zeros(len(self.names), 2, dtype=torch.float64) if previous is None else previous
