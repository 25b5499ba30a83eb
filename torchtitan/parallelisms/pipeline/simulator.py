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
from typing import NamedTuple

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


@dataclass(frozen=True)
class Simulation:
    spans: list[list[TimeSpan]]
    """By rank, in execution order."""
    makespan: Fraction | int
    busy: list[Fraction | int]
    """By rank. Overlapping actions count once."""
    peak_activations: list[Fraction]
    """By rank."""

    @property
    def bubbles(self) -> list[Fraction | int]:
        return [self.makespan - busy for busy in self.busy]

    @property
    def bubble_share(self) -> float:
        """Return the fraction of the ranks' total time that is idle."""
        return float(sum(self.bubbles) / (self.makespan * len(self.busy)))


def simulate(
    table: Table, costs: Costs | Sequence[Costs] = EQUAL_COSTS, p2p: Time = 0, overlap: Time | None = None
) -> Simulation:
    """Simulate a table. Every rank runs its row in order, each action as soon as its inputs have arrived.

    costs: of a rank's layers, the same for all ranks; or one for each stage, of that stage alone.
    p2p: latency from the end of an action to its result on another rank; neither rank is busy meanwhile.
    overlap: the two actions of an OVERLAP_F_B pair start and end together, in this fraction of F + B. None: F, then B,
    as torch runs pairs; both results leave the rank after B. Raises ScheduleTableError on a deadlock.
    """
    num_stages = count_stages(table)
    share = Fraction(len(table), num_stages)
    kinds = (FORWARD, INPUT_GRAD, WEIGHT_GRAD, BACKWARD)
    if isinstance(costs, Costs):
        stage_times = [{kind: costs.duration(kind) * share for kind in kinds}] * num_stages
    else:
        stage_times = [{kind: stage.duration(kind) for kind in kinds} for stage in costs]
    delay = p2p if isinstance(p2p, int) else Fraction(p2p)
    outputs: dict[Key, tuple[Fraction | int, int]] = {}
    free: list[Fraction | int] = [0] * len(table)
    busy: list[Fraction | int] = [0] * len(table)
    spans: list[list[TimeSpan]] = [[] for _ in table]

    def run(rank: int, action: Action, length: Fraction | int) -> tuple[Fraction | int, Fraction | int]:
        arrivals = (outputs[key] for key in input_keys(action, num_stages))
        start = max([free[rank], *(end if maker == rank else end + delay for end, maker in arrivals)])
        free[rank] = start + length
        busy[rank] += length
        return start, free[rank]

    for rank, action in running_order(table):
        if action.parts and overlap is not None:
            length = sum(stage_times[part.stage][part.kind] for part in action.parts) * Fraction(overlap)
            joint_run = run(rank, action, length)
            spans[rank] += [TimeSpan(part, *joint_run, overlapped=True) for part in action.parts]
        else:
            spans[rank] += [
                TimeSpan(single, *run(rank, single, stage_times[single.stage][single.kind]))
                for single in action.singles
            ]
        outputs.update((key, (free[rank], rank)) for key in output_keys(action))
    return Simulation(spans, max(free), busy, [share * _peak(row) for row in table])


def _peak(row: Sequence[Action]) -> int:
    """Return the maximum number of (stage, microbatch) activations that a rank stores at once."""
    alive = peak = 0
    for single in (single for action in row for single in action.singles):
        alive += single.kind == FORWARD
        peak = max(peak, alive)
        alive -= single.kind in (BACKWARD, WEIGHT_GRAD)
    return peak
