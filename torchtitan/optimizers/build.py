"""Build a job's optimizers: parameter groups, and one optimizer per model part, or per parameter, for in-backward."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from torchtitan.core.errors import JobError
from torchtitan.core.random_draws import clean_name
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.optimizers.spec import OptimizerSpec


class Optimizers:
    """Several optimizers that step together.

    `optimizers` is the plain list, for schedules and checkpoints; `measures`: see OptimizerSpec.
    """

    def __init__(self, optimizers: list[Optimizer], measures: Sequence[str] = ()):
        self.optimizers, self.measures = optimizers, measures

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def measured(self) -> dict[str, float]:
        """Return means over all ranks of the measurements since the last call. Every rank calls it."""
        measurements = [optimizer.measured() for optimizer in self.optimizers] if self.measures else []  # type: ignore[attr-defined]
        numbers = [[number for values in measurements for number in values[name]] for name in self.measures]
        totals = torch.tensor([[sum(values), len(values)] for values in numbers], dtype=torch.float64)
        if self.measures and dist.is_initialized():
            dist.all_reduce(totals)
        return {name: total / n for name, (total, n) in zip(self.measures, totals.tolist(), strict=True) if n}

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)


class OptimizersInBackward(Optimizers):
    """One optimizer per parameter, which steps in backward as soon as the gradient is complete and then frees it.

    So the gradients of the full model never exist at once. They cannot be clipped by their joint norm or accumulated,
    and the schedule's rate must be set before backward. Parameters may be plain or FSDP2's, which calls the hooks
    after its reduction; DistributedDataParallel calls them before it.
    """

    def __init__(self, optimizers: list[Optimizer], measures: Sequence[str] = ()):
        super().__init__(optimizers, measures)
        for optimizer in optimizers:
            (parameter,) = optimizer.param_groups[0]["params"]
            parameter.register_post_accumulate_grad_hook(_step_and_free(optimizer))

    def step(self) -> None:
        """Already done in backward."""

    def zero_grad(self) -> None:
        """Already done in backward."""


def _step_and_free(optimizer: Optimizer) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return hook


def build_optimizers(
    model_parts: Iterable[nn.Module],
    *,
    name: str,
    lr: float,
    weight_decay: float,
    shared: Mapping[str, Any] = MappingProxyType({}),
    options: Mapping[str, Any] = MappingProxyType({}),
    decay_norms_and_biases: bool = True,
    implementation: str | None = None,
    in_backward: bool = False,
    rate_of: Callable[[str], float] = lambda name: 1.0,
) -> Optimizers:
    """Build one optimizer per model part, over the parameters that require gradients.

    Without `decay_norms_and_biases`, those with fewer than two dimensions and the biases of stacked experts form
    separate groups, with no weight decay.
    `shared` and `options` are the job's beta1, beta2 and eps, and its table (see OptimizerSpec). `implementation`: None
    selects the optimizer's first. `rate_of`: parameter name -> factor of `lr`. Raises JobError for options that the
    optimizer does not support.
    """
    if name not in OPTIMIZERS:
        raise JobError(f"optimizer {name!r}: choose one of {', '.join(OPTIMIZERS)}")
    spec = OPTIMIZERS[name]
    implementation = implementation or next(iter(spec.implementations))
    if implementation not in spec.implementations:
        available = ", ".join(spec.implementations)
        raise JobError(f"optimizer implementation {implementation!r}: {name} has {available}; choose one of these")
    read = {key: shared[key] for key in spec.shared}
    for option, setting, allowed, remedy in spec.faults(name, read, options):
        raise JobError(f"{option}: given {setting}; allowed: {allowed}; {remedy}")
    make = resolve_name(spec.make)
    arguments = {"lr": lr, **spec.arguments(read, options), **spec.implementations[implementation]}
    groups = [_groups(part, spec, weight_decay, decay_norms_and_biases, rate_of) for part in model_parts]
    for group in (group for part in groups for group in part):
        group["lr"] = group.get("lr", lr) * group.pop("rate")
    groups = [part for part in groups if part]  # a pipeline stage may have no trained parameter
    if not in_backward:
        return Optimizers([make(part, **arguments) for part in groups], spec.measures)
    singles = [{**group, "params": [p]} for part in groups for group in part for p in group["params"]]
    return OptimizersInBackward([make([single], **arguments) for single in singles], spec.measures)


def _groups(
    part: nn.Module,
    spec: OptimizerSpec,
    weight_decay: float,
    decay_norms_and_biases: bool,
    rate_of: Callable[[str], float],
) -> list[dict[str, Any]]:
    """Return groups of equal weight decay, rate and entries of `spec.group_of`; decayed groups come first."""
    entries_of = resolve_name(spec.group_of) if spec.group_of else lambda name, parameter: {}
    tied = getattr(part, "tied_names", {})  # a pipeline's copy of a tied weight steps like the weight
    names = ((clean_name(name), p) for name, p in part.named_parameters() if p.requires_grad)
    parameters = [(tied.get(name, name), p) for name, p in names]
    groups: list[dict[str, Any]] = []
    for decayed in (True, False):
        for name, parameter in parameters:
            is_matrix = parameter.dim() > 1 and not name.endswith("bias")
            if decayed != (decay_norms_and_biases or is_matrix):
                continue
            entries = {"weight_decay": weight_decay if decayed else 0.0, "rate": rate_of(name)}
            entries |= entries_of(name, parameter)
            group = next((g for g in groups if {k: g[k] for k in g if k != "params"} == entries), None)
            if group is None:
                group = {"params": [], **entries}
                groups.append(group)
            group["params"].append((name, parameter) if spec.needs_names else parameter)
    return groups


def adam(groups: list[dict[str, Any]], *, beta1: float, beta2: float, **options: Any) -> torch.optim.Adam:
    """Return torch's Adam. Its arguments are the job's option names."""
    return torch.optim.Adam(groups, betas=(beta1, beta2), **options)


def adamw(groups: list[dict[str, Any]], *, beta1: float, beta2: float, **options: Any) -> torch.optim.AdamW:
    """Return torch's AdamW. Its arguments are the job's option names."""
    return torch.optim.AdamW(groups, betas=(beta1, beta2), **options)
