"""Find the fastest plans of a job: best first by a lower bound of the step's time.

A layout is bounded by its computation without a bubble, a plan by the formula of planner/time/step_time.py. The
plan with the lowest bound is judged next: its memory by formula, its legality by the rules of jobs alone, its time by
simulation. A plan is accepted as soon as no other has a bound below its time, so the result is the same as if all plans
were judged. Plans with the same degrees and schedule are represented by the fastest.
"""

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from pathlib import Path

from torchtitan.config.job import JobConfig
from torchtitan.config.options import Fault
from torchtitan.config.sections.run import Checkpoint
from torchtitan.core.errors import JobError
from torchtitan.core.hardware import Hardware
from torchtitan.job import ResolvedJob
from torchtitan.parallelisms.degrees import divisors, indivisible_sizes, split_sizes
from torchtitan.parallelisms.pipeline.cut import SCHEDULES, check_microbatches
from torchtitan.parallelisms.pipeline.simulator import Costs, NumberedTable, Simulation, simulate, with_numbers
from torchtitan.parallelisms.pipeline.tables import build_table
from torchtitan.planner.memory.closed_form import MemoryPrediction, predict_memory
from torchtitan.planner.memory.rank_sizes import RankSizes
from torchtitan.planner.plan import Plan, Workload
from torchtitan.planner.time.messages import Calibration, Parts, StepTime
from torchtitan.planner.time.step_time import StepTimer
from torchtitan.process.machine import limit_as_share
from torchtitan.rules import check

MOST_ROWS = 16
"""Largest number of rows of a forward pass."""
RECOMPUTE = ("none", "op", "2", "full")
"""2: every second block."""
CP_METHODS = ("allgather", "ulysses", "alltoall")
"""Methods of context parallel. "ring" sends and stores as much as "alltoall"."""
SMALLER_CHUNKS = 4
"""Number of smaller chunks of the loss in one of the default size."""
FEWEST_TOKENS = 2048
"""Smallest part of a sequence that context parallel leaves to a rank, unless there is no plan then."""


@dataclass(frozen=True)
class Space:
    """The plans of a workload on some GPUs."""

    workload: Workload
    gpus: int
    machine: int
    """GPUs in a machine. Tensor parallel stays inside."""
    compiled: tuple[bool, ...]
    """True if plans may compile the model, False if they may not, the faster one first."""
    async_tp: bool
    """True if plans may use async tensor parallel."""
    fewest_tokens: int = FEWEST_TOKENS
    coarse: bool = False
    """Degrees and rows are powers of 2, and recompute is of no block, of operators or of all."""

    def layouts(self) -> Iterator[Plan]:
        """Yield plans that differ in degrees, rows or recompute: fully sharded, a pipeline without a schedule."""
        for degrees in self._degrees():
            rows = self.workload.rows // degrees.shards
            for microbatch in self._divisors(rows):
                if microbatch > MOST_ROWS * self.workload.rows_per_sample or microbatch % self.workload.rows_per_sample:
                    continue
                count = rows // microbatch
                if degrees.pp > 1:
                    batched = degrees._replace(microbatch=microbatch, microbatches=count)
                else:
                    batched = degrees._replace(microbatch=microbatch, passes=count)
                for recompute in (mode for mode in RECOMPUTE if not self.coarse or mode != "2"):
                    for async_tp in sorted({False, self.async_tp and degrees.tp > 1}):
                        yield batched._replace(recompute=recompute, async_tp=async_tp)

    def _degrees(self) -> Iterator[Plan]:
        """Yield all degrees that divide the GPUs, the batch and the model."""
        workload, args = self.workload, self.workload.args
        samples = workload.rows // workload.rows_per_sample
        for tp in self._tensor_parallel():
            for cp in self._divisors(math.gcd(self.gpus // tp, workload.seq_len)):
                if cp > max(1, workload.seq_len // self.fewest_tokens):
                    continue
                for pp in self._divisors(self.gpus // tp // cp):
                    shards = self.gpus // (tp * cp * pp)
                    if pp > (args.n_layers if workload.base is None else 1) or samples % shards:
                        continue
                    for ep in self._divisors(math.gcd(self._experts, shards * cp * tp)):
                        yield Plan(tp, cp, pp, ep, shards, compiled=self.compiled[0], loss_chunks=0)

    def _divisors(self, number: int) -> list[int]:
        return [n for n in divisors(number) if not self.coarse or n & (n - 1) == 0]

    def _tensor_parallel(self) -> list[int]:
        """Return the degrees that divide the model. Their ranks are in the same machine."""
        ranks = self.gpus if self.gpus <= self.machine else math.gcd(self.gpus, self.machine)
        return [tp for tp in self._divisors(ranks) if not indivisible_sizes(tp, split_sizes(self.workload.args))]

    @property
    def _experts(self) -> int:
        """Experts of a layer; 1 for a model without."""
        args = self.workload.args
        return args.n_experts if getattr(args, "expert_layers", 0) else 1

    def variants(self, layout: Plan) -> Iterator[Plan]:
        """Yield a layout's plans with each method of context parallel, with and without compilation."""
        for compiled in self.compiled:
            for method in CP_METHODS if layout.cp > 1 else CP_METHODS[:1]:
                yield layout._replace(compiled=compiled, cp_method=method)

    def leanest(self, layout: Plan) -> Plan:
        """Return the plan of a layout that needs the least memory: 1F1B stores the fewest activations."""
        return layout._replace(schedule="1F1B") if layout.pp > 1 else layout

    def with_loss_chunks(self, plan: Plan) -> Iterator[Plan]:
        """Yield a plan with the chunks of the loss that a job has by default, with whole logits and smaller chunks.

        Logits that a job does not split by default need less memory whole than in chunks, mostly.
        """
        yield plan._replace(loss_chunks=0)
        chunks = self.workload.loss_pieces(plan._replace(loss_chunks=0))
        if chunks > 1:
            yield from (plan._replace(loss_chunks=number) for number in (1, SMALLER_CHUNKS * chunks))

    def scheduled(self, layout: Plan) -> Iterator[Plan]:
        """Yield a layout's plans with each schedule and number of stages, fully sharded."""
        if layout.pp == 1:
            yield layout
        else:
            yield from self._scheduled(layout)

    def replicated(self, plan: Plan) -> Iterator[Plan]:
        """Yield a fully sharded plan with more and more replicas, which need more and more memory."""
        for replicas in divisors(plan.shards):
            yield plan._replace(replicas=replicas, shards=plan.shards // replicas)

    def _scheduled(self, plan: Plan) -> Iterator[Plan]:
        n_layers = self.workload.args.n_layers
        total = n_layers + sum(self.workload.ends)
        for traits in SCHEDULES.values():
            cuts: dict[int, int | None] = {traits.stages_per_rank: None} if traits.fixed_stages else {}
            for per_stage in range(total, 0, -1) if not traits.fixed_stages else ():
                stages, remainder = divmod(-(-total // per_stage), plan.pp)
                if not remainder and stages > 1:
                    cuts[stages] = per_stage
            cuts.setdefault(traits.stages_per_rank, None)  # not even, where no number of layers makes as many
            for stages, layers_per_stage in cuts.items():
                if stages * plan.pp > n_layers or not self._has_microbatches(traits.name, plan, stages):
                    continue
                for overlap in sorted({False, traits.name == "DualPipeV" and plan.ep > 1}):
                    yield plan._replace(
                        schedule=traits.name,
                        stages_per_rank=stages,
                        layers_per_stage=layers_per_stage,
                        overlap_experts=overlap,
                    )

    def _has_microbatches(self, schedule: str, plan: Plan, stages: int) -> bool:
        """Return whether the schedule can run the plan's microbatches."""
        try:
            check_microbatches(schedule, plan.microbatches, plan.pp, stages * plan.pp)
        except JobError:
            return False
        return True


TO_BE_FETCHED = (
    *("model.tokenizer_path", "training.dataset", "training.sources", "validation.", "data."),
    *("checkpoint.", "job.", "metrics.", "profiling.", "adapter.initial_path"),
)
"""Prefixes of options with faults that prevent a job from starting but not from being simulated."""


def is_judged(fault: Fault) -> bool:
    """Return True if the fault prevents a simulation of the job too."""
    return not fault.key.startswith(TO_BE_FETCHED)


MOST_FORWARDS = 1500
"""Largest number of simulated forwards of all ranks. Longer steps are extrapolated, as a full pipeline is periodic."""
TICK = 1e-7
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
        first, *more = [float(self.simulation(plan, count).makespan) * TICK for count in counts]
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

    def simulation(self, plan: Plan, microbatches: int) -> Simulation:
        """Simulate a number of microbatches, in TICKs."""
        shape = plan.schedule, plan.pp, microbatches, plan.stages_per_rank, plan.merges_backward, plan.overlap_experts
        costs = [Costs(*(round(seconds / TICK) for seconds in stage)) for stage in self.timer.stage_times(plan)]
        send = round(self.timer.messages.send(plan).seconds / TICK)
        overlap = Fraction(1) if plan.overlap_experts else None
        return simulate(_table(*shape), costs, send, overlap)


@lru_cache(64)
def _table(
    schedule: str, pp: int, microbatches: int, stages_per_rank: int, merged: bool, overlap: bool
) -> NumberedTable:
    table = build_table(schedule, pp, microbatches, stages_per_rank, merge_backward=merged, overlap=overlap)
    return with_numbers(table)


def faults_as_new(job: ResolvedJob) -> list[Fault]:
    """Return the faults of a job in a folder without a run, except for data and weights that are not here.

    Plans are for other machines, so what this one's job.dump_folder holds does not matter.
    """
    folder = str(Path(job.config.job.dump_folder, "planned"))
    new = job.with_options({"job.dump_folder": folder, "checkpoint.folder": Checkpoint().folder})
    faults = check(new.config, new.world_size, new.device_type, opens_data=False)
    return [fault for fault in faults if is_judged(fault)]


@dataclass(frozen=True)
class Limits:
    """Limits of a plan."""

    memory: float
    """Bytes of a GPU."""
    most_seconds: float = float("inf")
    """Of a step, from a deadline or a budget."""
    certain: bool = True
    """True if plans have to count as fitting, False if it is enough that they may fit."""


def memory_limit(config: JobConfig, hardware: Hardware) -> float:
    """Return the bytes of a device that the job may use. Nothing enforces the job's limit on a CPU."""
    total, limit = hardware.memory_gib * 2**30, config.memory.limit
    return total if limit is None or hardware.cores is not None else total * limit_as_share(limit, int(total))


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
    may_fit: list[Candidate] = field(default_factory=list)
    """Faster ones that may fit, but do not count as fitting."""
    judged: list[Candidate] = field(default_factory=list)
    """All plans with a prediction that are legal and fit."""
    layouts: int = 0
    excluded: Counter[str] = field(default_factory=Counter)
    """Number of plans that a constraint excludes, by its name, among those that were judged."""
    complete: bool = True
    """False if MOST_ACTIONS ended the search."""

    @property
    def plans(self) -> list[Candidate]:
        """The plans that count as fitting or, if there are none, those that may fit."""
        return self.best or self.may_fit


@dataclass
class Search:
    """Searches plans for one job on one kind of hardware. The job's number of ranks does not matter."""

    base: ResolvedJob
    workload: Workload
    samples: int
    hardware: Hardware
    calibration: Calibration
    _memory: dict[Plan, MemoryPrediction] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.timer = PipelineTimer(StepTimer(self.workload, self.hardware, self.calibration))

    def with_hardware(self, hardware: Hardware) -> "Search":
        return replace(self, hardware=hardware)

    def job(self, plan: Plan) -> ResolvedJob:
        """Return the job with this plan."""
        return self.base.with_options(plan.changes(self.base.layout, self.samples)).on_ranks(plan.gpus)

    def faults(self, plan: Plan) -> list[Fault]:
        """Return the faults of the job with this plan."""
        return faults_as_new(self.job(plan))

    @cached_property
    def state(self) -> float:
        """Bytes of a replica's parameters, gradients and optimizer state on its GPUs."""
        plan = Plan(microbatch=self.workload.rows_per_sample, recompute="full", loss_chunks=0)
        if self.base.config.training.enable_cpu_offload:
            return 0.0
        sizes = RankSizes(self.job(plan), rank=0)
        return sizes.parameters + sizes.gradients + sizes.optimizer

    def candidate(self, plan: Plan) -> Candidate:
        """Predict a legal plan."""
        return Candidate(plan, self.timer.step_time(plan), self.memory(plan))

    def space(self, gpus: int) -> Space:
        return Space(
            workload=self.workload,
            gpus=gpus,
            machine=self.hardware.devices_per_machine,
            compiled=self.compilations,
            async_tp=self.base.config.parallelism.enable_async_tensor_parallel,
        )

    @cached_property
    def compilations(self) -> tuple[bool, ...]:
        """True and False, or False alone if the job cannot be compiled on any plan, as without a C++ compiler."""
        single = Plan(microbatch=self.workload.rows_per_sample, loss_chunks=0, recompute="none", compiled=True)
        faults = [fault for fault in self.faults(single) if fault.key.startswith("compile.")]
        return (False,) if faults else (True, False)

    def find(
        self,
        gpus: int,
        top: int,
        limits: Limits,
        accepts: Callable[[Plan], bool] = lambda plan: True,
        needs_plan: bool = True,
    ) -> Result:
        """Return the fastest `top` plans on this number of GPUs, of those that `accepts` returns True for.

        Where none is legal and fits but `needs_plan`, sequences are split into smaller parts than FEWEST_TOKENS. Where
        so many do not fit that the search ends at its limit without a plan, degrees that are powers of 2 are searched
        alone.
        """
        space = self.space(gpus)
        result = _Frontier(self, space, limits, accepts).run(top)
        if result.best or (result.complete and not needs_plan):
            return result
        if not result.complete:
            coarse = _Frontier(self, replace(space, coarse=True), limits, accepts).run(top)
            coarse.complete = False
            return coarse
        return _Frontier(self, replace(space, fewest_tokens=1), limits, accepts).run(top)

    def memory(self, plan: Plan) -> MemoryPrediction:
        """Predict the memory of a plan. Compilation matters where gradients could be computed apart without it."""
        if plan.pp == 1 or plan.recompute != "none":
            plan = plan._replace(compiled=False)
        if plan not in self._memory:
            self._memory[plan] = predict_memory(self.job(plan), self.hardware)
        return self._memory[plan]


class _Frontier:
    """The queue of one search: layouts and plans by their lower bounds."""

    def __init__(self, search: Search, space: Space, limits: Limits, accepts: Callable[[Plan], bool]) -> None:
        self.search, self.space, self.limits, self._accepts = search, space, limits, accepts
        self.result = Result()
        self._timer = search.timer.timer
        self._order = itertools.count()  # breaks ties by the order of enumeration
        self._lean: dict[Plan, bool] = {}
        self._listed: set[object] = set()  # layouts of plans in the result
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    def run(self, top: int) -> Result:
        result = self.result
        for layout in self.space.layouts():
            methods = [plan for plan in self.space.variants(layout) if plan.compiled == layout.compiled]
            self._push(min(map(self._least_seconds, methods)), partial(self._vary, layout))
        result.layouts = len(self._queue)
        for actions in itertools.count():
            if not self._queue or len(result.best) >= top:
                break
            if actions == MOST_ACTIONS:
                result.complete = False
                break
            heapq.heappop(self._queue)[2]()
        if not result.complete:
            for candidate in sorted(result.judged, key=lambda candidate: candidate.time.seconds):
                self._accept(candidate)
            result.best = result.best[:top]
        return result

    def _least_seconds(self, plan: Plan) -> float:
        """Return a lower bound for every number of chunks of the loss: whole logits may take less time."""
        return min(map(self._timer.least_seconds, self.space.with_loss_chunks(plan)))

    def _push(self, bound: float, action: Callable[[], None]) -> None:
        if bound <= self.limits.most_seconds:
            heapq.heappush(self._queue, (bound, next(self._order), action))
        else:
            self.result.excluded["deadline or budget"] += 1

    def _fits(self, plan: Plan) -> bool:
        memory = self.search.memory(plan)
        fits = (memory.needed if self.limits.certain else memory.low) <= self.limits.memory
        if not fits:
            self.result.excluded["memory"] += 1
        return fits

    def _fits_somehow(self, plan: Plan) -> bool:
        """Return whether the plan fits with any schedule and any number of chunks of the loss."""
        leanest = self.space.leanest(plan)._replace(async_tp=False, compiled=False)
        if leanest not in self._lean:
            self._lean[leanest] = self._fits_in_chunks(leanest)
        return self._lean[leanest]

    def _fits_in_chunks(self, plan: Plan) -> bool:
        """Return whether the plan fits with any number of chunks of the loss, which matters if the peak has logits."""
        for chunked in self.space.with_loss_chunks(plan):
            if self._fits(chunked):
                return True
            if not self.search.memory(chunked).logits:
                return False
        return False

    def _vary(self, layout: Plan) -> None:
        """Queue a layout's variants that fit, if any does with full recompute, which needs the least memory."""
        variants = [] if layout.layout in self._listed else list(self.space.variants(layout))
        if any(self._fits_somehow(plan._replace(recompute="full")) for plan in variants):
            for plan in filter(self._fits_somehow, variants):
                self._push(self._least_seconds(plan), partial(self._schedule, plan))

    def _schedule(self, layout: Plan) -> None:
        for plan in self.space.scheduled(layout):
            if plan.layout not in self._listed:
                chunked = self.space.with_loss_chunks(plan)
                bound = min(self._timer.step_time(one, with_fsdp=False).seconds for one in chunked)
                self._push(bound, partial(self._complete, plan))

    def _complete(self, plan: Plan) -> None:
        """Queue the plan with each number of replicas and of chunks of the loss, the fastest first."""
        plans = [
            chunked for replicated in self.space.replicated(plan) for chunked in self.space.with_loss_chunks(replicated)
        ]
        self._next(iter(sorted(plans, key=lambda one: self._timer.step_time(one).seconds)), [])

    def _next(self, plans: Iterator[Plan], full: list[Plan]) -> None:
        """Queue the first of these plans that fits. `full`: those that do not, as then with more replicas."""
        for plan in plans:
            if plan.layout in self._listed or any(
                plan.replicas >= other.replicas and plan.loss_chunks == other.loss_chunks for other in full
            ):
                continue
            if self._fits(plan):
                self._push(self._timer.step_time(plan).seconds, partial(self._judge, plan, plans, full))
                return
            full.append(plan)

    def _judge(self, plan: Plan, alternatives: Iterator[Plan], full: list[Plan]) -> None:
        if plan.layout in self._listed:
            return
        if not self._accepts(plan):
            self.result.excluded["deadline or budget"] += 1
            self._next(alternatives, full)
            return
        if faults := self.search.faults(plan):
            self.result.excluded[faults[0].key] += 1
            sharded = plan._replace(replicas=1, shards=plan.shards * plan.replicas, loss_chunks=0)
            if faults[0].key not in [fault.key for fault in self.search.faults(sharded)]:
                self._next(alternatives, full)  # another number of replicas or chunks may be legal
            return
        candidate = self.search.candidate(plan)
        self.result.judged.append(candidate)
        self._push(candidate.time.seconds, partial(self._accept, candidate))

    def _accept(self, candidate: Candidate) -> None:
        """List a plan, unless a faster one of its layout is."""
        if candidate.plan.layout not in self._listed:
            self._listed.add(candidate.plan.layout)
            self.result.best.append(candidate)
