"""AdamW for weights kept in bfloat16, which has 8 bits of precision: a change below 1/512 of a weight is lost when it
is added. Here it is not, in one of two ways.

kahan: what rounding took is kept beside the weight, in bfloat16 too, and added with the next change (W. Kahan,
"Further remarks on reducing truncation errors", 1965). 8 bytes a weight with both moments.
stochastic: rounded up or down by chance, so that the mean is right (arXiv:2010.06192). 6 bytes a weight. The chance is
a function of the parameter's name, the step and the place in the whole tensor, and so the same under every plan.
"""

from typing import Any

import torch

from torchtitan.core.keyed_rng import bits
from torchtitan.optimizers import moments
from torchtitan.optimizers.by_parameter import ByMoments
from torchtitan.optimizers.layout import Layout, local
from torchtitan.optimizers.moments import State

AT_ONCE = 2**20
"""Elements for which random numbers are made at once: they take 8 bytes each."""


class AdamWBF16(ByMoments):
    moments = moments.Adam()

    def __init__(self, groups: list[dict[str, Any]], lr: float, rounding: str, **options: float) -> None:
        super().__init__(groups, lr=lr, **options)
        self.rounding = rounding

    def add(self, name: str, parameter: torch.Tensor, state: State, change: torch.Tensor, kept: float) -> None:
        if self.rounding == "stochastic":
            weight, layout = local(parameter), Layout.of(parameter)
            total = weight.to(change.dtype).mul_(kept).add_(change)
            weight.copy_(stochastically_rounded(total, f"{name}/{state['step']}", layout.offset))
        else:
            if "lost" not in state:
                state["lost"] = Layout.of(parameter).zeros(parameter.dtype, parameter.device)
            add_with_lost(local(parameter), local(state["lost"]), change, kept)


def add_with_lost(weight: torch.Tensor, lost: torch.Tensor, change: torch.Tensor, kept: float) -> None:
    """Of tensors of one shape: weight * kept + lost + change, and in `lost` what did not fit. The sum is made in the
    type of `change`, so that weight decay, a small change too, loses nothing either.
    """
    wanted = change + lost.to(change.dtype) + weight.to(change.dtype) * (kept - 1)
    total = weight.to(change.dtype) + wanted
    weight.copy_(total)
    lost.copy_(total - weight.to(change.dtype))


def stochastically_rounded(values: torch.Tensor, key: str, offset: tuple[int, ...]) -> torch.Tensor:
    """float32 -> bfloat16, of any shape, up with the probability that the rest has of the gap. `offset`: where in the
    whole tensor the first element is.
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
