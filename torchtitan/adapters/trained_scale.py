"""LoRA whose strength is learned: what A and B add is multiplied with tanh of a number of each linear, which begins at
1 (train_scaling of ReLoRA's scripts). A restart sets it to 1 again and not to 0, where tanh would stop all three.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from torchtitan.adapters.low_rank import LowRankLinear, Strength, dropped, plus_product
from torchtitan.initialization import Constant, Init


class ScaledLinear(LowRankLinear):
    """Beside what LowRankLinear has, `lora_scaling` [1]."""

    def add_parameters(self, strength: Strength) -> None:
        super().add_parameters(strength)
        self.lora_scaling = nn.Parameter(self.weight.detach().new_empty(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = x if self.dropout is None else dropped(self, x)
        inner = F.linear(read, self.lora_A) * self.lora_scaling.tanh()
        return F.linear(x, self.weight, self.bias) + F.linear(inner, self.lora_B)

    def own_init(self, name: str) -> Init | None:
        return Constant(1.0) if name == "lora_scaling" else super().own_init(name)

    def tensor_placements(self, role: str, whole: Placement) -> dict[str, tuple[Placement, Placement]]:
        told = super().tensor_placements(role, whole)
        # every rank sees its outputs, or its part of a sum
        return told | {"lora_scaling": (Replicate(), Partial())} if told else told

    def merged(self) -> dict[str, torch.Tensor]:
        scaling = self.lora_scaling.detach()
        scaling = scaling.full_tensor() if isinstance(scaling, DTensor) else scaling
        return {"weight": plus_product(self.weight, self.lora_B, self.lora_A, scaling.tanh().item())}
