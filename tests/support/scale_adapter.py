"""A minimal adapter: one trained scale per block, applied to the output of its second norm."""

import torch
from torch import nn

from torchtitan.adapters import AdapterSpec
from torchtitan.adapters.interface import Adapter
from torchtitan.core.random_draws import Constant, Init
from torchtitan.models.layers import RMSNorm
from torchtitan.parallelisms.plan import ParallelPlan, match_blocks

INITIAL = 1.25
SCALE = AdapterSpec(make="tests.support.scale_adapter:ScaleAdapter")


class ScaledNorm(RMSNorm):
    """An RMSNorm with a trained scale, which can be merged into its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RMSNorm.forward(self, x) * self.scale.to(x.dtype)

    def parameter_init(self, name: str) -> Init | None:
        return Constant(INITIAL) if name == "scale" else None

    mergeable = ("weight",)

    def merged_weight(self, name: str, value: torch.Tensor) -> torch.Tensor:
        scale = self.scale.full_tensor() if hasattr(self.scale, "full_tensor") else self.scale
        return value * scale.item()


class ScaleAdapter(Adapter):
    steps = 0

    def convert(self, model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        for _, norm in match_blocks(model, plan, "ffn_norm"):
            norm.__class__ = ScaledNorm
            norm.scale = nn.Parameter(norm.weight.detach().new_empty(1))
        return plan

    def after_step(self, step, parts, optimizers):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state.get("steps", 0)
