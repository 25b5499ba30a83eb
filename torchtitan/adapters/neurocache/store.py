"""Storage of cache entries: a few tensors per lane, as a ring buffer or with least-recently-used eviction.

They are neither parameters nor buffers: each rank has those of its own lanes, and they are not sharded or averaged.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from torchtitan.adapters.neurocache.lookup import WHOLE, Found, Share, ages_of, places_of

_NEVER = torch.iinfo(torch.int32).max


class Segment(NamedTuple):
    """Segments of some lanes to be stored.

    `lanes`: slice of b lanes. `counts` [b]: entries stored before. `filled` [b]: tokens that are no padding. `states`:
    tensors [b, S, width] by layer and name.
    """

    lanes: slice
    counts: torch.Tensor
    filled: torch.Tensor
    states: dict[tuple[int, str], torch.Tensor]
    used: dict[int, Found]  # by storing layer, its entries that were retrieved


class Store:
    """Entries of `lanes` documents, `size` each, with tensors of these `widths` by name for every storing layer.

    `order`: "fifo" retains the entries that were stored last, as a ring buffer; "lru" those that were retrieved or
    stored last. With "lru", entries are in the document's order from place 0 on, so lookup.py's formulas apply to both.
    `pairs`: also store tokens and labels (hits.py). `share`: the part of the entries that this rank has.
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
        share: Share = WHOLE,
    ):
        self.lanes, self.size, self.order, self.share = lanes, size, order, share
        self.counts = torch.zeros(lanes, dtype=torch.int64, device=device)
        self.kept = {
            (layer, name): torch.zeros(lanes, share.part(size), width, dtype=dtype, device=device)
            for layer in layers
            for name, width in widths.items()
        }
        if pairs:
            shape = lanes, share.part(size), 2
            self.kept |= {(layer, "pairs"): torch.zeros(shape, dtype=torch.int32, device=device) for layer in layers}
        self.used: dict[int, torch.Tensor] = {}
        if order == "lru":
            self.used = {layer: torch.zeros(lanes, size, dtype=torch.int32, device=device) for layer in layers}
        self.time = 0  # of the last commit
        self.most = 0  # upper bound of the entries of any lane, known on the host

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.kept.values(), *self.used.values()))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the full state by names for a checkpoint. Tensors share memory; host values are copied."""
        tensors = {f"{layer}.{name}": tensor for (layer, name), tensor in self.kept.items()}
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
    def commit(self, segment: Segment) -> None:
        """Store a segment in place. Computations that read the old entries must have finished."""
        length = next(iter(segment.states.values())).shape[1]
        assert length <= self.size, "two tokens of a segment would have one place"
        first = segment.counts
        if self.order == "lru":
            self.time += 1
            first = self._make_room(segment)
        tokens = self.share.tokens(first, length)  # [b, n]
        is_there = tokens < segment.filled[:, None]
        targets = (first[:, None] + tokens) % self.size // self.share.ranks
        for key, states in segment.states.items():
            stored = self.kept[key][segment.lanes]
            if self.share.ranks > 1:
                local_tokens = tokens.clamp(max=length - 1)[..., None]
                states = states.gather(1, local_tokens.expand(-1, -1, states.shape[-1]))
            index = targets[..., None].expand(-1, -1, states.shape[-1])
            stored.scatter_(
                1, index, torch.where(is_there[..., None], states.to(stored.dtype), stored.gather(1, index))
            )
        for used in self.used.values():
            local_tokens = used[segment.lanes]
            local_tokens.scatter_(1, targets, torch.where(is_there, self.time, local_tokens.gather(1, targets)))
        self.counts[segment.lanes] = first + segment.filled
        self.most = min(self.size, self.most + length) if self.order == "lru" else self.most + length

    def _make_room(self, segment: Segment) -> torch.Tensor:
        """Evict the least recently used entries until the segment fits, compact the others and return their number.

        Entries that the segment's tokens retrieved count as used now.
        """
        counts = segment.counts
        drop = (counts + segment.filled - self.size).clamp(min=0)  # [b]
        _, there = ages_of(self.size, counts)
        for layer, used in self.used.items():
            lane_used = used[segment.lanes]
            if layer in segment.used:
                retrieved = segment.used[layer]
                places = places_of(retrieved, self.size, counts).flatten(1)
                stamp = torch.where(retrieved.there.flatten(1), self.time, 0).int()
                lane_used.scatter_reduce_(1, places, stamp, "amax")
            ranks = lane_used.masked_fill(~there, _NEVER).argsort(dim=1, stable=True).argsort(dim=1)
            order = (ranks < drop[:, None]).int().argsort(dim=1, stable=True)  # evicted entries last
            lane_used.copy_(lane_used.gather(1, order))
            for (stored_layer, _), tensor in self.kept.items():
                if stored_layer == layer:
                    lanes = tensor[segment.lanes]
                    lanes.copy_(lanes.gather(1, order[..., None].expand_as(lanes)))
        return counts - drop
