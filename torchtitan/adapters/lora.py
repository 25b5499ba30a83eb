"""LoRA (arXiv:2106.09685), rsLoRA by its scale (arXiv:2312.03732), and with restarts ReLoRA (relora.py)."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torchtitan.adapters.low_rank import LowRank, LowRankExperts, LowRankLinear
from torchtitan.adapters.relora import Restarts
from torchtitan.config.sections.adapter import Adapter as Options


class LoRA(LowRank):
    linear, experts = LowRankLinear, LowRankExperts

    def __init__(self, options: Options, seed: int = 0):
        super().__init__(options, seed)
        self.restarts = None if options.relora.every is None else Restarts(options.relora, seed)

    def after_step(self, step: int, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        if self.restarts is not None:
            self.restarts.after_step(step, parts, optimizers)

    def metrics(self, parts: Sequence[nn.Module]) -> dict[str, float]:
        return super().metrics(parts) | {f"adapter_{name}": count for name, count in self.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        return {} if self.restarts is None else {"merges": self.restarts.merges, "resets": self.restarts.resets}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.restarts is not None:
            self.restarts.merges, self.restarts.resets = state.get("merges", 0), state.get("resets", 0)
