"""What is kept of documents: a few tensors for each lane, a ring or, in another order, those used last.

These are no parameters and no buffers: a rank keeps those of its own lanes, nothing shards, averages or saves them.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from torchtitan.adapters.neurocache.lookup import WHOLE, Found, Share, ages_of, places_of

_NEVER = torch.iinfo(torch.int32).max


class Segment(NamedTuple):
    """What is to be stored of some lanes' segments: of their number `lanes`, [b], tensors [b, S, width] by layer and
    name, of which `filled` [b] tokens are there; `counts` [b] have been stored before.
    """

    lanes: slice
    counts: torch.Tensor
    filled: torch.Tensor
    states: dict[tuple[int, str], torch.Tensor]
    used: dict[int, Found]  # by storing layer, what its entries were found


class Store:
    """Of `lanes` documents with `size` entries each, in every storing layer the tensors `widths` by name; with `pairs`
    these too (hits.py).

    `order`: "fifo" keeps the entries that were stored last, a ring; "lru" those that were found or stored last. There
    entries lie in the document's order from place 0 on, so that both are read by lookup.py's formulas.
    `share`: which of the entries this rank has.
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
            self.kept |= {(each, "pairs"): torch.zeros(shape, dtype=torch.int32, device=device) for each in layers}
        self.used: dict[int, torch.Tensor] = {}
        if order == "lru":
            self.used = {layer: torch.zeros(lanes, size, dtype=torch.int32, device=device) for layer in layers}
        self.time = 0  # of the last commit
        self.most = 0  # no lane has had more entries, by what the host knows

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.kept.values(), *self.used.values()))

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that there is to it, sharing memory, by names for a checkpoint. What the host knows is a copy."""
        named = {f"{layer}.{name}": tensor for (layer, name), tensor in self.kept.items()}
        named |= {f"{layer}.used": tensor for layer, tensor in self.used.items()}
        return named | {"counts": self.counts, "clock": torch.tensor([self.time, self.most])}

    def set_clock(self, clock: torch.Tensor) -> None:
        """clock [2], as `tensors` gave it."""
        self.time, self.most = clock.tolist()

    @property
    def reach(self) -> int:
        """Places that may have an entry."""
        return min(self.most, self.size)

    @torch.no_grad()
    def commit(self, segment: Segment) -> None:
        """What was computed from the cache before does not change, so that who still needs it has to be through."""
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
            kept = self.kept[key][segment.lanes]
            if self.share.ranks > 1:
                own = tokens.clamp(max=length - 1)[..., None]
                states = states.gather(1, own.expand(-1, -1, states.shape[-1]))
            index = targets[..., None].expand(-1, -1, states.shape[-1])
            kept.scatter_(1, index, torch.where(is_there[..., None], states.to(kept.dtype), kept.gather(1, index)))
        for used in self.used.values():
            own = used[segment.lanes]
            own.scatter_(1, targets, torch.where(is_there, self.time, own.gather(1, targets)))
        self.counts[segment.lanes] = first + segment.filled
        self.most = min(self.size, self.most + length) if self.order == "lru" else self.most + length

    def _make_room(self, segment: Segment) -> torch.Tensor:
        """Drop what was used longest ago until the segment fits, and move the others together; how many are left. What
        the segment's tokens found was used now.
        """
        counts = segment.counts
        drop = (counts + segment.filled - self.size).clamp(min=0)  # [b]
        _, there = ages_of(self.size, counts)
        for layer, used in self.used.items():
            own = used[segment.lanes]
            if layer in segment.used:
                found = segment.used[layer]
                places = places_of(found, self.size, counts).flatten(1)
                stamp = torch.where(found.there.flatten(1), self.time, 0).int()
                own.scatter_reduce_(1, places, stamp, "amax")
            ranks = own.masked_fill(~there, _NEVER).argsort(dim=1, stable=True).argsort(dim=1)
            order = (ranks < drop[:, None]).int().argsort(dim=1, stable=True)  # the dropped behind the others
            own.copy_(own.gather(1, order))
            for (of_layer, _), tensor in self.kept.items():
                if of_layer == layer:
                    lanes = tensor[segment.lanes]
                    lanes.copy_(lanes.gather(1, order[..., None].expand_as(lanes)))
        return counts - drop
