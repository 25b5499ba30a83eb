"""Find the fastest plans of a job: best first by a lower bound of the step's time.

A layout is bounded by its computation without a bubble, a plan by the formula of planner/step_time.py. The plan with
the lowest bound is judged next: its memory by formula, its legality by the rules, its time by simulation. A plan is
accepted as soon as no other has a bound below its time, so the result is the same as if all plans
were judged. Plans that differ in their replicas alone are represented by the fastest.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache, partial
from itertools import takewhile
from pathlib import Path

from torchtitan.config.job import JobConfig
from torchtitan.config.options import Fault
from torchtitan.config.sections.run import Checkpoint
from torchtitan.core.hardware import Hardware
from torchtitan.parallelisms.pipeline.actions import Table
from torchtitan.parallelisms.pipeline.runtime import build_table
from torchtitan.parallelisms.pipeline.simulator import Costs, simulate
from torchtitan.planner.candidates import Space
from torchtitan.planner.closed_form import MemoryPrediction, predict_memory
from torchtitan.planner.plan import Plan, Workload, apply_changes
from torchtitan.planner.step_time import StepTimer
from torchtitan.planner.time_parts import Calibration, Parts, StepTime
from torchtitan.rules import Device, check

TO_BE_FETCHED = (
    *("model.tokenizer_path", "training.dataset", "training.sources", "validation.", "data."),
    *("checkpoint.", "job.", "metrics.", "profiling.", "adapter.initial_path"),
)
"""Prefixes of options with faults that prevent a job from starting but not from being simulated."""
MOST_FORWARDS = 1500
"""Largest number of simulated forwards of all ranks. Longer steps are extrapolated, as a full pipeline is periodic."""
TICK = 1e-6
"""Seconds of the simulation's unit."""
MOST_ACTIONS = 6000
"""Largest number of layouts and plans that a search looks at. One takes milliseconds."""


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
        parts["bubble"] = self.timer.bubble(plan, makespan, parts.total())
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
        if plan.microbatches * stages <= MOST_FORWARDS:
            return [plan.microbatches]
        smaller = [2 * plan.pp, 3 * plan.pp]  # after two rounds all ranks are busy
        return smaller if plan.microbatches > smaller[1] else [plan.microbatches]

    def _simulated(self, plan: Plan, microbatches: int) -> float:
        shape = plan.schedule, plan.pp, microbatches, plan.stages_per_rank, plan.merges_backward, plan.overlap_experts
        costs = [Costs(*(round(seconds / TICK) for seconds in stage)) for stage in self.timer.stage_times(plan)]
        send = round(self.timer.messages.send(plan) / TICK)
        overlap = Fraction(1) if plan.overlap_experts else None
        return float(simulate(_table(*shape), costs, send, overlap).makespan) * TICK


@lru_cache(64)
def _table(schedule: str, pp: int, microbatches: int, stages_per_rank: int, merged: bool, overlap: bool) -> Table:
    return build_table(schedule, pp, microbatches, stages_per_rank, merge_backward=merged, overlap=overlap)


def faults_as_new(config: JobConfig, gpus: int, device: Device) -> list[Fault]:
    """Return the faults of a job in a folder without a run, except for data and weights that are not here.

    Plans are for other machines, so what this one's job.dump_folder holds does not matter.
    """
    new_folder = replace(config.job, dump_folder=str(Path(config.job.dump_folder, "planned")))
    checkpoint = replace(config.checkpoint, folder=Checkpoint().folder)
    faults = check(replace(config, job=new_folder, checkpoint=checkpoint), gpus, device)
    return [fault for fault in faults if not fault.key.startswith(TO_BE_FETCHED)]


@dataclass(frozen=True)
class Limits:
    """Limits of a plan."""

    memory: float
    """Bytes of a GPU."""
    most_seconds: float = float("inf")
    """Of a step, from a deadline or a budget."""


@dataclass(frozen=True)
class Candidate:
    """A plan that has been judged."""

    plan: Plan
    time: StepTime
    memory: MemoryPrediction


@dataclass
class Result:
    """The outcome of a search."""

    best: list[Candidate] = field(default_factory=list)
    """Fastest first."""
    judged: list[Candidate] = field(default_factory=list)
    """All plans with a prediction that are legal and fit."""
    layouts: int = 0
    excluded: Counter[str] = field(default_factory=Counter)
    """Number of plans that a constraint excludes, by its name, among those that were judged."""
    complete: bool = True
    """False if MOST_ACTIONS ended the search."""


@dataclass
class Search:
    """Searches plans for one job on one kind of hardware."""

    config: JobConfig
    workload: Workload
    samples: int
    hardware: Hardware
    calibration: Calibration
    device: Device = "cuda"

    def __post_init__(self) -> None:
        self.timer = PipelineTimer(StepTimer(self.workload, self.hardware, self.calibration))

    def with_hardware(self, hardware: Hardware) -> "Search":
        return replace(self, hardware=hardware)

    def job(self, plan: Plan) -> JobConfig:
        """Return the job with this plan."""
        return apply_changes(self.config, plan.changes(self.workload.rows_per_sample, self.samples))

    def faults(self, plan: Plan) -> list[Fault]:
        """Return the faults of the job with this plan."""
        return faults_as_new(self.job(plan), plan.gpus, self.device)

    def candidate(self, plan: Plan) -> Candidate:
        """Predict a legal plan."""
        return Candidate(plan, self.timer.step_time(plan), self.memory(plan))

    def space(self, gpus: int) -> Space:
        compiles = self.config.compile
        return Space(
            workload=self.workload,
            gpus=gpus,
            machine=self.hardware.devices_per_machine,
            compiled=compiles.enable and "model" in compiles.components,
            async_tp=self.config.parallelism.enable_async_tensor_parallel,
            loss_chunks=self.config.training.loss_chunks,
        )

    def find(self, gpus: int, top: int, limits: Limits) -> Result:
        """Return the fastest `top` plans on this number of GPUs."""
        return _Frontier(self, self.space(gpus), limits).run(top)

    def memory(self, plan: Plan) -> MemoryPrediction:
        return predict_memory(self.job(plan), self.hardware)


class _Frontier:
    """The queue of one search: layouts and plans by their lower bounds."""

    def __init__(self, search: Search, space: Space, limits: Limits) -> None:
        self.search, self.space, self.limits = search, space, limits
        self.result = Result()
        self._timer = search.timer.timer
        self._order = itertools.count()  # breaks ties by the order of enumeration
        self._lean: dict[Plan, bool] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    def run(self, top: int) -> Result:
        result = self.result
        for layout in self.space.layouts():
            self._push(self._timer.least_seconds(layout), partial(self._schedule, layout))
        result.layouts = len(self._queue)
        for actions in itertools.count():
            if not self._queue or len(result.best) >= top:
                break
            if actions == MOST_ACTIONS:
                result.complete = False
                break
            heapq.heappop(self._queue)[2]()
        if not result.complete:
            result.best = sorted(result.judged, key=lambda candidate: candidate.time.seconds)[:top]
        return result

    def _push(self, bound: float, action: Callable[[], None]) -> None:
        if bound <= self.limits.most_seconds:
            heapq.heappush(self._queue, (bound, next(self._order), action))
        else:
            self.result.excluded["deadline or budget"] += 1

    def _fits(self, plan: Plan) -> bool:
        fits = self.search.memory(plan).high <= self.limits.memory
        if not fits:
            self.result.excluded["memory"] += 1
        return fits

    def _fits_recomputed(self, layout: Plan) -> bool:
        """Return whether the layout fits with full recompute, which needs the least memory."""
        leanest = replace(self.space.leanest(layout), recompute="full", async_tp=False)
        if leanest not in self._lean:
            self._lean[leanest] = self._fits(leanest)
        return self._lean[leanest]

    def _schedule(self, layout: Plan) -> None:
        if self._fits_recomputed(layout) and self._fits(self.space.leanest(layout)):
            for plan in self.space.scheduled(layout):
                self._push(self._timer.step_time(plan, with_fsdp=False).seconds, partial(self._replicate, plan))

    def _replicate(self, plan: Plan) -> None:
        """Queue the number of replicas that fits and takes the least time, and the others for the case of faults."""
        fitting = list(takewhile(self._fits, self.space.replicated(plan)))
        if fitting:
            ordered = sorted(fitting, key=lambda replicated: self._timer.step_time(replicated).seconds)
            self._push(self._timer.step_time(ordered[0]).seconds, partial(self._judge, ordered))

    def _judge(self, plans: list[Plan]) -> None:
        for plan in plans:
            if faults := self.search.faults(plan):
                self.result.excluded[faults[0].key] += 1
                continue
            candidate = self.search.candidate(plan)
            self.result.judged.append(candidate)
            self._push(candidate.time.seconds, partial(self.result.best.append, candidate))
            return
