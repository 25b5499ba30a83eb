"""Make one step of a run again on one device, and look into it: samples, gradients and activations.

Initial weights, data and random numbers are functions of the seed, the step and names, and the parallel plan changes
none of them. So any step can be made again, from the newest checkpoint before it, or from the initial weights. Nothing
is written to the run's folder.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan.adapters import spec_of
from torchtitan.checkpoint import layout
from torchtitan.checkpoint.layout import ADAPTER_STATE
from torchtitan.checkpoint.stored_tensors import open_tensors
from torchtitan.config import manager
from torchtitan.config.changes import changes, kept_job
from torchtitan.config.sections.model import Compile, Parallelism
from torchtitan.config.sections.run import Callbacks, EarlyStop, Metrics, Profiling
from torchtitan.config.sections.training import Validation
from torchtitan.core.errors import JobError
from torchtitan.core.files import FileError
from torchtitan.core.random_draws import clean_name
from torchtitan.datasets.samples import IGNORE
from torchtitan.guards import BadStep, RollBack
from torchtitan.job import ResolvedJob
from torchtitan.launcher.run_folder import (
    JOB_FILE,
    REFERENCE_FILE,
    RecordedPlan,
    job_of_step,
    jobs_of_steps,
    plan_of_start,
)
from torchtitan.metrics.json_lines import METRICS, read_records
from torchtitan.parallelisms.degrees import AXES, ParallelDims
from torchtitan.process.ranks import Ranks
from torchtitan.rules.loading import fewest_ranks
from torchtitan.training.batches import Batch
from torchtitan.training.step import CLIPPING, FORWARD_BACKWARD, StepData, StepObserver
from torchtitan.training.trainer import Trainer

IN_BACKWARD = "optimizer.early_step_in_backward"
"""An option that frees the gradients, so that a replay leaves it out."""
ONE_DEVICE = Parallelism(data_parallel_shard_degree=1)


@dataclasses.dataclass(frozen=True)
class ReplayStart:
    """A state to replay from. `folder`: its checkpoint; None for the initial weights. `trainer`: the trainer's state
    in a checkpoint of the start of the run that made the step; {} without one. `plan`: of that start, None in runs of
    earlier versions. `samples`: of the step.
    """

    step: int
    folder: Path | None
    trainer: dict[str, Any]
    plan: RecordedPlan | None
    samples: int

    def dims(self) -> ParallelDims | None:
        """Return the degrees of the plan that made the step; None if neither the start nor a checkpoint tells."""
        degrees = self.trainer.get("degrees") if self.plan is None else self.plan.degrees
        if not isinstance(degrees, dict) or not all(isinstance(degrees.get(axis), int) for axis in AXES):
            return None
        world_size = 1
        for axis in AXES:
            world_size *= degrees[axis]
        return ParallelDims(world_size=world_size, **{axis: degrees[axis] for axis in AXES})


@dataclasses.dataclass(frozen=True)
class ReplaySample:
    """One sample of the step. `number`: counted over all ranks. `tokens`: its tokens with a loss."""

    number: int
    loss: float
    """Mean over its tokens with a loss."""
    tokens: int
    rows: list[dict[str, torch.Tensor]]
    """Its rows in the batch, two for a preference pair, as tensors [S]."""


@dataclasses.dataclass
class Extremes:
    """The smallest and largest value of a block's outputs, NaN ignored, and the number that is not finite."""

    low: float = float("inf")
    high: float = float("-inf")
    not_finite: int = 0

    def add(self, values: torch.Tensor) -> None:
        """Include `values`, of any shape."""
        finite = values[values.isfinite()]
        self.not_finite += values.numel() - finite.numel()
        if finite.numel():
            low, high = torch.aminmax(finite)
            self.low, self.high = min(self.low, float(low)), max(self.high, float(high))


@dataclasses.dataclass
class ReplayedStep:
    """A step that was made again. `norms`: of the gradients by parameter. `blocks`: of the activations by block."""

    start: ReplayStart
    loss: float = 0.0
    grad_norm: float = 0.0
    samples: list[ReplaySample] = dataclasses.field(default_factory=list)
    norms: dict[str, float] = dataclasses.field(default_factory=dict)
    blocks: dict[str, Extremes] = dataclasses.field(default_factory=dict)
    bad_weights: list[str] = dataclasses.field(default_factory=list)
    """Weights that were not finite before the step."""
    first_output: str = ""
    """The first module with an output that is not finite; "" if there is none."""
    inputs_are_finite: bool = True
    """True if that module's inputs were finite."""
    first_gradient: str = ""
    """The first module, in the order of the backward pass, with a gradient of its output that is not finite."""


@dataclasses.dataclass(frozen=True)
class RunJob:
    """The job of one start of a run. `file`: the job's, in the run's folder."""

    run: Path
    file: Path

    @classmethod
    def of_step(cls, run: Path, step: int) -> "RunJob":
        """Return the job that made a step."""
        return cls(run, job_of_step(run, step))

    @cached_property
    def job(self) -> ResolvedJob:
        return ResolvedJob(manager.load(["--job.config_file", str(self.file)]))

    def find_start(self, step: int) -> ReplayStart:
        """Return the newest complete checkpoint before a step that this job made, or the initial weights.

        The plan and the samples belong to the start that made the step. Raises JobError if its samples are not known,
        or if another job made steps in between.
        """
        run, config = self.run, self.job.config
        complete, _ = layout.complete_steps(run / config.checkpoint.folder)
        steps = {path: layout.step_of(path.name) or 0 for path in complete}
        folder = next((path for path in complete if steps[path] < step), None)
        first = 0 if folder is None else steps[folder]
        states = {job_of_step(run, steps[path]): layout.read_state(path)["trainer"] for path in complete if steps[path]}
        trainer = states.get(self.file, {})
        samples = self.samples_per_step(trainer)
        now = kept_job(config, {}, samples)
        for file in {*jobs_of_steps(run, first + 1, step - 1).values()} - {self.file, run / JOB_FILE}:
            other = RunJob(run, file)
            before = kept_job(other.job.config, {}, other.samples_per_step(states.get(file, {})))
            differing = [change for change in changes(before, now) if not change.key.startswith("parallelism.")]
            if differing:
                raise JobError(
                    f"{run}: steps from {first + 1} on were made with {differing[0].key} = {differing[0].before}, and "
                    f"step {step} with {differing[0].now}; replay needs a checkpoint in between"
                )
        return ReplayStart(first, folder, trainer, plan_of_start(self.file), samples)

    def samples_per_step(self, trainer: dict[str, Any]) -> int:
        """Return the samples of each step that this start made. `trainer`: as in `ReplayStart`.

        Raises JobError if its plan, its checkpoint, its job and its metrics tell none, or different numbers.
        """
        plan, size = plan_of_start(self.file), self.job.config.training.global_batch_size
        counts = set(self.logged_samples())
        counts |= set() if plan is None else {plan.samples}
        counts |= {trainer["samples"]} if isinstance(trainer.get("samples"), int) else set()
        counts |= {size} if size > 0 else set()
        if len(counts) == 1:
            return counts.pop()
        sources = f"plan, checkpoints, job and {METRICS} of the start that made the step"
        problem = f"{sources} differ in it: {sorted(counts)}" if counts else f"none of {sources} has it"
        raise JobError(
            f"{self.run}: the number of samples in a step is not known: {problem}; replay a step of another start, or "
            "train with training.global_batch_size set"
        )

    def logged_samples(self) -> Iterator[int]:
        """Yield the samples per step between logged steps of this start, if all have training.seq_len tokens."""
        job, run = self.job, self.run
        if job.model.spec.whole_records and not job.data.is_packed and job.config.data.pad_to != "seq_len":
            return
        length, before = job.layout.rows_per_sample * job.config.training.seq_len, (0, 0)
        try:
            records = read_records(run / METRICS)
        except (OSError, FileError):
            return
        for record in records:
            if "loss" in record and isinstance(record.get("tokens"), int) and record["step"] > before[0]:
                count, remainder = divmod(record["tokens"] - before[1], length * (record["step"] - before[0]))
                if not remainder and job_of_step(run, before[0] + 1) == job_of_step(run, record["step"]) == self.file:
                    yield count
                before = record["step"], record["tokens"]

    def replay(self, step: int, report: Callable[[str], None] = lambda line: None) -> ReplayedStep:
        """Make a step again that this job made. `report`: called with a line on the steps before it.

        Raises JobError if the run's data, weights or plan cannot be rebuilt on one rank.
        """
        start = self.find_start(step)
        with tempfile.TemporaryDirectory(prefix="torchtitan-") as folder:
            if (self.run / REFERENCE_FILE).exists():  # computed once per run
                Path(folder, REFERENCE_FILE).symlink_to((self.run / REFERENCE_FILE).resolve())
            trainer = Trainer(self.repeating_job(start, Path(folder)).config, Ranks())
            try:
                restore_caches(trainer, start)
                return _replay(trainer, start, step, report)
            finally:
                trainer.metrics.close()
                trainer.loader.close()
                trainer.validator.close()

    def repeating_job(
        self, start: ReplayStart, folder: Path, plan: Parallelism = ONE_DEVICE, options: Mapping[str, Any] | None = None
    ) -> ResolvedJob:
        """Return the job that makes the same steps from the start's checkpoint, and writes only to `folder`.

        `plan`: without an open degree. `options`: further ones to change.
        """
        job, config, options = self.job, self.job.config, dict(options or {})
        dp = plan.data_parallel_shard_degree * plan.data_parallel_replicate_degree
        rows = config.training.local_batch_size
        if job.model.spec.streams_documents and start.samples > rows:  # the rows of all ranks, each with its documents
            if (dims := start.dims()) is None:
                raise JobError(
                    f"{self.run}: each data-parallel rank reads its own rows, and nothing tells the number of ranks"
                )
            if dims.dp > 1 and (reason := spec_of(config.adapter).state_of_all_rows(config.adapter)):
                raise JobError(
                    f"{self.run}: {reason}, and one process has one such cache; replay needs one data-parallel rank"
                )
            rows *= dims.dp
        elif start.samples % dp == 0:
            rows = gcd(rows, start.samples // dp)
        cache = job.data.cache
        checkpoint = dataclasses.replace(config.checkpoint, enable=False, best_metric=None, exclude_from_loading=[])
        if start.folder is not None:
            checkpoint = dataclasses.replace(
                checkpoint,
                enable=True,
                load_only=True,
                load_step=start.step,
                folder=str(start.folder.parent.resolve()),
                allow_config_change=[*checkpoint.allow_config_change, IN_BACKWARD, *options],
            )
        changed: dict[str, Any] = {
            IN_BACKWARD: False,
            "job.dump_folder": str(folder),
            "job.clean_start": "never",
            "job.time_limit": None,
            "training.global_batch_size": start.samples,
            "training.local_batch_size": rows,
            "data.cache_dir": str(cache if cache.exists() else folder / "data"),
            "checkpoint": checkpoint,
            "compile": Compile(),
            "metrics": Metrics(log_freq=1, plot=False),
            "profiling": Profiling(),
            "validation": Validation(),
            "early_stop": EarlyStop(),
            "callbacks": Callbacks(),
            "guard.replay_every": 0,  # further forwards, which would be watched too
            "parallelism": plan,
        }
        return job.with_options(changed).with_options(options).on_ranks(fewest_ranks(plan))


def restore_caches(trainer: Trainer, start: ReplayStart) -> None:
    """Fill an adapter's caches from those that the run's ranks have saved, if a rank has those of all of its rows.

    Ranks of a pipeline have caches of microbatches, and ranks of one cache that they share parts of it. Without
    a cache in the checkpoint, with such ones, or with those of another plan, the start has read the last segments
    again.
    """
    adapter, dims = trainer.model.stateful_adapter, start.dims()
    if adapter is None or start.folder is None or dims is None or dims.pp > 1:
        return
    if layout.read_state(start.folder)["trainer"].get("degrees") != dims.all_degrees:
        return
    with open_tensors("native", start.folder) as stored:
        prefixes = [f"{ADAPTER_STATE}{ranks_of_sample(number, dims)[0]}." for number in range(dims.dp)]
        names = [name.removeprefix(prefixes[0]) for name in stored.names if name.startswith(prefixes[0])]
        saved = {name: [stored.read(prefix + name) for prefix in prefixes] for name in names}
    # row i of rank r is row i * dp + r of all; the clock is the same on all ranks
    rows = {name: v[0] if name.endswith("clock") else torch.stack(v, 1).flatten(0, 1) for name, v in saved.items()}
    shapes = {name: list(tensor.shape) for name, tensor in rows.items()}
    parts = trainer.model.parts
    if not rows or not (
        caches := adapter.tensors_to_restore(parts, shapes, trainer.job.layout.batch_rows(), trainer.model.device)
    ):
        return
    for name, tensor in caches.items():
        tensor.copy_(rows[name])
    adapter.state_restored = True
    trainer.model.prepare_adapter(lambda tokens: ())


def make_steps_before(trainer: Trainer, step: int, report: Callable[[str], None] = lambda line: None) -> None:
    """Make the steps again from the trainer's start up to `step`, without it. Raises JobError if that cannot be."""
    if trainer.current_step >= step or step > trainer.config.training.steps:
        first = (
            1 if step > trainer.current_step else trainer.current_step + 1
        )  # it may have begun with the counters of its weights
        last = trainer.config.training.steps
        raise JobError(f"--step: given {step}; allowed: {first} to {last}, the steps of the job after its start")
    if trainer.current_step < step - 1:
        report(f"making steps {trainer.current_step + 1} to {step - 1} again")
    while trainer.current_step < step - 1:
        try:
            trainer.step(trainer.fetch())
        except (BadStep, RollBack) as error:
            raise JobError(f"step {trainer.current_step + 1} cannot be made again: {error}; replay that one") from error


def _replay(trainer: Trainer, start: ReplayStart, step: int, report: Callable[[str], None]) -> ReplayedStep:
    make_steps_before(trainer, step, report)
    data, result = trainer.fetch(), ReplayedStep(start)
    named_parameters = list(trainer.model.named_parameters())
    result.bad_weights = [n for n, p in named_parameters if p.is_floating_point() and not p.isfinite().all()]
    trainer.training_step.observer = _Inspection(trainer, result)
    loss, norm = trainer.training_step.forward_backward(data), trainer.training_step.clip()
    assert norm is not None  # the replay has left out IN_BACKWARD
    result.loss, result.grad_norm = float(loss), float(norm)
    return result


class _Inspection(StepObserver):
    """Look into the gradients of one step: at modules in each forward and backward, at gradients before the clipping,
    at samples afterwards. An adapter with state remembers the batch, so its samples come before their backward.
    """

    def __init__(self, trainer: Trainer, result: ReplayedStep) -> None:
        self.trainer, self.model, self.result = trainer, trainer.model, result
        self.watch: AbstractContextManager = nullcontext()

    def start(self, data: StepData) -> None:
        sources = self.trainer.prefetcher.batches  # with tensors that the model does not read, too
        self.batches = list(zip(data.microbatches, sources, strict=True))
        self.coming = iter(self.batches)

    def begin(self, part: str) -> None:
        if part == FORWARD_BACKWARD:
            if self.model.stateful_adapter is not None:
                self.add_samples(*next(self.coming))
            self.watch = watch_modules(self.model.parts[0], self.result)
            self.watch.__enter__()
        elif part == CLIPPING:
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
                    self.result.norms[name] = float(torch.linalg.vector_norm(gradient.float()))

    def end(self, part: str) -> None:
        if part == FORWARD_BACKWARD:
            self.watch.__exit__(None, None, None)
        elif self.model.stateful_adapter is None:
            for batch, source in self.batches:
                self.add_samples(batch, source)

    def add_samples(self, batch: Batch, source: Batch) -> None:
        self.result.samples += _samples(self.trainer, batch, source, len(self.result.samples))


def _samples(trainer: Trainer, batch: Batch, source: Batch, first_number: int) -> Iterator[ReplaySample]:
    """Compute the loss of each sample of a batch by itself, with the random numbers of the step.

    An adapter with state has its own for each row, so it gets the whole batch, without the labels of other rows.
    """
    size, rows = trainer.job.layout.rows_per_sample, len(batch["tokens"])
    for first in range(0, rows, size):
        sample = {key: rows_of(value, first, size, rows) for key, value in batch.items()}
        of_source = {key: rows_of(value, first, size, rows) for key, value in source.items()}
        if trainer.model.stateful_adapter is not None:
            is_other = torch.arange(rows, device=batch["labels"].device) // size != first // size
            sample = batch | {"labels": batch["labels"].masked_fill(is_other[:, None], IGNORE)}
        tokens = trainer.preparer.objective.count(of_source)
        loss = float(trainer.model.loss_sum(sample, update_state=False)) / max(tokens, 1)
        texts = [{key: value[row] for key, value in of_source.items()} for row in range(size)]
        yield ReplaySample(first_number + first // size, loss, tokens, texts)


def rows_of(value: torch.Tensor, first: int, size: int, rows: int) -> torch.Tensor:
    """Return `size` rows of a tensor [B, ...]; a tensor of all rows [1, ...] itself."""
    return value[first : first + size] if value.shape[0] == rows else value


@contextmanager
def watch_modules(model: nn.Module, result: ReplayedStep) -> Iterator[None]:
    """Record the extremes of the blocks' outputs, and the first output and gradient that is not finite.

    Looks at every output on the host, so it is slow.
    """
    blocks = {id(block): f"layers.{name}" for name, block in model.layers.items()}

    def after_forward(name: str, module: nn.Module, inputs: Any, kwargs: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if id(module) in blocks:
                result.blocks.setdefault(blocks[id(module)], Extremes()).add(tensor.detach())
            if not result.first_output and not tensor.isfinite().all():
                result.first_output = name
                result.inputs_are_finite = all(bool(t.isfinite().all()) for t in tensors_in([inputs, kwargs]))
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: after_backward(name, gradient))

    def after_backward(name: str, gradient: torch.Tensor) -> None:
        if not result.first_gradient and not gradient.isfinite().all():
            result.first_gradient = name

    hooks = []
    for wrapped_name, module in model.named_modules():
        if wrapped_name:
            name = clean_name(wrapped_name)

            def hook(module: nn.Module, inputs: Any, kwargs: Any, output: Any, name: str = name) -> None:
                after_forward(name, module, inputs, kwargs, output)

            hooks.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the floating-point tensors, of any shape, in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def ranks_of_sample(number: int, dims: ParallelDims) -> range | list[int]:
    """Return the ranks that read a sample, in rising order."""
    dp_rank = number % dims.dp
    inner = dims.cp * dims.tp
    return [(stage * dims.dp + dp_rank) * inner + rank for stage in range(dims.pp) for rank in range(inner)]
