"""Optimizers that step one parameter after the other, on this rank's shard: base classes, Adafactor and AdamW8bit."""

from typing import Any

import torch
from torch.optim import Optimizer

from torchtitan.optimizers import moments
from torchtitan.optimizers.layout import Layout, local
from torchtitan.optimizers.moments import Moments, Options, State


class ByParameter(Optimizer):
    """An optimizer that updates one parameter at a time. `options`: defaults of the groups."""

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, {"weight_decay": 0.0} | options)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # closures are not supported
        for group in self.param_groups:
            names = group.get("param_names") or [""] * len(group["params"])
            for name, parameter in zip(names, group["params"], strict=True):
                if parameter.grad is not None:
                    self.update(name, parameter, self.state[parameter], group)

    def update(self, name: str, parameter: torch.Tensor, state: State, group: Options) -> None:
        """Update one parameter of any shape, which has a gradient.

        `name` is empty unless the optimizer requests names (OptimizerSpec).
        """
        raise NotImplementedError


class ByMoments(ByParameter):
    """An optimizer that applies weight decay and adds an update computed from moments."""

    moments: Moments

    def update(self, name: str, parameter: torch.Tensor, state: State, group: Options) -> None:
        change = plain_change(self.moments, parameter, state, group)
        self.add(name, parameter, state, change, 1 - group["lr"] * group["weight_decay"])

    def add(self, name: str, parameter: torch.Tensor, state: State, change: torch.Tensor, decay: float) -> None:
        """Add `change`, of the shape of this rank's shard; `decay`: the factor of weight decay."""
        add(parameter, change, decay)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of the gradient, in its shape and the parameter's dtype, but at least float32."""
    assert parameter.grad is not None
    return local(parameter.grad).to(torch.promote_types(parameter.dtype, torch.float32))


def plain_change(moments: Moments, parameter: torch.Tensor, state: State, group: Options) -> torch.Tensor:
    """Return the update of this rank's shard, of its shape, from moments of the unprojected parameter."""
    layout = Layout.of(parameter)
    if "step" not in state:
        moments.begin(state, layout, group, parameter.dtype, parameter.device)
    return moments.change(gradient_of(parameter), layout, state, group, group["lr"])


def add(parameter: torch.Tensor, change: torch.Tensor, decay: float, times: float = 1.0) -> None:
    """Set this rank's shard to parameter * decay + times * change (of its shape), rounded once if dtypes differ."""
    weight = local(parameter)
    if weight.dtype == change.dtype:
        weight.mul_(decay).add_(change, alpha=times)
    else:
        weight.copy_(weight.to(change.dtype).mul_(decay).add_(change, alpha=times))


class Adafactor(ByMoments):
    """Adafactor (arXiv:1804.04235): the second moment of a matrix [m, n] in m + n numbers.

    The learning rate comes from the schedule, as for every optimizer here. torch.optim.Adafactor instead derives a rate
    from the step and the size of the weights.
    """

    moments = moments.Adafactor()

    def __init__(self, groups: list[dict[str, Any]], lr: float, **options: float) -> None:
        super().__init__(groups, lr=lr, **options)


class AdamW8bit(ByMoments):
    """AdamW with moments in 8 bits (arXiv:2110.02861), for tensors with 4096 elements or more."""

    moments = moments.Adam(packed=True)

    def __init__(self, groups: list[dict[str, Any]], lr: float, **options: float) -> None:
        super().__init__(groups, lr=lr, **options)
