"""Estimate a rank's peak memory, and find changes that make a job fit.

Small jobs are rehearsed with all layers. Deep ones are rehearsed with a few layers of each stage and then with some
more, because memory grows linearly with the layers in each part of a step. Each part is extrapolated by itself, since
another part may have the peak in the full model. Of a pipeline's microbatches a few run (time/traffic.py); one that
overlaps all-to-alls is rehearsed with the fewest that reach the highest number in flight.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import islice
from typing import Any

from torchtitan.adapters import spec_of
from torchtitan.assembly import parts
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.config.sections.model import ActivationCheckpoint
from torchtitan.job import ResolvedJob
from torchtitan.job.layout import JobLayout
from torchtitan.models.sizes import layer_spans
from torchtitan.parallelisms.parallel_model import runs_by_segments
from torchtitan.parallelisms.pipeline.actions import Table, with_full_backward
from torchtitan.parallelisms.pipeline.simulator import simulate
from torchtitan.planner.memory.closed_form import needed, reserved
from torchtitan.planner.rehearsal import (
    FROZEN,
    GRADIENTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    REFERENCE,
    Moments,
    Rehearsed,
    Sent,
    rehearse,
    run_in_processes,
)
from torchtitan.planner.time.traffic import RUNNING, Group
from torchtitan.rules import Device, check

AT_ONCE = 24
"""Maximum layers x batches of a rank for a rehearsal of all its layers. A layer takes about 30 ms."""
TOGETHER = 200
"""Minimum layers x batches for rehearsals in separate processes. Starting a process takes less time than these."""
FIRST = 3
"""Minimum number of layers to rehearse without a pipeline: the first, the last and inner layers gather differently."""
ON_THE_HOST = (PARAMETERS, FROZEN, GRADIENTS, OPTIMIZER_STATE, REFERENCE)
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

    def needed(self, device: Device) -> float:
        """Return the bytes of the device in which these tensors count as fitting."""
        return needed(self.peak, on_gpu=device == "cuda")


def predict(job: ResolvedJob, traffic: bool = False) -> list[Prediction]:
    """Predict rank 0 or, with a pipeline, the first rank of each place in it that may need the most memory.

    Of places with equal stages one is predicted, with the most microbatches in flight. `traffic`: also predict their
    messages, which may take twice as long.
    """
    full = Stages.of(job)
    few = full.with_few_microbatches()
    variants, rounds = [few], 0.0
    if traffic and few is not full:  # each further round of microbatches sends the same amount
        samples, extra = few.local_samples, job.layout.pp * job.layout.parallelism.pipeline_parallel_microbatch_size
        variants.append(full.with_samples(samples + extra))
        rounds = (full.local_samples - samples) / extra
    places = few.fullest_places()
    predictions = []
    rehearsals = _rehearsed([stages.share(place) for place in places for stages in variants])
    for place in places:
        rehearsal, *extended = islice(rehearsals, len(variants))
        moments = rehearsal.moments
        if extended:
            rehearsal = rehearsal.extended_by(rounds, rehearsal, extended[0])
        moment = max(moments, key=lambda name: sum(moments[name].values()))
        kinds = {kind: round(size) for kind, size in moments[moment].items() if round(size) > 0}
        predictions.append(Prediction(few.rank(place), place, moment, kinds, rehearsal.sent, rehearsal.groups))
    return predictions


def flops_of_a_rank(job: ResolvedJob) -> float:
    """Return the FLOPs of a step's matrix products, averaged over all ranks. Recomputation does not count."""
    args, seq_len = job.model.args, job.layout.training.seq_len
    flops = parts.model_spec(job.model).flops_per_token(args, seq_len)
    if ModelBuilder(job).adapter() is not None:
        flops = ModelBuilder(job).adapted_model()[2].flops_per_token(flops, args.num_matmul_parameters, seq_len)
    return flops.causal * job.layout.rows * seq_len / job.world_size


def worst(predictions: list[Prediction]) -> Prediction:
    return max(predictions, key=lambda prediction: prediction.peak)


@dataclass(frozen=True)
class _Share:
    """The rehearsals that predict one rank of a job."""

    stages: "Stages"
    rank: int
    layers: dict[int, int]
    """Stage of the rank -> its number of layers."""
    layer_counts: list[dict[int, int]]
    """Layers per stage in each rehearsal: first the fewest of all stages, then more of each stage that has more."""
    passes: int
    """Number of forward passes through these layers in a rehearsal."""

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
        offloaded = self.stages.job.layout.training.enable_cpu_offload
        return dataclasses.replace(total, moments=_on_the_device(total.moments) if offloaded else total.moments)


def _rehearsed(shares: list[_Share]) -> Iterator[Rehearsed]:
    """Yield each share's rehearsal, extrapolated to all layers."""
    tasks = [(share.stages.with_layers(counts), share.rank) for share in shares for counts in share.layer_counts]
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


@dataclass(frozen=True)
class Stages:
    """The stages of a job's pipeline, and the fewer layers and microbatches that rehearsals need of them."""

    job: ResolvedJob
    modules: list[list[str]]
    """Names of the modules of every stage; without a pipeline, of the layers of the only stage."""

    @classmethod
    def of(cls, job: ResolvedJob) -> "Stages":
        if job.layout.pp == 1:
            return cls(job, [[f"layers.{number}" for number in range(job.model.args.n_layers)]])
        plan = parts.model_spec(job.model).plan
        return cls(
            job, ModelBuilder(job).pipeline_options().stages(ModelBuilder(job).meta_model(), plan, job.layout.pp)
        )

    @property
    def local_samples(self) -> int:
        return self.job.layout.training.local_batch_size

    def rank(self, place: int) -> int:
        """Return the first rank of this place in the pipeline."""
        return place * (self.job.world_size // self.job.layout.pp)

    def of_place(self, place: int) -> list[int]:
        """Return the numbers of the stages of a place in the pipeline."""
        pp, options = self.job.layout.pp, ModelBuilder(self.job).pipeline_options()
        return [0] if pp == 1 else options.stages_of_rank(place, pp, len(self.modules))

    @property
    def overlaps(self) -> bool:
        """True if the pipeline hides all-to-alls of experts behind computation."""
        return runs_by_segments(self.job.layout.dims, ModelBuilder(self.job).parallel_options())

    @property
    def passes(self) -> int:
        """Number of forward passes of a step; a third batch is like the second."""
        return self._microbatches * min(2, self.job.layout.batches_per_step)

    @property
    def _microbatches(self) -> int:
        return self.job.layout.microbatches if self.job.layout.pp > 1 else 1

    def share(self, place: int) -> _Share:
        """Return the rehearsals that predict the first rank of a place in the pipeline."""
        layers = {stage: sum(map(_is_layer, self.modules[stage])) for stage in self.of_place(place)}
        fewest = {stage: self.fewest_layers(stage) for stage in layers}
        microbatches = self._microbatches if self.overlaps else min(self._microbatches, RUNNING)
        passes = microbatches * min(2, self.job.layout.batches_per_step)
        if sum(layers.values()) * passes <= AT_ONCE or self.layers_differ:
            fewest = layers
        extended = [fewest | {stage: fewest[stage] + self._period} for stage in layers if layers[stage] > fewest[stage]]
        return _Share(self, self.rank(place), layers, [fewest, *extended], passes)

    def fullest_places(self) -> list[int]:
        """Return one of each set of pipeline ranks with equal stages: the one with the most microbatches in flight.

        Where layers of the same kind differ, no two ranks have equal stages.
        """
        if self.job.layout.pp == 1:
            return [0]
        in_flight = simulate(self._table()).peak_activations

        def content(name: str) -> str | bool:
            return self._is_dense(name) if _is_layer(name) and not self.layers_differ else name

        fullest: dict[object, int] = {}
        for place in range(self.job.layout.pp):
            key = tuple(tuple(map(content, self.modules[stage])) for stage in self.of_place(place))
            fullest[key] = max(fullest.get(key, place), place, key=lambda equal: in_flight[equal])
        return sorted(fullest.values())

    def _table(self) -> Table:
        return ModelBuilder(self.job).pipeline_options().table(self.job.layout.pp, len(self.modules))

    @cached_property
    def layers_differ(self) -> bool:
        """True if layers of the same kind may differ in their modules or in the parameters that they train."""
        adapter = self.job.config.adapter
        if spec_of(adapter).stateful or adapter.layers or self._interval > 1:
            return True
        patterns = (*adapter.train_fully, *self.job.config.training.unfrozen)
        if not patterns:
            return False
        layers: dict[str, set[str]] = defaultdict(set)  # by number
        for name, _ in ModelBuilder(self.job).meta_model().named_parameters():
            if _is_layer(name):
                _, number, local_name = name.split(".", 2)
                layers[number].add(local_name)
        kinds = {frozenset(owns) for owns in layers.values()}  # dense ones, and those with experts
        return not all(_chooses_alike(pattern, layers, kind) for pattern in patterns for kind in kinds)

    @property
    def _interval(self) -> int:
        """Number of layers after which the kinds of layers repeat that differ in their parameters."""
        args = self.job.model.args
        return args.global_interval if hasattr(args, "global_head_dim") else getattr(args, "moe_interval", 1)

    @property
    def _period(self) -> int:
        """Number of layers after which the recompute pattern repeats."""
        recompute = self.job.config.activation_checkpoint
        by_number = recompute.mode == "selective" and recompute.selective_ac_option != "op"
        return int(recompute.selective_ac_option) if by_number else 1

    def fewest_layers(self, stage: int) -> int:
        """Return the fewest layers of a stage to rehearse: all before the first one with experts, and some more."""
        layers, fewest = list(filter(_is_layer, self.modules[stage])), FIRST if self.job.layout.pp == 1 else 1
        return min(len(layers), sum(map(self._is_dense, layers)) + -(-fewest // self._period) * self._period)

    def _is_dense(self, layer: str) -> bool:
        """Return whether a layer comes before the first one with experts; False for a model without experts."""
        return int(layer.removeprefix("layers.")) < getattr(self.job.model.args, "n_dense_layers", 0)

    def with_layers(self, layer_counts: dict[int, int]) -> ResolvedJob:
        """Return the job with only the first `layer_counts` layers of each stage, and one layer of other stages.

        Where each n-th layer has other parameters, those keep as many as leave the stages after them where they are
        among the n.
        """
        stages, interval = self.modules, self._interval
        if all(layer_counts.get(stage) == sum(map(_is_layer, names)) for stage, names in enumerate(stages)):
            return self.job
        thinned_stages: list[list[str]] = []
        chosen_layers: list[str] = []
        for stage, names in enumerate(stages):
            layers = list(filter(_is_layer, names))
            layers = layers[: layer_counts.get(stage, (len(layers) - 1) % interval + 1)]
            new_names = {name: f"layers.{len(chosen_layers) + index}" for index, name in enumerate(layers)}
            thinned_stages.append(
                [new_names.get(name, name) for name in names if name in new_names or not _is_layer(name)]
            )
            chosen_layers += layers
        overrides = dict(self.job.config.model.overrides) | {"n_layers": len(chosen_layers)}
        if getattr(self.job.model.args, "n_dense_layers", 0):
            overrides["n_dense_layers"] = sum(map(self._is_dense, chosen_layers))
        if getattr(self.job.model.args, "window_layers", ""):
            overrides |= _windows_of(self.job.model.args, chosen_layers)
        changes: dict[str, Any] = {"model.overrides": overrides}
        if self.job.layout.pp > 1:
            changes["parallelism.module_fqns_per_model_part"] = thinned_stages
            changes["parallelism.pipeline_parallel_layers_per_stage"] = None
        return self.job.with_options(changes)

    def with_few_layers(self, most: int) -> ResolvedJob:
        """Return the job with the fewest layers of each stage that show how its layers gather and recompute.

        A job of which a rank has at most `most` layers times forward passes is unchanged, and one whose layers differ.
        """
        if self.job.model.args.n_layers * self.passes <= most * self.job.layout.pp or self.layers_differ:
            return self.job
        return self.with_layers({stage: self.fewest_layers(stage) for stage in range(len(self.modules))})

    def with_few_microbatches(self) -> "Stages":
        """Return the job with the fewest microbatches that keep each rank's highest number in flight.

        The new number is a multiple of the pipeline's ranks. The job is unchanged if no smaller one does, and if its
        schedule keeps all microbatches in the rehearsal: one without the overlap of expert parallel, or from a CSV
        file.
        """
        options, pp = self.job.layout.parallelism, self.job.layout.pp
        if not self.overlaps or options.pipeline_parallel_schedule_csv is not None:
            return self
        size, target = options.pipeline_parallel_microbatch_size, self._in_flight()
        for rounds in range(2, self.local_samples // size // pp):
            part = self.with_samples(rounds * pp * size)
            if part._in_flight() == target:
                return part
        return self

    def _in_flight(self) -> list[Any]:
        table = self._table()
        return [simulate(variant).peak_activations for variant in (table, with_full_backward(table))]

    def with_samples(self, samples: int) -> "Stages":
        """Return the job with this local batch size and an unchanged number of batches per step."""
        layout = self.job.layout
        global_samples = samples * layout.dims.dp * layout.batches_per_step
        changes = {"training.local_batch_size": samples, "training.global_batch_size": global_samples}
        return dataclasses.replace(self, job=self.job.with_options(changes))


def _is_layer(name: str) -> bool:
    return name.startswith("layers.")


def _windows_of(args: Any, layers: Sequence[str]) -> dict[str, Any]:
    """Return the sizes with which these layers, by their names, keep their windows when they are numbered from 0."""
    windowed = [place for place, name in enumerate(layers) if not args.is_global(int(name.removeprefix("layers.")))]
    spans = layer_spans(windowed, len(layers))
    return {"window_layers": spans} if windowed else {"window_layers": "", "sliding_window": 0}


def _chooses_alike(pattern: str, layers: Mapping[str, set[str]], kind: frozenset[str]) -> bool:
    """Return whether the pattern matches the same parameters in all layers of this kind."""
    of_kind = [number for number, owns in layers.items() if owns == kind]
    return all(
        len({fnmatchcase(f"layers.{number}.{local_name}", pattern) for number in of_kind}) == 1 for local_name in kind
    )


# Changes that make a job fit

Remedy = tuple[dict[str, Any], float]
"""Options with their new values, and the bytes in which the changed job counts as fitting."""
MOST_HALVES = 4


def remedies(job: ResolvedJob, memory: float) -> list[Remedy]:
    """Return the changes that make the job fit in `memory` bytes, or the one that needs the least if none does."""
    candidates: list[Remedy] = []
    before = {fault.key for fault in check(job.config, job.world_size, job.device_type)}

    def bytes_with(changes: dict[str, Any]) -> float | None:
        changed = job.with_options(changes)
        if any(fault.key not in before for fault in check(changed.config, job.world_size, job.device_type)):
            return None
        size = worst(predict(changed)).needed(job.device_type)
        candidates.append((changes, size))
        return size

    stronger = list(_stronger_recompute(job.config.activation_checkpoint))
    for changes in [*stronger, *(smaller for smaller in _smaller_batches(job.layout))]:
        size = bytes_with(changes)
        if size is not None and size <= memory and changes not in stronger:
            break
    if not any(size <= memory for _, size in candidates):
        for changes in _smaller_batches(job.layout) if stronger else ():
            size = bytes_with(stronger[-1] | changes)
            if size is not None and size <= memory:
                break
    fitting = [remedy for remedy in candidates if remedy[1] <= memory]
    return fitting or sorted(candidates, key=lambda remedy: remedy[1])[:1]


def _stronger_recompute(recompute: ActivationCheckpoint) -> Iterator[dict[str, Any]]:
    mode, option = recompute.mode, recompute.selective_ac_option
    if mode in ("none", "memory_budget") or (mode == "selective" and option != "op"):
        yield {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
    if mode != "full":
        yield {"activation_checkpoint.mode": "full"}


def _smaller_batches(layout: JobLayout) -> Iterator[dict[str, Any]]:
    """Yield repeated halvings of the local batch, or of a pipeline's microbatch.

    Gradient accumulation keeps the size of the global batch.
    """
    if layout.pp > 1:
        name, size = (
            "parallelism.pipeline_parallel_microbatch_size",
            layout.parallelism.pipeline_parallel_microbatch_size,
        )
    else:
        name, size = "training.local_batch_size", layout.training.local_batch_size
    for _ in range(MOST_HALVES):
        if size % 2:
            return
        size //= 2
        yield {name: size}
