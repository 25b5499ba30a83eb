"""Three minimal optimizers of kinds that the project lacks: without Adam's betas, with two parameter groups by name,
and with a state computed from full matrices. They are not good optimizers.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from torchtitan.config.options import Option
from torchtitan.optimizers import OPTIMIZERS, Decay
from torchtitan.optimizers.spec import OptimizerSpec


class Sign(Optimizer):
    """A step of the sign of a running mean."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, memory: float):
        super().__init__(groups, dict(lr=lr, memory=memory, weight_decay=0.0))

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 1 - group["memory"])
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(mean.sign(), alpha=group["lr"])


class ByName(Sign):
    """Matrices in layers step along their gradient, of length 1 as a whole; everything else as Sign does."""

    @torch.no_grad()
    def step(self) -> None:
        matrices = [group for group in self.param_groups if group["whole"]]
        for group in matrices:
            assert all(".weight" in name for name in group["param_names"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / gather(parameter.grad).norm().clamp_min(1e-9), alpha=group["lr"])
        every, self.param_groups = self.param_groups, [g for g in self.param_groups if not g["whole"]]
        super().step()
        self.param_groups = every


def whole_matrices(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    """The entries of a parameter's group."""
    return {"whole": True, "lr": 0.05} if parameter.dim() == 2 and "0." in name else {"whole": False}


class LowRank(Sign):
    """Keeps its mean of a matrix [m, n] as [rank, n], in directions found every other step in the whole gradient."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, memory: float, rank: int):
        super().__init__(groups, lr, memory)
        self.rank = rank

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        gradient, state = gather(parameter.grad), self.state[parameter]
        gradient = gradient.view(len(gradient), -1)
        assert gradient.numel() == parameter.shape.numel()  # of the whole tensor, also where it is sharded
        step = state.get("step", 0)
        if step % 2 == 0:
            state["directions"] = torch.linalg.svd(gradient, full_matrices=False)[0][:, : self.rank].contiguous()
        low = state["directions"].T @ gradient
        mean = state.setdefault("mean", torch.zeros_like(low))
        mean.lerp_(low, 1 - group["memory"])
        state["step"] = step + 1
        update = (state["directions"] @ mean).view(parameter.shape)
        if isinstance(parameter, DTensor):
            update = distribute_tensor(update, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.sub_(update, alpha=group["lr"])


def gather(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


MEMORY = Option(Decay, 0.9, "Decay of the mean.")
HERE = "tests.support.toy_optimizers:"
TOYS = {
    "Sign": OptimizerSpec(make=HERE + "Sign", options={"memory": MEMORY}, state=lambda options: 1),
    "ByName": OptimizerSpec(
        make=HERE + "ByName",
        options={"memory": MEMORY},
        state=lambda options: None,
        needs_names=True,
        group_of=HERE + "whole_matrices",
    ),
    "LowRank": OptimizerSpec(
        make=HERE + "LowRank",
        options={"memory": MEMORY, "rank": Option(int, 2, "Directions that are kept.")},
        state=lambda options: None,
    ),
}


def add_toys() -> None:
    """Register the optimizers in this process. In the test session's process the fixture `toys` unregisters them."""
    OPTIMIZERS.update(TOYS)


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, spec in TOYS.items():
        monkeypatch.setitem(OPTIMIZERS, name, spec)
