"""The time and the activation memory of a schedule, from its table and the costs of forward and backward. No torch.

The definitions hold everywhere. F, I and W are the times of forward, input gradient and weight gradient of one rank's
whole share of the layers for one microbatch; all stages cost the same, so with v stages a rank an action takes a v-th.
A rank's bubble is makespan - its busy time, where all ranks end at a common barrier: gradient clipping and the
optimizer's step need all of them. Activations count in one rank's share of the layers x one microbatch; they live from
the start of their forward to the end of their weight gradient. Arithmetic is exact (fractions).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from torchtitan.parallelisms.pipeline.actions import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Action,
    Key,
    Table,
    makes,
    needs,
    num_stages_of,
    running_order,
)

Time = Fraction | int | float


@dataclass(frozen=True)
class Costs:
    """Times of one rank's share of the layers for one microbatch, in any unit."""

    forward: Time = 1
    input_grad: Time = 1
    weight_grad: Time = 1

    def of(self, kind: str) -> Fraction:
        times = {FORWARD: self.forward, INPUT_GRAD: self.input_grad, WEIGHT_GRAD: self.weight_grad}
        return sum(map(Fraction, (self.input_grad, self.weight_grad))) if kind == BACKWARD else Fraction(times[kind])

    def __str__(self) -> str:
        return ":".join(f"{float(time):g}" for time in (self.forward, self.input_grad, self.weight_grad))


EVEN = Costs()


class Span(NamedTuple):
    action: Action
    """Never a pair: the two that overlap have a span each, of the same time."""
    start: Fraction
    end: Fraction
    overlapped: bool = False


@dataclass(frozen=True)
class Simulation:
    spans: list[list[Span]]
    """By rank, in the order in which it runs them."""
    makespan: Fraction
    busy: list[Fraction]
    """By rank. Two that overlap are counted once."""
    peak_activations: list[Fraction]
    """By rank."""

    @property
    def bubbles(self) -> list[Fraction]:
        return [self.makespan - busy for busy in self.busy]

    @property
    def bubble_share(self) -> float:
        """Idle time of all ranks over their whole time."""
        return float(sum(self.bubbles) / (self.makespan * len(self.busy)))


def simulate(table: Table, costs: Costs = EVEN, p2p: Time = 0, overlap: Time | None = None) -> Simulation:
    """Every rank runs its row in order, each action as soon as its inputs are there.

    p2p: time from the end of an action to its result on another rank, which costs neither rank anything.
    overlap: the two of an OVERLAP_F_B pair begin together and end together after this part of F + B. None: F, then B,
    as torch runs pairs by itself; the results of both leave the rank after B. ScheduleTableError where the ranks wait
    for one another for ever.
    """
    num_stages = num_stages_of(table)
    share = Fraction(len(table), num_stages)
    times = {kind: costs.of(kind) * share for kind in (FORWARD, INPUT_GRAD, WEIGHT_GRAD, BACKWARD)}
    delay = Fraction(p2p)
    outputs: dict[Key, tuple[Fraction, int]] = {}
    free = [Fraction(0)] * len(table)
    busy = [Fraction(0)] * len(table)
    spans: list[list[Span]] = [[] for _ in table]

    def run(rank: int, action: Action, length: Fraction) -> tuple[Fraction, Fraction]:
        arrivals = (outputs[key] for key in needs(action, num_stages))
        start = max([free[rank], *(end if maker == rank else end + delay for end, maker in arrivals)])
        free[rank] = start + length
        busy[rank] += length
        return start, free[rank]

    for rank, action in running_order(table):
        if action.parts and overlap is not None:
            length = sum(times[part.kind] for part in action.parts) * Fraction(overlap)
            joint_run = run(rank, action, length)
            spans[rank] += [Span(part, *joint_run, overlapped=True) for part in action.parts]
        else:
            spans[rank] += [Span(single, *run(rank, single, times[single.kind])) for single in action.singles]
        outputs.update((key, (free[rank], rank)) for key in makes(action))
    return Simulation(spans, max(free), busy, [share * _peak(row) for row in table])


def _peak(row: Sequence[Action]) -> int:
    """Most stages x microbatches that a rank holds at once."""
    held = peak = 0
    for single in (single for action in row for single in action.singles):
        held += single.kind == FORWARD
        peak = max(peak, held)
        held -= single.kind in (BACKWARD, WEIGHT_GRAD)
    return peak
