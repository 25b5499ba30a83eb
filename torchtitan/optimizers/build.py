"""Optimizers of a job: parameter groups, one optimizer per model part, or one per parameter that steps in backward."""

from collections.abc import Callable, Iterable, Iterator
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchtitan.optimizers import OPTIMIZERS

IMPLEMENTATIONS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


class Optimizers:
    """Several optimizers that step as one. `optimizers` is the plain list, for schedules and checkpoints."""

    def __init__(self, optimizers: list[Optimizer]):
        self.optimizers = optimizers

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)


class OptimizersInBackward(Optimizers):
    """Each parameter has an optimizer of its own, which steps in backward as soon as the gradient is complete and then
    frees it: gradients of the whole model never exist at once.

    So nothing is left to do after backward, gradients cannot be clipped by their joint norm or accumulated, and the
    schedule's rate must be set before backward. Parameters may be plain or FSDP2's, which calls the hooks after its
    reduction; DistributedDataParallel calls them before it.
    """

    def __init__(self, optimizers: list[Optimizer]):
        super().__init__(optimizers)
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
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decay_norms_and_biases: bool = True,
    implementation: str = "fused",
    in_backward: bool = False,
) -> Optimizers:
    """One optimizer per model part, over the parameters that require gradients. Without `decay_norms_and_biases`,
    those with fewer than two dimensions form a group of their own, with no weight decay.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer {name!r}: choose one of {', '.join(OPTIMIZERS)}")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"optimizer implementation {implementation!r}: choose one of {', '.join(IMPLEMENTATIONS)}")
    make = resolve_name(OPTIMIZERS[name])
    options = {"lr": lr, "betas": (beta1, beta2), "eps": eps, **IMPLEMENTATIONS[implementation]}
    groups = [_groups(part, weight_decay, decay_norms_and_biases) for part in model_parts]
    if not in_backward:
        return Optimizers([make(part, **options) for part in groups])
    singles = [{**group, "params": [p]} for part in groups for group in part for p in group["params"]]
    return OptimizersInBackward([make([single], **options) for single in singles])


def _groups(part: nn.Module, weight_decay: float, decay_norms_and_biases: bool) -> list[dict[str, Any]]:
    parameters = [p for p in part.parameters() if p.requires_grad]
    decayed = [p for p in parameters if decay_norms_and_biases or p.dim() > 1]
    rest = [p for p in parameters if not decay_norms_and_biases and p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
