"""Lion (arXiv:2302.06675): every weight moves by the rate, along the sign of a running mean of gradients.

It has one state value per parameter, half of Adam's. Rates are about a tenth of AdamW's, decays ten times as large.
"""

from typing import Any

import torch

from torchtitan.optimizers.by_parameter import ByParameter
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
        mean = state["mean"]
        update = mean.lerp(parameter.grad, 1 - group["beta1"]).sign_()
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
        mean.lerp_(parameter.grad, 1 - group["beta2"])
