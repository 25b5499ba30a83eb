"""Make one step of a run again under another plan, on gloo ranks, and hold it against the step on one device.

Both steps begin with the same weights and have the same samples. The outputs of modules are compared by their mean and
root mean square over all ranks, which no sharding changes, and the gradients entry by entry, before the clipping.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from torchtitan.adapters import spec_of
from torchtitan.adapters.interface import full_tensor
from torchtitan.config.job import JobConfig
from torchtitan.config.options import ConfigError
from torchtitan.config.sections.model import Parallelism
from torchtitan.core.errors import JobError
from torchtitan.core.random_draws import clean_name, local_part
from torchtitan.job import ResolvedJob
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.process import distributed
from torchtitan.process.gloo_ranks import run_on_ranks
from torchtitan.process.ranks import read_ranks
from torchtitan.rules import check
from torchtitan.training.replay import ONE_DEVICE, ReplayStart, RunJob, make_steps_before, tensors_in
from torchtitan.training.trainer import Trainer

EXACT_TYPES = {
    "training.mixed_precision_param": "float32",
    "training.mixed_precision_reduce": "float32",
    "training.float8": "none",
}
"""Options of both steps, so that rounding is small and a mistake of the plan is not."""
TOLERANCES = {"float32": (5e-6, 1e-4), "bfloat16": (5e-3, 5e-2)}
"""Largest differences by rounding: of loss and gradient norm; of a gradient's largest entry and an output's root mean
square."""
SMALLEST_SCALE = 1e-4
"""Of a gradient, relative to the norm of all: entries that cancel to nothing have the rounding of what they sum."""
GRADIENTS, WEIGHTS = "gradients.safetensors", "weights.safetensors"
REFERENCE, PLAN = "one device", "plan"
"""The two steps, and the folders that they write to."""
Moments = dict[str, list[float]]
"""Name of a module -> sum, sum of squares and number of the elements of its outputs."""


@dataclass(frozen=True)
class GradientDifference:
    """The difference of a gradient from one device's, relative to its scale. `ratio`: of the two, if one is a multiple
    of the other.
    """

    size: float
    ratio: float | None


@dataclass(frozen=True)
class RankStep:
    """A rank's part of a step: loss and gradient norm of all ranks, and what this one has of outputs and gradients."""

    loss: float
    grad_norm: float
    outputs: Moments
    gradients: dict[str, GradientDifference]
    partial: list[str] = field(default_factory=list)
    """Parameters whose gradient only some of the ranks with them have; the same on all ranks."""


@dataclass
class StepComparison:
    """A step under a plan beside the same on one device. `outputs`: modules that differ, in the order of the forward
    pass, with the root mean square of both. `gradients`: all, in the order of the backward pass.
    """

    start: ReplayStart
    job: ResolvedJob
    tolerances: tuple[float, float]
    """Of loss and norm, and of tensors."""
    loss: tuple[float, float]
    grad_norm: tuple[float, float]
    modules: int = 0
    """On one device."""
    compared: int = 0
    """Modules that ran on a rank as well: segments of a pipeline run by themselves the parts of some."""
    outputs: dict[str, tuple[float, float]] = field(default_factory=dict)
    gradients: dict[str, GradientDifference] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """Parameters that no rank has."""
    partial: list[str] = field(default_factory=list)
    """Parameters whose gradient only some of the ranks with them have; nothing of these is compared."""

    @property
    def differing(self) -> dict[str, GradientDifference]:
        return {name: one for name, one in self.gradients.items() if not one.size <= self.tolerances[1]}

    @property
    def equal(self) -> bool:
        numbers = all(within(*pair, self.tolerances[0]) for pair in (self.loss, self.grad_norm))
        return numbers and bool(self.compared) and not (self.outputs or self.differing or self.missing or self.partial)


def within(value: float, reference: float, tolerance: float) -> bool:
    return abs(value - reference) <= tolerance * abs(reference)


def compare_under_plan(
    run_job: RunJob, step: int, plan: Parallelism, options: Mapping[str, Any], folder: Path, limit: float
) -> StepComparison:
    """Make a step under a plan and on one device. `options`: further ones of both; those of the plan are in `plan`.

    `folder`: an empty one. `limit`: seconds for each of the two. Raises ConfigError for an illegal plan, RankError.
    """
    start, options = run_job.find_start(step), EXACT_TYPES | dict(options)
    if (
        run_job.job.model.spec.whole_records
    ):  # otherwise a plan pads the samples of each of its batches to other lengths
        options = {"data.pad_to": "seq_len"} | options
    if spec_of(run_job.job.config.adapter).stateful:
        raise JobError(
            f"--under: adapter.kind = {run_job.job.config.adapter.kind} keeps a cache on each rank; leave it out"
        )
    jobs = {
        name: run_job.repeating_job(start, folder / name, degrees, options)
        for name, degrees in ((REFERENCE, ONE_DEVICE), (PLAN, plan))
    }
    job = jobs[PLAN]
    judged = job.with_options({"checkpoint": run_job.job.config.checkpoint})  # not where this one loads from
    if faults := check(judged.config, job.world_size, "cpu"):
        raise ConfigError(faults)
    for name in jobs:
        (folder / name).mkdir()
    (one,), parts = (
        run_on_ranks(job.world_size, rank_step, name, job.config, step, folder, limit=limit)
        for name, job in jobs.items()
    )
    return compare(start, job, one, parts)


def compare(start: ReplayStart, job: ResolvedJob, one: RankStep, parts: Sequence[RankStep]) -> StepComparison:
    """Compare the parts of all ranks with one device's step."""
    training = job.config.training
    types = {training.dtype, training.mixed_precision_param, training.mixed_precision_reduce}
    tolerances = max(TOLERANCES[name] for name in types)
    result = StepComparison(
        start, job, tolerances, (parts[0].loss, one.loss), (parts[0].grad_norm, one.grad_norm), len(one.outputs)
    )
    result.partial = parts[0].partial
    for name, moments in one.outputs.items():
        of_ranks = [part.outputs[name] for part in parts if name in part.outputs]
        result.compared += bool(of_ranks)
        if of_ranks and not _are_close(
            summed := [sum(column) for column in zip(*of_ranks, strict=True)], moments, tolerances[1]
        ):
            result.outputs[name] = _rms(summed), _rms(moments)
    for name in reversed(one.gradients):
        of_holders = [part.gradients[name] for part in parts if name in part.gradients]
        if of_holders:
            result.gradients[name] = max(of_holders, key=lambda one: (one.size != one.size, one.size))
        elif name not in result.partial:
            result.missing.append(name)
    return result


def _rms(moments: Sequence[float]) -> float:
    return (moments[1] / moments[2]) ** 0.5


def _are_close(moments: Sequence[float], reference: Sequence[float], tolerance: float) -> bool:
    scale = tolerance * _rms(reference)
    means = abs(moments[0] / moments[2] - reference[0] / reference[2])
    return means <= scale and abs(_rms(moments) - _rms(reference)) <= scale


def rank_step(name: str, config: JobConfig, step: int, folder: Path) -> RankStep:
    """Make the step on this rank. REFERENCE writes its weights before the step and its gradients to `folder`, where the
    ranks of PLAN read them.
    """
    is_reference, trainer = name == REFERENCE, Trainer(config, read_ranks())
    for part in trainer.model.parts:
        if part.loss is not None:
            part.loss.leaves_out = False  # which tokens are left out depends on the plan
    first = trainer.current_step + 1
    if is_reference:
        make_steps_before(trainer, step)
        if first < step:
            save_file(
                {name: tensor.detach().clone() for name, tensor in trainer.model.named_tensors()}, folder / WEIGHTS
            )
    elif first < step:
        pass_steps_before(trainer, step, folder / WEIGHTS)
    data = trainer.fetch()
    with watch_outputs(trainer.model) as outputs:
        loss = trainer.training_step.forward_backward(data)
    partial = [] if is_reference else withdraw_partial_gradients(trainer.model)
    norm = trainer.model.clip_gradients(0.0)
    gradients = _write_gradients(trainer, folder) if is_reference else _compare_gradients(trainer, folder, float(norm))
    (total,) = distributed.sum_floats(float(loss))
    trainer.metrics.close()
    trainer.loader.close()
    trainer.validator.close()
    moments = {name: sums.tolist() for name, sums in outputs.items()}
    return RankStep(total / trainer.model.dims.tp, float(norm), moments, gradients, partial)


@torch.no_grad()
def pass_steps_before(trainer: Trainer, step: int, weights: Path) -> None:
    """Read the data of the steps before `step` without making them, and take the weights that one device had then."""
    while trainer.current_step < step - 1:
        trainer.fetch()
        trainer.state.step += 1
    with safe_open(weights, "pt") as stored:
        for name, tensor in trainer.model.named_tensors():
            local, _, offset = local_part(tensor)
            full = stored.get_tensor(_name_in(trainer.model, name))
            local.copy_(full[tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))])


def _name_in(model: ParallelModel, name: str) -> str:
    """Return the name of a tensor in the whole model: a copy of tied weights has another one in a pipeline."""
    tied: list[Mapping[str, str]] = [getattr(part, "tied_names", {}) for part in model.parts]
    return next((names[name] for names in tied if name in names), name)


def withdraw_partial_gradients(model: ParallelModel) -> list[str]:
    """Remove the gradients that only some of the ranks with their parameter have, and return their names: a reduction
    of one would wait for the ranks without it. All ranks call it.
    """
    trained = {_name_in(model, name): p for name, p in model.named_parameters() if p.requires_grad}
    present = {name: parameter.grad is not None for name, parameter in trained.items()}
    shares = distributed.all_gather_json(present) if dist.is_initialized() else [present]
    held = {name: [share[name] for share in shares if name in share] for share in shares for name in share}
    partial = sorted(name for name, has_gradient in held.items() if any(has_gradient) and not all(has_gradient))
    for name in partial:
        if name in trained:
            trained[name].grad = None
    return partial


def _write_gradients(trainer: Trainer, folder: Path) -> dict[str, GradientDifference]:
    gradients = {n: p.grad for n, p in trainer.model.named_parameters() if p.requires_grad and p.grad is not None}
    save_file({name: full_tensor(gradient).clone() for name, gradient in gradients.items()}, folder / GRADIENTS)
    return dict.fromkeys(gradients, GradientDifference(0.0, 1.0))


def _compare_gradients(trainer: Trainer, folder: Path, norm: float) -> dict[str, GradientDifference]:
    result = {}
    with safe_open(folder / GRADIENTS, "pt") as stored:
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad and parameter.grad is not None:
                gradient, name = full_tensor(parameter.grad).double(), _name_in(trainer.model, name)
                result[name] = difference_of(gradient, stored.get_tensor(name).double(), norm)
    return result


def difference_of(gradient: torch.Tensor, reference: torch.Tensor, norm: float) -> GradientDifference:
    """Compare two full gradients of any shape. `norm`: of the gradient of all parameters."""
    scale = max(float(reference.abs().max()), SMALLEST_SCALE * norm)
    size = float((gradient - reference).abs().max()) / scale if scale else 0.0
    square = float((reference * reference).sum())
    ratio = float((gradient * reference).sum()) / square if square else 0.0
    is_multiple = float((gradient - ratio * reference).abs().max()) <= 1e-3 * scale
    return GradientDifference(size, ratio if is_multiple else None)


@contextmanager
def watch_outputs(model: ParallelModel) -> Iterator[dict[str, torch.Tensor]]:
    """Yield sum, sum of squares and number of the elements of what each module returns, [3], by name, in the order of
    the last calls. Recompute does not count.
    """
    moments: dict[str, torch.Tensor] = {}
    is_backward = False

    def begin(part: nn.Module, inputs: Any) -> None:
        nonlocal is_backward
        is_backward = False

    def end(part: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(begin_backward)

    def begin_backward(gradient: torch.Tensor) -> None:
        nonlocal is_backward
        is_backward = True

    def add(module: nn.Module, inputs: Any, output: Any, name: str) -> None:
        for tensor in tensors_in(output):
            if tensor.dim() and not is_backward:
                values = local_part(tensor)[0].detach().double()
                sums = torch.stack([values.sum(), values.square().sum(), values.new_tensor(values.numel())])
                moments[name] = moments.pop(name, 0) + sums  # the last one, as a module may serve several layers

    hooks = []
    for part in model.parts:
        hooks += [part.register_forward_pre_hook(begin), part.register_forward_hook(end)]
        names = [(clean_name(name), module) for name, module in part.named_modules() if name]
        hooks += [module.register_forward_hook(partial(add, name=name)) for name, module in names]
    try:
        yield moments
    finally:
        for hook in hooks:
            hook.remove()
