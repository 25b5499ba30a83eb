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

from torchtitan.core.keyed_rng import key_of
from torchtitan.optimizers.adam_step import Addition, step_by_adam
from torchtitan.optimizers.by_parameter import ByParameter, begin_moments, decay_of
from torchtitan.optimizers.layout import Layout, local
from torchtitan.optimizers.moments import Adam, Options, State


class AdamWBF16(ByParameter):
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
