"""Lion (arXiv:2302.06675): every weight moves by the rate, along the sign of a running mean of gradients.

It has one state value per parameter, half of Adam's. Rates are about a tenth of AdamW's, decays ten times as large.
"""

from typing import Any

import torch

from torchtitan.core.fused import NEVER, Fused
from torchtitan.optimizers.by_parameter import ByParameter, decay_of
from torchtitan.optimizers.layout import local, pieces_of
from torchtitan.optimizers.moments import Options, State


class Lion(ByParameter):
    """The Lion optimizer, algorithm 2 of the paper.

    The update is the sign of beta1 * mean + (1 - beta1) * gradient; the next mean uses `beta2` in the same way.
    `weight_decay` of a group is decoupled, as in AdamW.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, beta1: float, beta2: float) -> None:
        super().__init__(groups, lr=lr, beta1=beta1, beta2=beta2)

    def update(self, name: str, parameter: torch.Tensor, state: State, group: Options) -> None:
        if not state:  # setdefault would allocate zeros in every step
            state["mean"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        weight, gradient, mean = local(parameter.detach()), local(parameter.grad), local(state["mean"])
        _fused_step(weight, gradient, mean, group["lr"], decay_of(group), group["beta1"], group["beta2"])


def _step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    rate: float,
    decay: float,
    beta1: float,
    beta2: float,
) -> None:
    """Step a piece of a shard; all tensors have one shape and dtype."""
    update = mean.lerp(gradient, 1 - beta1).sign_().mul_(rate)  # `alpha` of sub_ would be compiled for each rate
    weight.mul_(decay).sub_(update)
    mean.lerp_(gradient, 1 - beta2)


def _step_in_pieces(weight: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor, *numbers: float) -> None:
    """Do as `_step`, a piece after the other."""
    for index in pieces_of(weight):
        _step(weight[index], gradient[index], mean[index], *numbers)


_fused_step = Fused(_step, _step_in_pieces, dynamic=True, after=NEVER)
