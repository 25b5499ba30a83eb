"""AdamW for weights in bfloat16, which has 8 bits of precision: plain addition loses changes below 1/512 of a weight.

There are two ways to preserve them (both: arXiv:2010.06192).

kahan: the rounding error is stored next to the weight, also in bfloat16, and added with the next change (W. Kahan,
"Further remarks on reducing truncation errors", 1965). 8 bytes per weight with both moments.
stochastic: weights are rounded up or down at random, so that the expected value is exact. 6 bytes per weight.
The random bits are a function of the parameter's name, the step and the index in the full tensor, so they are the same
under every plan.
"""

from typing import Any

import torch

from torchtitan.core.keyed_rng import bits
from torchtitan.optimizers import moments
from torchtitan.optimizers.by_parameter import ByMoments
from torchtitan.optimizers.layout import Layout, local
from torchtitan.optimizers.moments import State

AT_ONCE = 2**20
"""Number of elements per draw of random numbers, which take 8 bytes each."""


class AdamWBF16(ByMoments):
    moments = moments.Adam()

    def __init__(self, groups: list[dict[str, Any]], lr: float, rounding: str, **options: float) -> None:
        super().__init__(groups, lr=lr, **options)
        self.rounding = rounding

    def add(self, name: str, parameter: torch.Tensor, state: State, change: torch.Tensor, decay: float) -> None:
        if self.rounding == "stochastic":
            weight, layout = local(parameter), Layout.of(parameter)
            total = weight.to(change.dtype).mul_(decay).add_(change)
            weight.copy_(stochastically_rounded(total, f"{name}/{state['step']}", layout.offset))
        else:
            if "lost" not in state:
                state["lost"] = Layout.of(parameter).zeros(parameter.dtype, parameter.device)
            add_with_lost(local(parameter), local(state["lost"]), change, decay)


def add_with_lost(weight: torch.Tensor, lost: torch.Tensor, change: torch.Tensor, decay: float) -> None:
    """Set `weight` to weight * decay + lost + change, and `lost` to the rounding error. All tensors have one shape.

    The sum is computed in the dtype of `change`, so that weight decay, a small change too, loses nothing either.
    """
    exact_change = change + lost.to(change.dtype) + weight.to(change.dtype) * (decay - 1)
    total = weight.to(change.dtype) + exact_change
    weight.copy_(total)
    lost.copy_(total - weight.to(change.dtype))


def stochastically_rounded(values: torch.Tensor, key: str, offset: tuple[int, ...]) -> torch.Tensor:
    """Round float32 of any shape to bfloat16, up with a probability equal to the remainder's share of the gap.

    `offset`: index of the first element in the full tensor.
    """
    if not values.dim():
        return stochastically_rounded(values[None], key, (0,))[0]
    rounded = torch.empty_like(values, dtype=torch.bfloat16)
    rows = max(1, AT_ONCE // max(1, values[:1].numel()))
    for start in range(0, len(values), rows):
        part = values[start : start + rows].float()
        noise = bits(key, (offset[0] + start, *offset[1:]), part.shape, part.device) & 0xFFFF
        lifted = (part.view(torch.int32) + noise.int()) & -0x10000  # bfloat16 is the upper half of float32
        rounded[start : start + rows] = torch.where(part.isfinite(), lifted.view(torch.float32), part)
    return rounded
