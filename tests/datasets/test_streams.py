"""Tests of the order of documents: permutations, lanes, and readers that start at any position."""

import gzip
import json
from itertools import islice

import numpy as np
import pytest

from torchtitan.datasets.shuffle import key, permute
from torchtitan.datasets.sources import DataError, Document, IndexedSource, Part, SequentialSource
from torchtitan.datasets.sources.files import text
from torchtitan.datasets.streams import (
    BLOCK,
    MAX_EMPTY_EPOCHS,
    MAX_STREAMS,
    DocumentPosition,
    IndexedStreams,
    SequentialStreams,
)

# Permutations


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 16, 17, 100, 1023, 1024, 1025, 5000])
def test_permute_is_a_permutation(length):
    shuffled = permute(np.arange(length), length, key(7, length))
    assert sorted(shuffled.tolist()) == list(range(length))
    # Any element can be computed alone.
    for i in range(0, length, max(1, length // 7)):
        assert permute(np.array([i]), length, key(7, length))[0] == shuffled[i]


def test_permutations_differ_by_key_and_look_random():
    n = 4096
    orders = [permute(np.arange(n), n, key(0, epoch)) for epoch in range(8)]
    for a in range(8):
        # Fixed points of a random permutation: 1 in the mean. Neighbours are no nearer than by chance.
        assert (orders[a] == np.arange(n)).sum() <= 6
        assert abs(np.abs(np.diff(orders[a])).mean() - n / 3) < n / 20
        for b in range(a):
            assert (orders[a] == orders[b]).sum() <= 8
    # Where the first element goes is even over the range.
    first = [int(permute(np.array([0]), 10, key(seed))[0]) for seed in range(1000)]
    assert all(60 <= first.count(i) <= 145 for i in range(10))


def test_permutations_never_change():
    """A change of the function would change the order of every job that resumes."""
    assert permute(np.arange(10), 10, key(0, 0)).tolist() == [8, 6, 5, 9, 4, 0, 3, 7, 2, 1]
    assert permute(np.array([0, 10**12]), 10**13, key(1, 2)).tolist() == [7863920891391, 5188061598579]


# Sources made of numbers: document i has the text "i"


class Numbers(Part):
    """A part of a source with consecutive numbers as documents."""

    def __init__(self, first, count, bad_numbers=(), size=1):
        self.first, self.count, self.bad_numbers, self.size = first, count, bad_numbers, size
        self.read_from = []

    def __len__(self):
        return self.count

    def item(self, i):
        number = self.first + i
        return DataError(f"{number} is bad") if number in self.bad_numbers else Document(str(number), "")

    def get(self, i):
        item = self.item(i)
        if isinstance(item, DataError):
            raise item
        return item

    def probe(self):
        pass

    def read(self, start):
        self.read_from.append(start)
        return (self.item(i) for i in range(start, self.count))


def indexed(count, **options):
    return IndexedSource(
        "numbers", {}, [Numbers(0, count // 2, **options), Numbers(count // 2, count - count // 2, **options)]
    )


def stream(*counts):
    firsts = np.cumsum([0, *counts])
    return SequentialSource(
        "numbers", {}, [Numbers(int(first), count, size=count) for first, count in zip(firsts, counts, strict=False)]
    )


def take_numbers(reader, lane, count):
    return [int(reader.next(lane)[1].text) for _ in range(count)]


@pytest.mark.parametrize("documents, lanes", [(1, 1), (15, 1), (16, 2), (100, 8), (511, 32), (512, 64), (10**6, 64)])
def test_number_of_lanes(documents, lanes):
    assert IndexedStreams(indexed(documents), 0, True).count == lanes
    assert SequentialStreams(stream(documents), 0, True, True).count == lanes


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    "build",
    [
        lambda s: IndexedStreams(indexed(267), 3, s),
        lambda s: SequentialStreams(stream(80, 0, 120, 67), 3, s, True),
        lambda s: SequentialStreams(stream(*[6] * 50), 3, s, True),
        lambda s: SequentialStreams(stream(BLOCK + 100, 2 * BLOCK, 5), 3, s, True),
        lambda s: SequentialStreams(stream(*[10] * 2 * MAX_STREAMS), 3, s, True),
    ],
)
def test_every_epoch_has_every_document_once(build, shuffle):
    lanes = build(shuffle)
    first_epoch = [(lane, int(item.text)) for lane, item in lanes.first_epoch()]
    total = len(first_epoch)
    assert sorted(n for _, n in first_epoch) == list(range(total))
    reader = lanes.reader({lane: DocumentPosition() for lane in range(lanes.count)})
    by_lane = {lane: [] for lane in range(lanes.count)}
    epochs: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for lane in by_lane:
        while True:
            place, item = reader.next(lane)
            if place.epoch > 2:
                break
            by_lane[lane].append((place, int(item.text)))
            epochs[place.epoch].append(int(item.text))
    for numbers in epochs.values():
        assert sorted(numbers) == list(range(total))
    for lane, items in by_lane.items():
        assert [n for place, n in items if place.epoch == 0] == [n for of_lane, n in first_epoch if of_lane == lane]
        assert [place for place, _ in items] == sorted(place for place, _ in items)
    if shuffle:
        assert epochs[0] != epochs[1] != epochs[2]

    # A reader of some lanes, starting at any position, gives the same items.
    for skip in (0, 1, 5):
        tails = {
            lane: items[min(skip * (lane + 1), len(items) - 1) :] for lane, items in by_lane.items() if lane % 3 == 0
        }
        other = build(shuffle).reader({lane: items[0][0] for lane, items in tails.items()})
        for lane in sorted(tails, reverse=True):
            assert take_numbers(other, lane, len(tails[lane])) == [n for _, n in tails[lane]]


def test_lanes_alternate_and_begin_again():
    lanes = IndexedStreams(indexed(30), 0, False)
    lanes.count = 2  # in stored order there is only one
    reader = lanes.reader({0: DocumentPosition(), 1: DocumentPosition()})
    first, second = take_numbers(reader, 0, 17), take_numbers(reader, 1, 15)
    assert [{*pair} for pair in zip(first, second, strict=False)] == [{n, n + 1} for n in range(0, 30, 2)]
    assert first[15:] == first[:2]  # without shuffle, every epoch is the same


def test_many_even_parts_give_each_lane_its_own_parts():
    source = stream(*[10] * 2 * MAX_STREAMS)
    lanes = SequentialStreams(source, 0, True, True)
    assert lanes.parts_per_stream and lanes.count == MAX_STREAMS
    take_numbers(lanes.reader({5: DocumentPosition()}), 5, 20)
    assert sum(bool(part.read_from) for part in source.parts) == 2  # the others were not touched


def test_uneven_parts_are_shared_by_all_lanes():
    assert not SequentialStreams(stream(*[10] * (MAX_STREAMS + 1)), 0, True, True).parts_per_stream
    assert not SequentialStreams(stream(1000, *[10] * 2 * MAX_STREAMS), 0, True, True).parts_per_stream
    # As many even parts of another class are not comparable.
    mixed = stream(*[10] * 2 * MAX_STREAMS)
    mixed.parts[3] = type("Other", (Numbers,), {})(0, 10)
    assert not SequentialStreams(mixed, 0, True, True).parts_per_stream


def test_counting_and_resuming_a_stream_read_only_the_needed_parts():
    source = stream(10 * BLOCK, 10 * BLOCK)
    lanes = SequentialStreams(source, 0, True, True)
    assert source.parts[0].read_from == [0] and source.parts[1].read_from == []
    place = DocumentPosition(0, 1, 9 * BLOCK + 63)
    assert lanes.reader({lanes.stream_of(place): place}).next(lanes.stream_of(place))[0] == place
    second = lanes._parts(0, 0)[1]
    assert source.parts[second].read_from[-1] == 9 * BLOCK


def test_each_block_of_a_stream_has_its_own_order():
    lanes = SequentialStreams(stream(2 * BLOCK, 2 * BLOCK), 0, True, True)
    order = [int(item.text) % BLOCK for _, item in lanes.read(0, DocumentPosition())]
    blocks = [order[i : i + BLOCK] for i in range(0, 4 * BLOCK, BLOCK)]
    assert all(sorted(block) == list(range(BLOCK)) for block in blocks)
    assert len({tuple(block) for block in blocks}) == 4


def test_errors_are_returned_at_their_position():
    for lanes in (
        IndexedStreams(indexed(8, bad_numbers={3}), 0, False),
        SequentialStreams(SequentialSource("s", {}, [Numbers(0, 8, bad_numbers={3})]), 0, False, stop=False),
    ):
        reader = lanes.reader({0: DocumentPosition()})
        items = [reader.next(0)[1] for _ in range(8)]
        assert isinstance(items[3], DataError) and items[4].text == "4"
    with pytest.raises(DataError, match="3 is bad"):
        SequentialStreams(SequentialSource("s", {}, [Numbers(0, 8, bad_numbers={3})]), 0, False, stop=True)


def test_a_stream_without_documents_is_an_error():
    with pytest.raises(DataError, match="no documents in it"):
        SequentialStreams(stream(0, 0), 0, True, True)
    # A lane that receives nothing, epoch after epoch, raises instead of waiting forever.
    lanes = SequentialStreams(stream(8, 8), 0, False, True)
    lanes.count = 2
    lanes.stream_of = lambda place: 0
    with pytest.raises(DataError, match=f"no text in {MAX_EMPTY_EPOCHS} epochs of stream 1 of 2"):
        lanes.reader({1: DocumentPosition()}).next(1)


def test_items_for_a_lane_in_a_later_epoch_are_dropped():
    lanes = SequentialStreams(stream(80), 0, False, True)
    lanes.count = 2
    reader = lanes.reader({0: DocumentPosition(), 1: DocumentPosition()})
    for _ in range(4):
        take_numbers(reader, 0, 40), take_numbers(reader, 1, 40)
    assert len(reader._passes) <= 2 and sum(map(len, reader._waiting.values())) <= 40
    assert list(islice(reader._passes, 1))[0][1] >= 2


@pytest.mark.parametrize("gz", [False, True])
def test_alternating_data_reach_all_lanes_evenly_without_shuffle(gz, tmp_path):
    """A fixed assignment of questions and answers in turn would give each lane only one kind."""
    texts = [body for n in range(2048) for body in (f"{n} " + "long " * 50, "s")]
    lines = [json.dumps({"text": body}) for body in texts]
    path = tmp_path / ("a.jsonl.gz" if gz else "a.jsonl")
    content = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(content) if gz else content)
    source = text(str(path), "text")
    lanes = SequentialStreams(source, 0, False, True) if gz else IndexedStreams(source, 0, False)
    reader = lanes.reader({lane: DocumentPosition() for lane in range(lanes.count)})
    short = [sum(reader.next(lane)[1].text == "s" for _ in range(64)) for lane in range(lanes.count)]
    assert min(short) > 12 and max(short) < 52  # 32 expected of 64; 5 standard deviations are 20
    places = [reader_place for reader_place, _ in (reader.next(lane) for lane in range(lanes.count))]
    assert {place.epoch for place in places} <= {0, 1}
