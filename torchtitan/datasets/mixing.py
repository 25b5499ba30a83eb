"""The mixture of sources: it maps a global sample to its source, its stream and its number in that stream.

All are functions of the seed, the weights and the sample's number alone. A period is the fewest samples that contain
each source in proportion to its weight (weights 7, 2 and 1: ten samples), in the order of a keyed permutation. A block
of as many periods as there are streams shares one order, which is shifted by one at times, so that every stream of a
source is used equally often. The position of a sample in its stream is therefore computed, and no stream runs ahead.
The next block uses a new permutation.

Streams take turns, and groups of MIXED streams are permuted from turn to turn. With fixed positions a small batch would
meet the same streams every few steps. As a stream stays in a long document for hundreds of samples, the loss would show
a sawtooth. Only streams that are equal modulo the number of groups are permuted, so a rank that takes every n-th sample
still reads its own streams and no others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from torchtitan.core.errors import JobError
from torchtitan.core.lazy_numpy import np
from torchtitan.datasets.shuffle import key, permute

LARGEST_PERIOD = 10_000
"""Longest period in samples. Weights that would need a longer one are rounded to multiples of 1 / LARGEST_PERIOD."""
MIXED = 4
"""Number of streams in a permuted group. With at most as many ranks as groups, no two ranks read the same stream."""
MIXING, PLACES = 0x6D6978, 0x706C6163
"""Salts: the orders of sources and streams are independent of the document order of the same seed."""


class Mixture:
    """A weighted mixture of sources. `stream_counts`: streams per source, numbered consecutively over all sources."""

    def __init__(self, weights: Sequence[float], stream_counts: Sequence[int], seed: int) -> None:
        self.seed, self.counts, self.stream_counts = seed, np.array(shares(weights)), np.array(stream_counts)
        self.first_streams = np.array([0, *accumulate(stream_counts)])
        self.period, self.width = int(self.counts.sum()), math.lcm(*stream_counts)
        self.block = self.period * self.width
        """Number of samples after which all streams of a source have been used equally often."""
        self._per_block = np.repeat(self.counts * self.width // self.stream_counts, self.stream_counts)
        self.mixed = np.gcd(self.stream_counts, MIXED)
        """Streams per group, for each source. Groups are numbered consecutively over all sources."""
        self.groups = self.stream_counts // self.mixed
        self.first_groups = np.array([0, *accumulate(self.groups)])
        self._tables: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Map [n] global samples to their streams [n] and their numbers [n] in these streams."""
        if len(self.counts) == 1:
            numbers, turn_index = np.divmod(samples, self.width)
            member, group = np.divmod(turn_index, self.groups[0])
            return self._mixed(self.mixed[0], numbers, member, group) * self.groups[0] + group, numbers
        streams, numbers = np.empty_like(samples), np.empty_like(samples)
        blocks, places = np.divmod(samples, self.block)
        for block in np.unique(blocks).tolist():
            in_block = blocks == block
            streams[in_block], within = (column[places[in_block]] for column in self._table(block))
            numbers[in_block] = block * self._per_block[streams[in_block]] + within
        return streams, numbers

    def streams_of(self, first: int, stride: int) -> list[int]:
        """Return the streams that the samples first, first + stride, ... come from."""
        result = []
        for offset, groups, mixed in zip(self.first_streams, self.groups.tolist(), self.mixed.tolist(), strict=False):
            reached_groups = dict.fromkeys((first + i * stride) % groups for i in range(groups))
            result += [int(offset) + member * groups + group for group in reached_groups for member in range(mixed)]
        return result

    def samples_per_stream(self, samples: int) -> np.ndarray:
        """Return how many of the first `samples` global samples come from each stream, [streams]."""
        blocks, remainder = divmod(samples, self.block)
        started = np.bincount(self._table(blocks)[0][:remainder], minlength=len(self._per_block))
        return blocks * self._per_block + started

    def _table(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the stream of every sample of a block, and its number among the block's samples of that stream."""
        if block not in self._tables:
            for finished in [b for b in self._tables if b < block - 1]:
                del self._tables[finished]
            self._tables[block] = self._build_table(block)
        return self._tables[block]

    def _build_table(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        places = np.arange(self.block)
        slots = permute(np.arange(self.period), self.period, key(self.seed, MIXING, block))
        order = np.arange(len(self.counts)).repeat(self.counts)[slots]
        # Without the shift a stream would meet only every n-th slot, where n = gcd(period, width).
        sources = order[(places + places // math.lcm(self.period, self.width)) % self.period]
        streams = self.first_streams[sources] + self._source_streams(block, places, sources)
        by_stream = np.argsort(streams, kind="stable")
        begins = streams[by_stream].searchsorted(np.arange(len(self._per_block)))
        numbers = np.empty_like(places)
        numbers[by_stream] = places - begins[streams[by_stream]]
        return streams, numbers

    def _source_streams(self, block: int, places: np.ndarray, sources: np.ndarray) -> np.ndarray:
        """Return the stream of each sample of a block, numbered within its source."""
        group = places % self.groups[sources]
        global_group = self.first_groups[sources] + group
        by_group = np.argsort(global_group, kind="stable")
        begins = global_group[by_group].searchsorted(np.arange(self.first_groups[-1]))
        earlier = np.empty_like(places)  # number of earlier samples of the group in this block
        earlier[by_group] = places - begins[global_group[by_group]]
        per_block = self.mixed * self.counts * self.width // self.stream_counts
        turns, member = np.divmod(block * per_block[sources] + earlier, self.mixed[sources])
        for mixed in np.unique(self.mixed).tolist():
            selected = self.mixed[sources] == mixed
            member[selected] = self._mixed(mixed, turns[selected], member[selected], global_group[selected])
        return member * self.groups[sources] + group

    def _mixed(self, mixed: int, turns: np.ndarray, member: np.ndarray, group: np.ndarray) -> np.ndarray:
        """Return, for each turn, the stream that provides the sample, as its index within the group."""
        return permute(member, int(mixed), key(self.seed, PLACES, group, turns)) if mixed > 1 else member


def shares(weights: Sequence[float]) -> list[int]:
    """Return the number of samples of each source in a period.

    Rounds by largest remainders if the weights need a longer period than LARGEST_PERIOD. Raises JobError for a weight
    below one sample."""
    fractions = [Fraction(repr(weight)) for weight in weights]
    exact = [weight / sum(fractions) for weight in fractions]
    period = min(math.lcm(*(share.denominator for share in exact)), LARGEST_PERIOD)
    counts = [math.floor(share * period) for share in exact]
    most_rounded_down = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i] * period)
    for i in most_rounded_down[: period - sum(counts)]:
        counts[i] += 1
    for number, count in enumerate(counts):
        if count == 0:
            raise JobError(
                f"weight {weights[number]:g} of source {number} is less than one sample in {LARGEST_PERIOD:,} of all "
                f"{len(weights)} sources; give it more, or leave the source out"
            )
    return counts
