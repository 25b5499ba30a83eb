"""The order of documents: every epoch's shuffled sequence is dealt to lanes, and each lane goes its own way.

Which lane a sample comes from, mixing.py says. The number of lanes is a function of the data alone: the order is the
same for any number of ranks and workers. A lane that has used up its documents begins its next epoch without waiting
for the others.

* An Indexed source: the epoch's permutation of all documents, dealt one by one.
* A Stream of few parts: one pass over the parts in shuffled order, documents dealt one by one; a reader keeps what
  comes for those of its lanes that are behind. Documents are shuffled within blocks of BLOCK.
* A Stream of many parts of even size (the shards of a big dataset): each lane has parts of its own.

Without shuffling there is one lane, as several would pack documents that are not neighbours into one sample.
"""

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from torchtitan.datasets.shuffle import key, permute
from torchtitan.datasets.sources import DataError, Indexed, Item, Part, Stream, attempt

MAX_LANES = 64
LEAST_DOCUMENTS = 8
"""Per lane; a small source has fewer lanes instead: the fewer documents, the more unlike in length the lanes, and the
sooner a short one repeats itself."""
BLOCK = 1024
EMPTY_EPOCHS = 8
"""A lane gives up when it has found no text for so many of its epochs."""


class Place(NamedTuple):
    """Of a document in its lane. Stable over runs: it is what a checkpoint keeps."""

    epoch: int = 0
    part: int = 0
    ordinal: int = 0


class IndexedLanes:
    def __init__(self, source: Indexed, seed: int, shuffle: bool) -> None:
        self.source, self.seed, self.shuffle = source, seed, shuffle
        self.count = lanes_for(len(source)) if shuffle else 1

    def reader(self, places: dict[int, Place]) -> "IndexedReader":
        """Reads on from these places; the lanes that it will be asked for are the keys."""
        return IndexedReader(self, dict(places))

    def first_epoch(self) -> Iterator[tuple[int, Item]]:
        """Every document once, with its lane."""
        for n, index in enumerate(self.order(0, np.arange(len(self.source))).tolist()):
            yield n % self.count, attempt(self.source.get, index)

    def order(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return permute(positions, len(self.source), key(self.seed, epoch)) if self.shuffle else positions


class IndexedReader:
    """Works the order out for AHEAD documents of a lane at a time."""

    AHEAD = 64

    def __init__(self, lanes: IndexedLanes, places: dict[int, Place]) -> None:
        self.lanes, self.places = lanes, places
        self._ahead: dict[int, tuple[int, int, list[int]]] = {}

    def next(self, lane: int) -> tuple[Place, Item]:
        epoch, _, ordinal = self.places[lane]
        if lane + ordinal * self.lanes.count >= len(self.lanes.source):
            epoch, ordinal = epoch + 1, 0
        self.places[lane] = Place(epoch, 0, ordinal + 1)
        return Place(epoch, 0, ordinal), attempt(self.lanes.source.get, self._index(lane, epoch, ordinal))

    def _index(self, lane: int, epoch: int, ordinal: int) -> int:
        known_epoch, first, indices = self._ahead.get(lane, (-1, 0, []))
        if epoch != known_epoch or not first <= ordinal < first + len(indices):
            positions = lane + np.arange(ordinal, ordinal + self.AHEAD) * self.lanes.count
            first, indices = ordinal, self.lanes.order(epoch, positions[positions < len(self.lanes.source)]).tolist()
            self._ahead[lane] = (epoch, first, indices)
        return indices[ordinal - first]


class StreamLanes:
    """`stop`: raise an error that shows while the documents are counted."""

    def __init__(self, source: Stream, seed: int, shuffle: bool, stop: bool) -> None:
        self.source, self.seed, self.shuffle = source, seed, shuffle
        self.own_parts = shuffle and _even(source.parts)
        documents = 0 if self.own_parts else self._records(MAX_LANES * LEAST_DOCUMENTS, stop)
        self.count = MAX_LANES if self.own_parts else lanes_for(documents) if shuffle else 1

    def reader(self, places: dict[int, Place]) -> "StreamReader":
        return StreamReader(self, dict(places))

    def first_epoch(self) -> Iterator[tuple[int, Item]]:
        for lane in range(self.count) if self.own_parts else [0]:
            for place, item in self.read(lane, Place()):
                yield lane if self.own_parts else self.lane_of(place), item

    def lane_of(self, place: Place) -> int:
        # Dealt anew in every round and part: with a fixed deal, data that alternates (question, answer) would give each
        # lane documents of one kind, and the lanes of the short ones would run epochs ahead. Parts of a few documents
        # reach all lanes too.
        turn, place_in_turn = divmod(place.ordinal, self.count)
        return _deal(self.seed, place.part, turn, self.count)[place_in_turn]

    def read(self, group: int, start: Place) -> Iterator[tuple[Place, Item]]:
        """The documents of one epoch from a place on: of a lane's own parts (group = lane), or all (group 0)."""
        epoch, first_part, first_ordinal = start
        parts = self._parts(group, epoch)
        for position in range(first_part, len(parts)):
            number, begin = parts[position], first_ordinal // BLOCK * BLOCK
            records = self.source.parts[number].read(begin)
            while block := list(islice(records, BLOCK)):
                order = np.arange(len(block))
                if self.shuffle:
                    order = permute(order, len(block), key(self.seed, epoch, number, begin // BLOCK))
                for i in order[max(0, first_ordinal - begin) :].tolist():
                    yield Place(epoch, position, first_ordinal), block[i]
                    first_ordinal += 1
                begin += BLOCK
            first_ordinal = 0

    def _parts(self, group: int, epoch: int) -> list[int]:
        numbers = list(range(len(self.source.parts)))
        if self.own_parts:
            numbers = sorted(numbers, key=lambda i: -self.source.parts[i].size)[group :: self.count]
        if not self.shuffle:
            return sorted(numbers)
        order = permute(np.arange(len(numbers)), len(numbers), key(self.seed, epoch, group))
        return [numbers[i] for i in order.tolist()]

    def _records(self, enough: int, stop: bool) -> int:
        """How many there are, counted no further than is needed."""
        found = 0
        for part in self.source.parts:
            for item in islice(part.read(0), enough - found):
                if stop and isinstance(item, DataError):
                    raise item
                found += 1
            if found == enough:
                break
        if not found:
            raise DataError(f"{self.source.name}: there is not one document in it; give data with text")
        return found


class StreamReader:
    """One pass over the stream for each epoch that a lane is in; what comes for the other lanes waits in queues."""

    def __init__(self, lanes: StreamLanes, places: dict[int, Place]) -> None:
        self.lanes, self.places = lanes, places
        self._streams: dict[tuple[int, int], Iterator[tuple[Place, Item]]] = {}
        self._waiting: dict[tuple[int, int], deque[tuple[Place, Item]]] = {}

    def next(self, lane: int) -> tuple[Place, Item]:
        epoch = self.places[lane].epoch
        for later in range(epoch, epoch + EMPTY_EPOCHS):
            found = self._next_of_epoch(lane, later)
            if found is not None:
                place = found[0]
                self.places[lane] = place._replace(ordinal=place.ordinal + 1)
                return found
        raise no_text(self.lanes.source.name, lane, self.lanes.count)

    def _next_of_epoch(self, lane: int, epoch: int) -> tuple[Place, Item] | None:
        group = lane if self.lanes.own_parts else 0
        if (group, epoch) not in self._streams:
            self._open(group, epoch)
        queue = self._waiting[lane, epoch]
        for place, item in () if queue else self._streams[group, epoch]:
            owner = lane if self.lanes.own_parts else self.lanes.lane_of(place)
            if owner in self.places and place >= self._start(owner, epoch):
                self._waiting[owner, epoch].append((place, item))
                if owner == lane:
                    break
        if queue:
            return queue.popleft()
        self.places[lane] = Place(epoch + 1)
        self._close_finished(group)
        return None

    def _group(self, group: int) -> list[int]:
        return [group] if self.lanes.own_parts else list(self.places)

    def _start(self, lane: int, epoch: int) -> Place:
        """Where a lane's next document of the epoch may be. Beyond the epoch if the lane is through with it."""
        return max(self.places[lane], Place(epoch))

    def _open(self, group: int, epoch: int) -> None:
        starts = [self._start(lane, epoch) for lane in self._group(group)]
        self._streams[group, epoch] = self.lanes.read(group, min(starts))
        for lane in self._group(group):
            self._waiting[lane, epoch] = deque()

    def _close_finished(self, group: int) -> None:
        oldest = min(self.places[lane].epoch for lane in self._group(group))
        for epoch in [e for g, e in self._streams if g == group and e < oldest]:
            del self._streams[group, epoch]
            for lane in self._group(group):
                del self._waiting[lane, epoch]


@lru_cache(maxsize=256)
def _deal(seed: int, part: int, turn: int, lanes: int) -> list[int]:
    """The lane of each document of a round."""
    return permute(np.arange(lanes), lanes, key(seed, part, turn)).tolist()


Lanes = IndexedLanes | StreamLanes
LaneReader = IndexedReader | StreamReader


def no_text(source: str, lane: int, lanes: int) -> DataError:
    return DataError(
        f"{source}: no text in {EMPTY_EPOCHS} epochs of lane {lane} of {lanes}; give documents with text (or set "
        "training.text_field to the field that holds it), or spread them over files more evenly"
    )


def lanes_for(documents: int) -> int:
    """The largest power of two that leaves every lane LEAST_DOCUMENTS."""
    return 1 << (min(max(documents // LEAST_DOCUMENTS, 1), MAX_LANES).bit_length() - 1)


def _even(parts: list[Part]) -> bool:
    """Whether the lanes can have parts of their own without some documents being seen more often than others."""
    if len(parts) < MAX_LANES or len({type(part) for part in parts}) > 1:
        return False
    sizes = sorted((part.size for part in parts), reverse=True)
    lanes = [sum(sizes[lane::MAX_LANES]) for lane in range(MAX_LANES)]
    return max(lanes) <= 1.1 * min(lanes)
