"""A simulation of a schedule's time and activation memory, from its table and costs. It does not import torch.

F, I and W are the times of forward, input gradient and weight gradient of all layers of one rank, for one microbatch.
With v stages per rank, an action takes 1/v of that; or each stage has its own costs. A rank's bubble is the makespan
minus its busy time, as all ranks wait for each other at the end of a step (gradient clipping, optimizer). The unit of
activation memory is the layers of one rank x one microbatch. Activations live from the start of their forward to the
end of their weight gradient. Times are exact (fractions).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from itertools import islice
from typing import Any, NamedTuple

from torchtitan.parallelisms.pipeline.actions import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Action,
    Key,
    Table,
    count_stages,
    input_keys,
    output_keys,
    running_order,
    stage_ranks,
)

Time = Fraction | int | float


@dataclass(frozen=True)
class Costs:
    """The times of all layers of one rank for one microbatch, in any unit."""

    forward: Time = 1
    input_grad: Time = 1
    weight_grad: Time = 1

    def duration(self, kind: str) -> Fraction | int:
        """Return the time of an action: an integer if its costs are, which are simulated several times faster."""
        times = {FORWARD: self.forward, INPUT_GRAD: self.input_grad, WEIGHT_GRAD: self.weight_grad}
        parts = (self.input_grad, self.weight_grad) if kind == BACKWARD else (times[kind],)
        return sum(time if isinstance(time, int) else Fraction(time) for time in parts)

    def __str__(self) -> str:
        return ":".join(f"{float(time):g}" for time in (self.forward, self.input_grad, self.weight_grad))


EQUAL_COSTS = Costs()


class TimeSpan(NamedTuple):
    action: Action
    """A single action: the two actions of a pair have one span each, with equal times."""
    start: Fraction | int
    end: Fraction | int
    overlapped: bool = False


class Step(NamedTuple):
    """The actions of one kind in one stage. Their inputs and outputs are numbers for microbatch 0; add the microbatch.

    `inputs`: each with True if another rank makes it. `duration`: the index of its time, by stage and kind.
    """

    inputs: tuple[tuple[int, bool], ...]
    outputs: tuple[int, ...]
    duration: int


class NumberedTable(NamedTuple):
    """A table with numbers in place of keys, so that an action is simulated in a microsecond."""

    table: Table
    num_stages: int
    num_keys: int
    rows: list[list[tuple[tuple[Step, int], ...]]]
    """By rank: the step and microbatch of each action, of both actions of a pair."""


KINDS = FORWARD, INPUT_GRAD, WEIGHT_GRAD, BACKWARD


def with_numbers(table: Table) -> NumberedTable:
    """Return a table for `simulate` that may be simulated several times."""
    num_stages, ranks = count_stages(table), stage_ranks(table)
    microbatches = 1 + max(single.microbatch for row in table for action in row for single in action.singles)

    def number(key: Key) -> int:
        stage, kind, _ = key
        return (2 * stage + (kind != FORWARD)) * microbatches

    @cache
    def step(stage: int, kind: str) -> Step:
        first = Action(stage, kind, 0)
        inputs = [(number(key), ranks.get(key[0]) != ranks[stage]) for key in input_keys(first, num_stages)]
        outputs = tuple(map(number, output_keys(first)))
        return Step(tuple(inputs), outputs, stage * len(KINDS) + KINDS.index(kind))

    rows = [
        [tuple((step(stage, kind), microbatch) for stage, kind, microbatch, _ in action.singles) for action in row]
        for row in table
    ]
    return NumberedTable(table, num_stages, 2 * num_stages * microbatches, rows)


@dataclass(frozen=True)
class Simulation:
    """The times of all actions of a table."""

    numbered: NumberedTable
    overlaps: bool
    """True if the actions of a pair start and end together."""
    times: list[list[tuple[Fraction | int, Fraction | int]]]
    """Start and end of each action, by rank in execution order; once for actions that overlap."""
    makespan: Fraction | int
    busy: list[Fraction | int]
    """By rank. Overlapping actions count once."""

    @cached_property
    def spans(self) -> list[list[TimeSpan]]:
        """The spans of all actions, by rank in execution order."""
        spans = []
        for row, times in zip(self.numbered.table, self.times, strict=True):
            remaining = iter(times)
            spans.append([])
            for action in row:
                joint = next(remaining) if action.parts and self.overlaps else None
                for single in action.singles:
                    spans[-1].append(TimeSpan(single, *(joint or next(remaining)), overlapped=joint is not None))
        return spans

    @cached_property
    def peak_activations(self) -> list[Fraction]:
        """The highest number of stored activations, by rank."""
        table = self.numbered.table
        return [Fraction(len(table), self.numbered.num_stages) * _peak(row) for row in table]

    @property
    def bubbles(self) -> list[Fraction | int]:
        return [self.makespan - busy for busy in self.busy]

    @property
    def bubble_share(self) -> float:
        """Return the fraction of the ranks' total time that is idle."""
        return float(sum(self.bubbles) / (self.makespan * len(self.busy)))


def simulate(
    table: Table | NumberedTable,
    costs: Costs | Sequence[Costs] = EQUAL_COSTS,
    p2p: Time = 0,
    overlap: Time | None = None,
) -> Simulation:
    """Simulate a table. Every rank runs its row in order, each action as soon as its inputs have arrived.

    costs: of a rank's layers, the same for all ranks; or one for each stage, of that stage alone.
    p2p: latency from the end of an action to its result on another rank; neither rank is busy meanwhile.
    overlap: the two actions of an OVERLAP_F_B pair start and end together, in this fraction of F + B. None: F, then B,
    as torch runs pairs; both results leave the rank after B. Raises ScheduleTableError on a deadlock.
    """
    numbered = table if isinstance(table, NumberedTable) else with_numbers(table)
    share = Fraction(len(numbered.table), numbered.num_stages)
    if isinstance(costs, Costs):
        durations = [costs.duration(kind) * share for kind in KINDS] * numbered.num_stages
    else:
        durations = [stage.duration(kind) for stage in costs for kind in KINDS]
    delay = p2p if isinstance(p2p, int) else Fraction(p2p)
    ends: list[Any] = [None] * numbered.num_keys
    times: list[list[tuple[Fraction | int, Fraction | int]]] = [[] for _ in numbered.rows]
    free: list[Fraction | int] = [0] * len(times)
    busy: list[Fraction | int] = [0] * len(times)
    places = [0] * len(times)

    def run(rank: int, parts: Sequence[tuple[Step, int]], length: Fraction | int) -> None:
        """Run actions that start and end together."""
        start = free[rank]
        for (inputs, _, _), microbatch in parts:
            for key, is_remote in inputs:
                start = max(start, ends[key + microbatch] + delay if is_remote else ends[key + microbatch])
        free[rank] = start + length
        busy[rank] += length
        times[rank].append((start, free[rank]))

    # the order of `running_order`, on numbers: its sets of keys would take several times as long as the simulation
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(numbered.rows):
            for parts in islice(row, places[rank], None):
                if any(ends[key + microbatch] is None for (inputs, _, _), microbatch in parts for key, _ in inputs):
                    break
                if overlap is not None and len(parts) > 1:
                    run(rank, parts, sum(durations[step.duration] for step, _ in parts) * Fraction(overlap))
                else:
                    for part in parts:
                        run(rank, (part,), durations[part[0].duration])
                for (_, outputs, _), microbatch in parts:
                    for key in outputs:
                        ends[key + microbatch] = free[rank]
                places[rank] += 1
                moved = True
    if any(place < len(row) for place, row in zip(places, numbered.rows, strict=True)):
        list(running_order(numbered.table))  # raises the error, with the cause of the deadlock
    return Simulation(numbered, overlap is not None, times, max(free), busy)


def _peak(row: Sequence[Action]) -> int:
    """Return the maximum number of (stage, microbatch) activations that a rank stores at once."""
    alive = peak = 0
    for single in (single for action in row for single in action.singles):
        alive += single.kind == FORWARD
        peak = max(peak, alive)
        alive -= single.kind in (BACKWARD, WEIGHT_GRAD)
    return peak
