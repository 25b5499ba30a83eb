"""Which source a sample is from, which of that source's lanes, and which of the lane's samples it is.

Both are functions of the seed, the weights and the sample's number alone. A period is the fewest samples that hold each
source as often as its weight says (weights 7, 2 and 1: ten samples), in an order that a keyed permutation draws. As
many periods as there are lanes share an order, shifted now and then by one, so that every lane of a source is met
equally often: where a sample stands in its lane is computed, and no lane runs ahead. Then the next order is drawn.

Lanes take turns, and a few of them (MIXED) change places from turn to turn. At fixed places a small batch would meet
the same lanes every so many steps, and a lane stays in a long document for hundreds of samples: the loss would show a
sawtooth. Only lanes that are equal modulo the groups of MIXED change places, so that a rank which takes every n-th
sample still reads its own lanes and no others.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

import numpy as np

from torchtitan.core.errors import JobError
from torchtitan.datasets.shuffle import key, permute

LARGEST_PERIOD = 10_000
"""Weights that want a longer one are met to within one sample in so many."""
MIXED = 4
"""Lanes that change places with each other. As many ranks as there are groups of them read no lane twice."""
MIXING, PLACES = 0x6D6978, 0x706C6163
"""Keep the order of sources, and of lanes, apart from that of documents under the same seed."""


class Mixture:
    """`lanes`: how many each source has. All of them are numbered through, source after source."""

    def __init__(self, weights: Sequence[float], lanes: Sequence[int], seed: int) -> None:
        self.seed, self.counts, self.lanes = seed, np.array(shares(weights)), np.array(lanes)
        self.first_lanes = np.array([0, *accumulate(lanes)])
        self.period, self.width = int(self.counts.sum()), math.lcm(*lanes)
        self.block = self.period * self.width
        """Samples after which every lane has been met as often as the others of its source."""
        self._per_block = np.repeat(self.counts * self.width // self.lanes, self.lanes)
        self.mixed = np.gcd(self.lanes, MIXED)
        """Of each source: lanes in a group, and the groups, which are numbered through as well."""
        self.groups = self.lanes // self.mixed
        self.first_groups = np.array([0, *accumulate(self.groups)])
        self._tables: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[n] global samples to the lane of each, and its number in that lane."""
        if len(self.counts) == 1:
            numbers, place = np.divmod(samples, self.width)
            which, group = np.divmod(place, self.groups[0])
            return self._mixed(self.mixed[0], numbers, which, group) * self.groups[0] + group, numbers
        lanes, numbers = np.empty_like(samples), np.empty_like(samples)
        blocks, places = np.divmod(samples, self.block)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            lanes[here], within = (column[places[here]] for column in self._table(block))
            numbers[here] = block * self._per_block[lanes[here]] + within
        return lanes, numbers

    def own(self, first: int, stride: int) -> list[int]:
        """The lanes that the samples first, first + stride, ... are from."""
        found = []
        for lanes, groups, mixed in zip(self.first_lanes, self.groups.tolist(), self.mixed.tolist(), strict=False):
            met = dict.fromkeys((first + i * stride) % groups for i in range(groups))
            found += [int(lanes) + which * groups + group for group in met for which in range(mixed)]
        return found

    def taken(self, samples: int) -> np.ndarray:
        """[lanes] how many of the first global samples are from each."""
        blocks, rest = divmod(samples, self.block)
        started = np.bincount(self._table(blocks)[0][:rest], minlength=len(self._per_block))
        return blocks * self._per_block + started

    def _table(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The lane of every sample of a block, and its number among those of the lane in the block."""
        if block not in self._tables:
            for old in [b for b in self._tables if b < block - 1]:
                del self._tables[old]
            self._tables[block] = self._build_table(block)
        return self._tables[block]

    def _build_table(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        places = np.arange(self.block)
        slots = permute(np.arange(self.period), self.period, key(self.seed, MIXING, block))
        order = np.arange(len(self.counts)).repeat(self.counts)[slots]
        # Without the shift a lane would meet only every n-th slot, n being what period and width have in common.
        sources = order[(places + places // math.lcm(self.period, self.width)) % self.period]
        lanes = self.first_lanes[sources] + self._lanes_of(block, places, sources)
        by_lane = np.argsort(lanes, kind="stable")
        begins = lanes[by_lane].searchsorted(np.arange(len(self._per_block)))
        numbers = np.empty_like(places)
        numbers[by_lane] = places - begins[lanes[by_lane]]
        return lanes, numbers

    def _lanes_of(self, block: int, places: np.ndarray, sources: np.ndarray) -> np.ndarray:
        """Of each sample of a block, its lane among those of its source."""
        group = places % self.groups[sources]
        through = self.first_groups[sources] + group
        by_group = np.argsort(through, kind="stable")
        begins = through[by_group].searchsorted(np.arange(self.first_groups[-1]))
        met = np.empty_like(places)  # samples of the group before this one, from the block's first on
        met[by_group] = places - begins[through[by_group]]
        per_block = self.mixed * self.counts * self.width // self.lanes
        turns, which = np.divmod(block * per_block[sources] + met, self.mixed[sources])
        for mixed in np.unique(self.mixed).tolist():
            here = self.mixed[sources] == mixed
            which[here] = self._mixed(mixed, turns[here], which[here], through[here])
        return which * self.groups[sources] + group

    def _mixed(self, mixed: int, turns: np.ndarray, which: np.ndarray, group: np.ndarray) -> np.ndarray:
        """Where in its group the lane stands whose turn it is."""
        return permute(which, int(mixed), key(self.seed, PLACES, group, turns)) if mixed > 1 else which


def shares(weights: Sequence[float]) -> list[int]:
    """Samples of each source in a period, by largest remainders where the weights want a longer one. Raises JobError
    for a weight of less than a sample."""
    given = [Fraction(repr(weight)) for weight in weights]
    exact = [weight / sum(given) for weight in given]
    period = min(math.lcm(*(share.denominator for share in exact)), LARGEST_PERIOD)
    counts = [math.floor(share * period) for share in exact]
    behind = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i] * period)
    for i in behind[: period - sum(counts)]:
        counts[i] += 1
    for number, count in enumerate(counts):
        if count == 0:
            raise JobError(
                f"weight {weights[number]:g} of source {number} is less than one sample in {LARGEST_PERIOD:,} of all "
                f"{len(weights)} sources; give it more, or leave the source out"
            )
    return counts
