"""Estimate a rank's peak memory, and find changes that make a job fit.

Small jobs are rehearsed with all layers. Deep ones are rehearsed with a few layers of each stage and then with some
more, because memory grows linearly with the layers in each part of a step. Each part is extrapolated by itself, since
another part may have the peak in the full model. Of a pipeline's microbatches a few run (pipeline_replay.py); one that
overlaps all-to-alls is rehearsed with the fewest that reach the highest number in flight.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

from torchtitan.adapters import spec_of
from torchtitan.assembly import parts
from torchtitan.config.job import JobConfig
from torchtitan.job import ResolvedJob
from torchtitan.parallelisms.parallel_dims import ParallelDims
from torchtitan.parallelisms.parallel_model import runs_by_segments
from torchtitan.parallelisms.pipeline.actions import with_full_backward
from torchtitan.parallelisms.pipeline.simulator import simulate
from torchtitan.planner.closed_form import reserved
from torchtitan.planner.pipeline_replay import RUNNING
from torchtitan.planner.rehearsal import (
    FROZEN,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    REFERENCE,
    Moments,
    Rehearsed,
    Sent,
    rehearse,
    run_in_processes,
)
from torchtitan.planner.traffic import Group
from torchtitan.rules import Device, check

AT_ONCE = 24
"""Maximum layers x batches of a rank for a rehearsal of all its layers. A layer takes about 30 ms."""
TOGETHER = 200
"""Minimum layers x batches for rehearsals in separate processes. Starting a process takes less time than these."""
FIRST = 3
"""Minimum number of layers to rehearse without a pipeline: the first, the last and inner layers gather differently."""
ON_THE_HOST = (PARAMETERS, FROZEN, GRADIENTS, OPTIMIZER, REFERENCE)
"""Kinds of memory that are on the host with enable_cpu_offload."""


@dataclass(frozen=True)
class Prediction:
    rank: int
    pipeline_rank: int
    moment: str
    kinds: dict[str, int]
    """Bytes by kind at the peak of their sum."""
    sent: Sent = field(default_factory=Counter)
    groups: dict[str, Group] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        return sum(self.kinds.values())

    def reserved(self, device: Device) -> tuple[float, float]:
        """Return the least and the most bytes that the device reserves for these tensors."""
        return reserved(self.peak, on_gpu=device == "cuda")


def predict(config: JobConfig, world_size: int, device: Device, traffic: bool = False) -> list[Prediction]:
    """Predict rank 0 or, with a pipeline, the first rank of each place in it that may need the most memory.

    Of places with equal stages one is predicted, with the most microbatches in flight. `traffic`: also predict their
    messages, which may take twice as long.
    """
    dims = ResolvedJob(config, world_size).layout.dims
    stages = _stages(config, dims)
    base = _with_few_microbatches(config, dims, len(stages))
    jobs, rounds = [base], 0.0
    if traffic and base is not config:  # each further round of microbatches sends the same amount
        samples, extra = base.training.local_batch_size, dims.pp * config.parallelism.pipeline_parallel_microbatch_size
        jobs.append(_with_samples(config, dims, samples + extra))
        rounds = (config.training.local_batch_size - samples) / extra
    places = _fullest_places(base, dims, stages)
    shares = [_Share.of(job, place, dims, stages) for place in places for job in jobs]
    predictions = []
    rehearsals = _rehearsed(shares, stages, device)
    for place in places:
        rehearsal, *extended = islice(rehearsals, len(jobs))
        moments = rehearsal.moments
        if extended:
            rehearsal = rehearsal.extended_by(rounds, rehearsal, extended[0])
        moment = max(moments, key=lambda name: sum(moments[name].values()))
        kinds = {kind: round(size) for kind, size in moments[moment].items() if round(size) > 0}
        rank = place * (world_size // dims.pp)
        predictions.append(Prediction(rank, place, moment, kinds, rehearsal.sent, rehearsal.groups))
    return predictions


def flops_of_a_rank(config: JobConfig, world_size: int) -> float:
    """Return the FLOPs of a step's matrix products, averaged over all ranks. Recomputation does not count."""
    args, seq_len = ResolvedJob(config).model.args, config.training.seq_len
    flops = parts.model_spec(ResolvedJob(config).model).flops_per_token(args, seq_len)
    if parts.adapter(ResolvedJob(config)) is not None:
        flops = parts.adapted_model(ResolvedJob(config))[2].flops_per_token(flops, args.num_matmul_parameters, seq_len)
    rows = ResolvedJob(config, world_size).layout.rows
    return flops.causal * rows * seq_len / world_size


def worst(predictions: list[Prediction]) -> Prediction:
    return max(predictions, key=lambda prediction: prediction.peak)


@dataclass(frozen=True)
class _Share:
    """The rehearsals that predict one rank of a job."""

    config: JobConfig
    rank: int
    dims: ParallelDims
    layers: dict[int, int]
    """Stage of the rank -> its number of layers."""
    layer_counts: list[dict[int, int]]
    """Layers per stage in each rehearsal: first the fewest of all stages, then more of each stage that has more."""
    passes: int
    """Number of forward passes through these layers in a rehearsal."""

    @classmethod
    def of(cls, config: JobConfig, place: int, dims: ParallelDims, stages: list[list[str]]) -> "_Share":
        pipeline = parts.pipeline_options(ResolvedJob(config))
        local_stages = [0] if dims.pp == 1 else pipeline.stages_of_rank(place, dims.pp, len(stages))
        layers = {stage: sum(map(_is_layer, stages[stage])) for stage in local_stages}
        fewest = {stage: _fewest_layers(config, stages[stage], dims) for stage in local_stages}
        microbatches = 1 if dims.pp == 1 else pipeline.microbatches
        if not _overlaps(config, dims):
            microbatches = min(microbatches, RUNNING)
        passes = microbatches * min(2, ResolvedJob(config, dims.world_size).layout.batches_per_step)
        if sum(layers.values()) * passes <= AT_ONCE or _layers_differ(config):
            fewest = layers
        extended = [
            fewest | {stage: fewest[stage] + _period(config)} for stage in local_stages if layers[stage] > fewest[stage]
        ]
        return cls(config, place * (dims.world_size // dims.pp), dims, layers, [fewest, *extended], passes)

    @property
    def work(self) -> int:
        return self.passes * sum(sum(counts.values()) for counts in self.layer_counts)

    def extrapolate(self, base: Rehearsed, *more: Rehearsed) -> Rehearsed:
        """Extrapolate to all layers from the rehearsals, which are in the order of `self.layer_counts`."""
        total, (fewest, *deeper) = base, self.layer_counts
        for counts, rehearsal in zip(deeper, more, strict=True):
            (stage,) = (stage for stage in counts if counts[stage] > fewest[stage])
            times = (self.layers[stage] - fewest[stage]) / (counts[stage] - fewest[stage])
            total = total.extended_by(times, base, rehearsal)
        offloaded = self.config.training.enable_cpu_offload
        return dataclasses.replace(total, moments=_on_the_device(total.moments) if offloaded else total.moments)


def _rehearsed(shares: list[_Share], stages: list[list[str]], device: Device) -> Iterator[Rehearsed]:
    """Yield each share's rehearsal, extrapolated to all layers."""
    tasks = [
        (_with_layers(share.config, stages, counts, share.dims), share.rank, share.dims.world_size, device)
        for share in shares
        for counts in share.layer_counts
    ]
    in_parallel = sum(share.work for share in shares) >= TOGETHER
    rehearsals = iter(run_in_processes(rehearse, tasks) if in_parallel else [rehearse(*task) for task in tasks])
    for share in shares:
        yield share.extrapolate(*islice(rehearsals, len(share.layer_counts)))


def _on_the_device(moments: Moments) -> Moments:
    """Leave out the memory on the host: the optimizer's step, the clipping before it, and ON_THE_HOST."""
    return {
        moment: Counter({kind: size for kind, size in kinds.items() if kind not in ON_THE_HOST})
        for moment, kinds in moments.items()
        if moment not in ("clipping", "optimizer")
    }


# Fewer layers and microbatches


def _overlaps(config: JobConfig, dims: ParallelDims) -> bool:
    return runs_by_segments(dims, parts.parallel_options(ResolvedJob(config)))


def _is_layer(name: str) -> bool:
    return name.startswith("layers.")


def _stages(config: JobConfig, dims: ParallelDims) -> list[list[str]]:
    """Return the module names of every stage; without a pipeline, the layers of the only stage."""
    if dims.pp > 1:
        return parts.pipeline_options(ResolvedJob(config)).stages(
            parts.meta_model(ResolvedJob(config)), parts.model_spec(ResolvedJob(config).model).plan, dims.pp
        )
    return [[f"layers.{number}" for number in range(ResolvedJob(config).model.args.n_layers)]]


def _fullest_places(config: JobConfig, dims: ParallelDims, stages: list[list[str]]) -> list[int]:
    """Return one of each set of pipeline ranks with equal stages: the one with the most microbatches in flight.

    Where layers of the same kind differ, no two ranks have equal stages.
    """
    if dims.pp == 1:
        return [0]
    options, dense, differ = parts.pipeline_options(ResolvedJob(config)), _num_dense(config), _layers_differ(config)
    in_flight = simulate(options.table(dims.pp, len(stages))).peak_activations

    def content(name: str) -> str | bool:
        return _number(name) < dense if _is_layer(name) and not differ else name

    fullest: dict[object, int] = {}
    for place in range(dims.pp):
        local_stages = options.stages_of_rank(place, dims.pp, len(stages))
        key = tuple(tuple(map(content, stages[stage])) for stage in local_stages)
        fullest[key] = max(fullest.get(key, place), place, key=lambda equal: in_flight[equal])
    return sorted(fullest.values())


def _layers_differ(config: JobConfig) -> bool:
    """Return whether layers of the same kind may differ in their modules or in the parameters that they train."""
    if spec_of(config.adapter).stateful or config.adapter.layers:
        return True
    patterns = (*config.adapter.train_fully, *config.training.unfrozen)
    if not patterns:
        return False
    layers: dict[str, set[str]] = defaultdict(set)  # by number
    for name, _ in parts.meta_model(ResolvedJob(config)).named_parameters():
        if _is_layer(name):
            _, number, local_name = name.split(".", 2)
            layers[number].add(local_name)
    kinds = {frozenset(owns) for owns in layers.values()}  # dense ones, and those with experts
    return not all(_chooses_alike(pattern, layers, kind) for pattern in patterns for kind in kinds)


def _chooses_alike(pattern: str, layers: Mapping[str, set[str]], kind: frozenset[str]) -> bool:
    """Return whether the pattern matches the same parameters in all layers of this kind."""
    of_kind = [number for number, owns in layers.items() if owns == kind]
    return all(
        len({fnmatchcase(f"layers.{number}.{local_name}", pattern) for number in of_kind}) == 1 for local_name in kind
    )


def _period(config: JobConfig) -> int:
    """Return the number of layers after which the recompute pattern repeats."""
    recompute = config.activation_checkpoint
    by_number = recompute.mode == "selective" and recompute.selective_ac_option != "op"
    return int(recompute.selective_ac_option) if by_number else 1


def _fewest_layers(config: JobConfig, stage: list[str], dims: ParallelDims) -> int:
    """Return the fewest layers of a stage to rehearse: all before the first one with experts, and some more."""
    period, fewest = _period(config), FIRST if dims.pp == 1 else 1
    dense = sum(_number(name) < _num_dense(config) for name in filter(_is_layer, stage))
    return min(sum(map(_is_layer, stage)), dense + -(-fewest // period) * period)


def _number(layer: str) -> int:
    return int(layer.removeprefix("layers."))


def _num_dense(config: JobConfig) -> int:
    """Return the number of layers before the first one with experts; 0 for a model without experts."""
    return getattr(ResolvedJob(config).model.args, "n_dense_layers", 0)


def _with_layers(
    config: JobConfig, stages: list[list[str]], layer_counts: dict[int, int], dims: ParallelDims
) -> JobConfig:
    """Return the job with only the first `layer_counts` layers of each stage, and one layer of other ranks' stages."""
    if all(layer_counts.get(stage) == sum(map(_is_layer, names)) for stage, names in enumerate(stages)):
        return config
    thinned_stages: list[list[str]] = []
    chosen_layers: list[str] = []
    for stage, names in enumerate(stages):
        stage_layers = list(filter(_is_layer, names))[: layer_counts.get(stage, 1)]
        new_names = {name: f"layers.{len(chosen_layers) + index}" for index, name in enumerate(stage_layers)}
        thinned_stages.append([new_names.get(name, name) for name in names if name in new_names or not _is_layer(name)])
        chosen_layers += stage_layers
    overrides: dict[str, Any] = dict(config.model.overrides) | {"n_layers": len(chosen_layers)}
    if _num_dense(config):
        overrides["n_dense_layers"] = sum(_number(name) < _num_dense(config) for name in chosen_layers)
    degrees = config.parallelism
    if dims.pp > 1:
        degrees = dataclasses.replace(
            degrees, module_fqns_per_model_part=thinned_stages, pipeline_parallel_layers_per_stage=None
        )
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, overrides=overrides), parallelism=degrees
    )


def few_layers(config: JobConfig, world_size: int, most: int) -> JobConfig:
    """Return the job with the fewest layers of each stage that show how its layers gather and recompute.

    A job of which a rank has at most `most` layers times forward passes is unchanged, and one whose layers differ.
    """
    dims = ResolvedJob(config, world_size).layout.dims
    stages, microbatches = (
        _stages(config, dims),
        parts.pipeline_options(ResolvedJob(config)).microbatches if dims.pp > 1 else 1,
    )
    passes = microbatches * min(2, ResolvedJob(config, dims.world_size).layout.batches_per_step)
    if ResolvedJob(config).model.args.n_layers * passes <= most * dims.pp or _layers_differ(config):
        return config
    counts = {number: _fewest_layers(config, stage, dims) for number, stage in enumerate(stages)}
    return _with_layers(config, stages, counts, dims)


def _with_few_microbatches(config: JobConfig, dims: ParallelDims, num_stages: int) -> JobConfig:
    """Return the job with the fewest microbatches that keep each rank's highest number in flight.

    The new number is a multiple of the pipeline's ranks. The job is unchanged if no smaller one does, and if its
    schedule keeps all microbatches in the rehearsal: one without the overlap of expert parallel, or from a CSV file.
    """
    if not _overlaps(config, dims) or config.parallelism.pipeline_parallel_schedule_csv is not None:
        return config

    def under_way(part: JobConfig) -> list[list[Any]]:
        table = parts.pipeline_options(ResolvedJob(part)).table(dims.pp, num_stages)
        return [simulate(variant).peak_activations for variant in (table, with_full_backward(table))]

    size = config.parallelism.pipeline_parallel_microbatch_size
    target = under_way(config)
    for rounds in range(2, config.training.local_batch_size // size // dims.pp):
        part = _with_samples(config, dims, rounds * dims.pp * size)
        if under_way(part) == target:
            return part
    return config


def _with_samples(config: JobConfig, dims: ParallelDims, samples: int) -> JobConfig:
    """Return the job with this local batch size and an unchanged number of batches per step."""
    global_samples = samples * dims.dp * ResolvedJob(config, dims.world_size).layout.batches_per_step
    training = dataclasses.replace(config.training, local_batch_size=samples, global_batch_size=global_samples)
    return dataclasses.replace(config, training=training)


# Changes that make a job fit

Remedy = tuple[dict[str, Any], float]
"""Options with their new values, and the most bytes that the changed job reserves."""
MOST_HALVES = 4


def remedies(config: JobConfig, world_size: int, device: Device, memory: float) -> list[Remedy]:
    """Return the changes that make the job fit in `memory` bytes, or the one that needs the least if none does."""
    candidates: list[Remedy] = []

    def needs(changes: dict[str, Any]) -> float | None:
        changed = _changed(config, changes)
        before = {fault.key for fault in check(config, world_size, device)}
        if any(fault.key not in before for fault in check(changed, world_size, device)):
            return None
        _, needed = worst(predict(changed, world_size, device)).reserved(device)
        candidates.append((changes, needed))
        return needed

    stronger = list(_stronger_recompute(config))
    for changes in [*stronger, *(smaller for smaller in _smaller_batches(config))]:
        needed = needs(changes)
        if needed is not None and needed <= memory and changes not in stronger:
            break
    if not any(needed <= memory for _, needed in candidates):
        for changes in _smaller_batches(config) if stronger else ():
            needed = needs(stronger[-1] | changes)
            if needed is not None and needed <= memory:
                break
    fitting = [remedy for remedy in candidates if remedy[1] <= memory]
    return fitting or sorted(candidates, key=lambda remedy: remedy[1])[:1]


def _stronger_recompute(config: JobConfig) -> Iterator[dict[str, Any]]:
    mode, option = config.activation_checkpoint.mode, config.activation_checkpoint.selective_ac_option
    if mode in ("none", "memory_budget") or (mode == "selective" and option != "op"):
        yield {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
    if mode != "full":
        yield {"activation_checkpoint.mode": "full"}


def _smaller_batches(config: JobConfig) -> Iterator[dict[str, Any]]:
    """Yield repeated halvings of the local batch, or of a pipeline's microbatch.

    Gradient accumulation keeps the size of the global batch.
    """
    in_pipeline = config.parallelism.pipeline_parallel_degree > 1
    name = "parallelism.pipeline_parallel_microbatch_size" if in_pipeline else "training.local_batch_size"
    section, option = name.split(".")
    size = getattr(getattr(config, section), option)
    for _ in range(MOST_HALVES):
        if size % 2:
            return
        size //= 2
        yield {name: size}


def _changed(config: JobConfig, changes: dict[str, Any]) -> JobConfig:
    for name, value in changes.items():
        section, option = name.split(".")
        part = dataclasses.replace(getattr(config, section), **{option: value})
        config = dataclasses.replace(config, **{section: part})
    return config
