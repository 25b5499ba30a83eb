"""The time of a pipelined step, simulated with the times of each stage. Imports torch for the tables of schedules."""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from torchtitan.parallelisms.pipeline.actions import Table
from torchtitan.parallelisms.pipeline.runtime import build_table
from torchtitan.parallelisms.pipeline.simulator import Costs, simulate
from torchtitan.planner.plan import Plan
from torchtitan.planner.step_time import StepTimer
from torchtitan.planner.time_parts import Parts, StepTime

MOST_ACTIONS = 1500
"""Largest number of simulated forwards of all ranks. Longer steps are extrapolated, as a full pipeline is periodic."""
TICK = 1e-6
"""Seconds of the simulation's unit."""


@dataclass
class PipelineTimer:
    """Simulates pipelines with the times of `timer`."""

    timer: StepTimer

    def step_time(self, plan: Plan) -> StepTime:
        """Predict a step. Without a pipeline it is the formula's."""
        if plan.pp == 1:
            return self.timer.step_time(plan)
        makespan = self._makespan(plan)
        ranks = [self.timer.rank_time(plan, rank) for rank in range(plan.pp)]
        parts = Parts({name: s * plan.microbatches for name, s in max(ranks, key=Parts.total).items()})
        parts["bubble"] = max(0.0, makespan - parts.total())
        return self.timer.finished(plan, parts, simulated=True)

    def _makespan(self, plan: Plan) -> float:
        """Return the seconds of all microbatches, extrapolated from two smaller numbers of them if they are many."""
        counts = self._microbatches(plan)
        first, *more = [self._simulated(plan, count) for count in counts]
        if not more:
            return first
        return first + (more[0] - first) * (plan.microbatches - counts[0]) / (counts[1] - counts[0])

    def _microbatches(self, plan: Plan) -> list[int]:
        """Return the numbers of microbatches to simulate: the plan's, or two smaller ones."""
        stages = plan.pp * plan.stages_per_rank
        if plan.microbatches * stages <= MOST_ACTIONS:
            return [plan.microbatches]
        smaller = [2 * plan.pp, 3 * plan.pp]  # after two rounds all ranks are busy
        return smaller if plan.microbatches > smaller[1] else [plan.microbatches]

    def _simulated(self, plan: Plan, microbatches: int) -> float:
        shape = plan.schedule, plan.pp, microbatches, plan.stages_per_rank, plan.merges_backward, plan.overlap_experts
        costs = [Costs(*(round(seconds / TICK) for seconds in stage)) for stage in self.timer.stage_times(plan)]
        send = round(self.timer.send_seconds(plan) / TICK)
        overlap = Fraction(1) if plan.overlap_experts else None
        return float(simulate(_table(*shape), costs, send, overlap).makespan) * TICK


@lru_cache(64)
def _table(schedule: str, pp: int, microbatches: int, stages_per_rank: int, merged: bool, overlap: bool) -> Table:
    return build_table(schedule, pp, microbatches, stages_per_rank, merge_backward=merged, overlap=overlap)
