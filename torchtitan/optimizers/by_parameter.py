"""Optimizers that step one parameter after the other, on this rank's shard: the base classes, Adafactor and AdamW."""

from typing import Any

import torch
from torch.optim import Optimizer

from torchtitan.core.random_draws import key_of
from torchtitan.optimizers import adam_step, moments
from torchtitan.optimizers.adam_step import Addition, step_by_adam
from torchtitan.optimizers.layout import Layout, local
from torchtitan.optimizers.moments import Adam, Moments, Options, State


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
    """An optimizer that applies weight decay to every parameter and adds an update computed from its `moments`."""

    moments: Moments

    def update(self, name: str, parameter: torch.Tensor, state: State, group: Options) -> None:
        plain_step(self.moments, parameter, state, group)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of the gradient, in its shape and the parameter's dtype, but at least float32."""
    assert parameter.grad is not None
    return local(parameter.grad).to(torch.promote_types(parameter.dtype, torch.float32))


def decay_of(group: Options) -> float:
    """Return the factor that weight decay multiplies a weight with."""
    return 1 - group["lr"] * group["weight_decay"]


def begin_moments(moments: Moments, parameter: torch.Tensor, state: State, group: Options) -> None:
    """Initialize the moments of a parameter of any shape, which is not projected, unless there are some."""
    if "step" not in state:
        moments.begin(state, Layout.of(parameter), group, parameter.dtype, parameter.device)


def plain_step(moments: Moments, parameter: torch.Tensor, state: State, group: Options, times: float = 1.0) -> None:
    """Step a parameter of any shape by its own moments, not projected. `times`: a factor of the change."""
    begin_moments(moments, parameter, state, group)
    if isinstance(moments, Adam):
        step_by_adam(moments, parameter, state, group, decay_of(group), Addition(times))
    else:
        change = moments.change(gradient_of(parameter), Layout.of(parameter), state, group, group["lr"])
        add(parameter, change, decay_of(group), times)


def add(parameter: torch.Tensor, change: torch.Tensor, decay: float, times: float = 1.0) -> None:
    """Set this rank's shard to parameter * decay + times * change (of its shape), rounded once if dtypes differ."""
    adam_step.add(local(parameter.detach()), change, decay, times)


class Adafactor(ByMoments):
    """Adafactor (arXiv:1804.04235): the second moment of a matrix [m, n] in m + n numbers.

    The learning rate comes from the schedule, as for every optimizer here. torch.optim.Adafactor instead derives a rate
    from the step and the size of the weights.
    """

    moments = moments.AdafactorMoments()

    def __init__(self, groups: list[dict[str, Any]], lr: float, **options: float) -> None:
        super().__init__(groups, lr=lr, **options)


class AdamW8bit(ByMoments):
    """AdamW with moments in 8 bits (arXiv:2110.02861), for tensors with 4096 elements or more."""

    moments = moments.Adam(packed=True)

    def __init__(self, groups: list[dict[str, Any]], lr: float, **options: float) -> None:
        super().__init__(groups, lr=lr, **options)


class AdamWBF16(ByParameter):
    """AdamW for weights in bfloat16, which rounds at random or keeps what rounding loses (Kahan)."""

    adam = Adam()

    def __init__(self, groups: list[dict[str, Any]], lr: float, rounding: str, **options: float) -> None:
        super().__init__(groups, lr=lr, **options)
        self.rounding = rounding

    def update(self, name: str, parameter: torch.Tensor, state: State, group: Options) -> None:
        begin_moments(self.adam, parameter, state, group)
        if self.rounding == "stochastic":
            addition = Addition(key=key_of(f"{name}/{state['step'] + 1}"))
        else:
            if "lost" not in state:
                state["lost"] = Layout.of(parameter).zeros(parameter.dtype, parameter.device)
            addition = Addition(lost=local(state["lost"]))
        step_by_adam(self.adam, parameter, state, group, decay_of(group), addition)
