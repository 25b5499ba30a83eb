"""The layers, tokens and types of a rank, from a job's degrees. Imports no torch."""

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property, lru_cache
from itertools import accumulate
from typing import Any

from torchtitan.core.errors import FLOAT8_MULTIPLE
from torchtitan.job import ResolvedJob
from torchtitan.job.layout import JobLayout
from torchtitan.models.sizes import STACK
from torchtitan.parallelisms.fsdp_messages import may_gather_float8, resharding
from torchtitan.parallelisms.pipeline.cut import ScheduleTraits, schedule_traits, stages_of_rank
from torchtitan.planner.frozen_base import BYTES, FrozenBase


def in_flight(schedule: str, rank: int, pp: int, microbatches: int, chunks: int, merged: bool) -> int:
    """Return the highest number of (stage, microbatch) pairs that a rank stores activations of.

    `chunks`: stages of a rank. `merged`: gradients of inputs and weights are computed together. Compared with the
    simulated tables in tests/planner/test_memory.py.
    """
    name, everything = schedule_traits(schedule).name, chunks * microbatches
    warmup = (chunks - 1) * _round_size(pp, microbatches)
    counts = {
        "GPipe": everything,
        "LoopedBFS": everything,
        "1F1B": pp - rank,
        "Interleaved1F1B": warmup + 2 * (pp - 1 - rank) + 1,
        "InterleavedZeroBubble": warmup + (pp - rank if merged else pp),
        "ZBVZeroBubble": min(2 * pp, microbatches + rank + 1),
        "DualPipeV": 2 * pp + 1,
    }
    return min(everything, counts[name])


def _round_size(pp: int, microbatches: int) -> int:
    """Return the microbatches of a round of an interleaved schedule, which a rank forwards in each stage in turn."""
    return microbatches // max(1, microbatches // pp)


def stages_in_flight(
    schedule: str, rank: int, pp: int, microbatches: int, chunks: int, merged: bool
) -> list[tuple[int, ...]]:
    """Return numbers of microbatches that each stage of a rank stores, in all states with the most in flight.

    A state with more of some stage has fewer of others. Arguments and test as of `in_flight`.
    """
    name, total = schedule_traits(schedule).name, in_flight(schedule, rank, pp, microbatches, chunks, merged)
    if chunks == 1 or total == chunks * microbatches:
        return [(total // chunks,) * chunks]
    if name == "DualPipeV":
        return [(total - rank - 1, rank + 1)]
    if name == "ZBVZeroBubble":
        return [(total - second, second) for second in (rank + 1, rank) if total - second <= microbatches]
    # forwards of rounds, stage by stage; then each further one replaces a backward of the last stage with any
    size = _round_size(pp, microbatches)
    most = min(2 * size, microbatches)
    order = Counter((number // size) % chunks for number in range(total))
    states = [tuple(order[chunk] for chunk in range(chunks))]
    while True:
        counts = list(states[-1])
        last = max(chunk for chunk in range(chunks) if counts[chunk])
        target = next((chunk for chunk in range(last) if counts[chunk] < most), None)
        if target is None:
            return states
        counts[target], counts[last] = counts[target] + 1, counts[last] - 1
        states.append(tuple(counts))


def waiting_weight_gradients(schedule: str, rank: int, pp: int, microbatches: int, merged: bool) -> int:
    """Return the highest number of stored microbatches with computed gradients of inputs, but not yet of weights.

    That is at forwards of a rank with the most in flight. Arguments and test as of `in_flight`.
    """
    if schedule_traits(schedule).name != "InterleavedZeroBubble" or merged:
        return 0
    return max(0, rank - max(0, pp - microbatches))


@cache
def _spans(counts: tuple[int, ...]) -> list[list[int]]:
    """Return the numbers of the layers of each stage, from their counts."""
    ends = list(accumulate(counts))
    return [list(range(end - count, end)) for count, end in zip(counts, ends, strict=True)]


def multiplies_in_float8(name: str, sizes: tuple[int, int], exclude: Sequence[str]) -> bool:
    """Return whether training.float8 makes a linear of a block multiply in float8, as models/layers.py decides.

    `name`: "layers.0.attention.wq". `sizes`: outputs and inputs. `exclude`: training.float8_exclude.
    """
    fits = not name.endswith(STACK) and all(size % FLOAT8_MULTIPLE == 0 for size in sizes)
    return fits and not any(fnmatchcase(name, pattern) for pattern in exclude)


@cache
def kinds_of_layers(args: Any) -> list[int]:
    """Return for each layer of a model the first one with the same parameters."""
    contents = [(args.block_linears(layer), args.block_others(layer)) for layer in range(args.n_layers)]
    return [contents.index(content) for content in contents]


def float8_weights(layout: JobLayout, args: Any, layer: int) -> int:
    """Return the number of a layer's weights that FSDP gathers in 8 bits.

    Shards that do not divide their rows are left out.
    """
    options, in_int8 = layout.training, layout.parallelism.fsdp_quantized_gather == "int8"
    reshard = resharding(layout.parallelism.fsdp_reshard_after_forward, layout.pp)
    if options.float8 != "tensorwise" or not may_gather_float8(reshard, options.enable_cpu_offload, in_int8):
        return 0
    return sum(
        sizes[0] * sizes[1]
        for name, sizes in args.block_linears(layer).items()
        if multiplies_in_float8(f"layers.{layer}.{name}", sizes, options.float8_exclude)
    )


def fullest_ranks(job: ResolvedJob) -> list[list[int]]:
    """Return sets of a job's pipeline ranks with equal stages, of each those that may store the most between passes."""
    layout, args = job.layout, job.model.args
    if layout.pp == 1:
        return [[0]]
    counts = tuple(layout.layers_by_stage(args.n_layers))
    schedule = schedule_traits(layout.parallelism.pipeline_parallel_schedule)
    return _fullest_ranks(args, counts, schedule, layout.pp, layout.microbatches, merges_backward(job))


@lru_cache(1024)
def _fullest_ranks(
    args: Any, counts: tuple[int, ...], schedule: ScheduleTraits, pp: int, microbatches: int, merged: bool
) -> list[list[int]]:
    spans, kinds = _spans(counts), kinds_of_layers(args)
    amounts: dict[object, dict[int, list[tuple[int, ...]]]] = {}
    for rank in range(pp):
        numbers = stages_of_rank(rank, pp, len(spans), schedule.style)
        stages = tuple(tuple(kinds[layer] for layer in spans[number]) for number in numbers)
        states = stages_in_flight(schedule.name, rank, pp, microbatches, len(stages), merged)
        if len(set(stages)) == 1:
            states = [(sum(state),) for state in states]
        waiting = waiting_weight_gradients(schedule.name, rank, pp, microbatches, merged)
        layers = [layer for number in numbers for layer in spans[number]]
        content = stages, 0 in layers, args.n_layers - 1 in layers
        amounts.setdefault(content, {})[rank] = [(*state, waiting) for state in states]
    return [_without_dominated(of_ranks) for of_ranks in amounts.values()]


def _without_dominated(amounts: dict[int, list[tuple[int, ...]]]) -> list[int]:
    """Return the ranks with a state that no state of another rank exceeds or equals in all amounts; the first ones."""
    ranks: list[int] = []
    for rank, states in amounts.items():
        if not any(_dominates(amounts[other], states) for other in ranks):
            ranks = [other for other in ranks if not _dominates(states, amounts[other])] + [rank]
    return ranks


def _dominates(states: list[tuple[int, ...]], smaller: list[tuple[int, ...]]) -> bool:
    """Return whether for each of the smaller states one of these has as much of everything, or more."""
    return all(any(all(map(operator.ge, state, other)) for state in states) for other in smaller)


def merges_backward(job: ResolvedJob) -> bool:
    """Return whether gradients of inputs and weights are computed together, in every schedule."""
    return job.config.activation_checkpoint.mode != "none" or job.layout.compiles_model


@dataclass(frozen=True)
class RankLayout:
    """The degrees, types, tokens and layers of a rank of a job. `rank`: of the pipeline."""

    job: ResolvedJob
    rank: int

    @cached_property
    def args(self) -> Any:
        return self.job.model.args

    # Degrees

    @cached_property
    def layout(self) -> JobLayout:
        return self.job.layout

    @cached_property
    def tp(self) -> int:
        return self.layout.tp

    @cached_property
    def cp(self) -> int:
        return self.layout.cp

    @cached_property
    def shards(self) -> int:
        """Ranks over which FSDP spreads parameters that are not experts."""
        return self.layout.fsdp_shards

    @cached_property
    def fully_sharded(self) -> bool:
        """True if FSDP wraps the model, as `uses_fully_shard` in parallelisms/parallelize.py decides."""
        layout = self.layout
        mixed = self.job.world_size > 1 and self.compute != self.stored_bytes
        offloaded = layout.training.enable_cpu_offload
        return layout.replicas * self.shards > 1 or mixed or offloaded or 1 < layout.ep < layout.expert_pool

    @property
    def in_pipeline(self) -> bool:
        return self.layout.pp > 1

    @property
    def stays_gathered(self) -> bool:
        """True if blocks stay gathered between forward and backward."""
        return not (self._resharding and self.shards > 1)

    @property
    def _resharding(self) -> bool | int:
        return resharding(self.layout.parallelism.fsdp_reshard_after_forward, self.layout.pp)

    @property
    def second_shards(self) -> int:
        """Number of ranks that share a second copy of a block's parameters between forward and backward, or 0."""
        size = self._resharding
        return size if not isinstance(size, bool) and size < self.shards else 0

    # Types

    @cached_property
    def compute(self) -> int:
        """Bytes of a computed value."""
        return BYTES[self.job.model.compute_dtype]

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of a stored parameter."""
        return BYTES[self.layout.training.dtype]

    @cached_property
    def reduced_bytes(self) -> int:
        return BYTES[self.layout.training.mixed_precision_reduce]

    @cached_property
    def base(self) -> FrozenBase | None:
        """The frozen model under the job's adapter; None if all weights are trained."""
        return FrozenBase.of(self.job)

    # Tokens

    @cached_property
    def tokens(self) -> int:
        """T, which matrix products of a tensor-parallel region see."""
        rows = self.layout.microbatch_rows if self.in_pipeline else self.layout.batch_rows()
        return rows * self.layout.training.seq_len // self.cp

    @cached_property
    def local_tokens(self) -> int:
        """Tokens outside of tensor-parallel regions."""
        return self.tokens // self.tp if self.layout.sequence_parallel else self.tokens

    @property
    def cp_method(self) -> str:
        """The method of context parallel; empty without it."""
        return self.layout.parallelism.context_parallel_rotate_method if self.cp > 1 else ""

    @property
    def hidden(self) -> float:
        """Bytes of the residual stream between two blocks."""
        return self.compute * self.args.dim * self.local_tokens

    # Microbatches

    @cached_property
    def schedule(self) -> ScheduleTraits:
        return schedule_traits(self.layout.parallelism.pipeline_parallel_schedule)

    @property
    def _schedule(self) -> tuple[str, int, int, int]:
        """The first arguments of `in_flight`."""
        return self.schedule.name, self.rank, self.layout.pp, self.layout.microbatches

    @cached_property
    def stages_in_flight(self) -> list[tuple[int, ...]]:
        """Numbers of microbatches that each stage of this pipeline rank stores, in states with the most in flight."""
        return stages_in_flight(*self._schedule, self.chunks, merges_backward(self.job))

    @property
    def waiting_weight_gradients(self) -> int:
        """Microbatches with computed gradients of inputs, but not yet of weights, where this rank stores the most."""
        return waiting_weight_gradients(*self._schedule, merges_backward(self.job))

    # Layers of this rank

    @cached_property
    def chunks(self) -> int:
        """Stages of a rank."""
        return len(self.stages)

    @cached_property
    def stages(self) -> list[list[int]]:
        """Numbers of the layers of each of this rank's stages."""
        if not self.in_pipeline:
            return [list(range(self.args.n_layers))]
        spans = _spans(tuple(self.layout.layers_by_stage(self.args.n_layers)))
        return [spans[stage] for stage in stages_of_rank(self.rank, self.layout.pp, len(spans), self.schedule.style)]

    @cached_property
    def layers(self) -> list[int]:
        return [layer for stage in self.stages for layer in stage]

    @cached_property
    def kinds(self) -> Counter[int]:
        """Number of this rank's layers that need as much as its layer of this number."""
        numbers = dict[int, int]()
        return Counter(numbers.setdefault(self._representative(layer), layer) for layer in self.layers)

    def _representative(self, layer: int) -> int:
        """Return the first layer that needs as much as this one: the model's or, if some are recomputed, the rank's."""
        return self._representatives[layer]

    @cached_property
    def _representatives(self) -> Sequence[int] | dict[int, int]:
        kinds = kinds_of_layers(self.args)
        if not self.recomputed_period:
            return kinds
        first, representatives = dict[tuple[int, bool], int](), dict[int, int]()
        for stage in self.stages:
            for place, layer in enumerate(stage):
                key = kinds[layer], place % self.recomputed_period == 0
                representatives[layer] = first.setdefault(key, layer)
        return representatives

    @cached_property
    def recomputed_period(self) -> int:
        """Every how many layers of a stage one is recomputed; 0 if all are treated alike."""
        recompute = self.job.config.activation_checkpoint
        by_number = recompute.mode == "selective" and recompute.selective_ac_option.isdecimal()
        return int(recompute.selective_ac_option) if by_number else 0

    @property
    def has_embedding(self) -> bool:
        return 0 in self.layers

    @property
    def has_head(self) -> bool:
        return self.args.n_layers - 1 in self.layers
