"""The load of experts over all ranks, for the bias update of each step (arXiv:2408.15664) and for metrics.

The model counts tokens and moves the biases (models/moe/balance.py). This module sums its counts and extra losses over
the ranks with other tokens of the same layers, and combines its metrics over pipeline stages.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from torchtitan.parallelisms.parallel_dims import ParallelDims
from torchtitan.process import distributed
from torchtitan.torch_internals.meshes import flattened


class LoadBalancing(Protocol):
    """The load balancing of a model family with experts. Each function takes a model or a pipeline part of it."""

    def set_sequence_sum(self, model: nn.Module, sum_over_sequence: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Set the function that sums counts [B, E] over ranks with parts of the same sequences. Called once."""

    def set_aux_loss_scale(self, model: nn.Module, scale: float) -> None:
        """Set the factor of the sum of the tokens' losses, before a step's first forward."""

    def take_load(self, model: nn.Module) -> tuple[list[str], torch.Tensor]:
        """Return the layers' names, and the tokens of each expert since the last call, [layers, E] int64."""

    def take_aux_loss(self, model: nn.Module) -> torch.Tensor | None:
        """Return the sum of the auxiliary losses since the last call, a scalar, or None without them."""

    def update_biases(self, model: nn.Module, load: torch.Tensor) -> None:
        """Move the biases by the load of all ranks, [layers, E]."""

    def metrics(self, model: nn.Module, load: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return scalars: load_max, load_max_mean, entropy and, with biases, bias_range."""

    def not_finite(self, model: nn.Module) -> list[str]:
        """Return the layers with scores that were not finite since the last call."""


class ExpertBalance:
    """The step hook that sums the load of experts and moves their biases.

    `copies`: the number of ranks with the same tokens (tp without sequence parallel, otherwise 1).
    """

    name = "expert_balance"

    def __init__(
        self, parts: Sequence[nn.Module], rules: LoadBalancing, mesh: DeviceMesh, dims: ParallelDims, copies: int = 1
    ):
        self.copies = copies
        self.parts, self.rules, self.dims = parts, rules, dims
        self.stage_groups = dims.stage_groups(mesh)
        self.pp_group = mesh["pp"].get_group() if dims.pp > 1 else None
        self.loads: list[torch.Tensor] = []  # tokens by expert in the last step, for each part
        self.aux_loss: torch.Tensor | None = None  # mean over tokens, in the last step, of this rank's parts
        self.extra_losses: dict[str, torch.Tensor] = {}  # sums / valid tokens, in the last step
        self.valid_tokens = 1
        self.moves_biases = True  # False for a step with a skipped update
        axes = tuple(axis for axis in ("cp", "tp") if dims.degrees[axis] > 1)
        if axes:
            shared = flattened(mesh[axes], "sequence") if len(axes) > 1 else mesh[axes[0]]
            for part in parts:
                rules.set_sequence_sum(part, _Sum(shared.get_group()))

    def before_backward(self, valid_tokens: int) -> None:
        self.valid_tokens = valid_tokens
        for part in self.parts:
            self.rules.set_aux_loss_scale(part, 1 / valid_tokens)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: the biases belong to the model."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    @torch.no_grad()
    def after_step(self, step: int, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Count the tokens of all ranks and move the biases, once per optimizer step."""
        self.loads, self.aux_loss, self.extra_losses = [], None, {}
        for part in self.parts:
            layers, load = self.rules.take_load(part)
            if layers:
                self._sum(load)
                if self.moves_biases:
                    self.rules.update_biases(part, load)
            self.loads.append(load)
            aux_loss = self.rules.take_aux_loss(part)
            if aux_loss is not None:
                self._sum(aux_loss)
                aux_loss /= self.copies * self.valid_tokens
                self.aux_loss = aux_loss if self.aux_loss is None else self.aux_loss + aux_loss
            for name, total in part.take_extra_losses().items():  # not supported in a pipeline, so there is one part
                self._sum(total)
                self.extra_losses[name] = total / self.valid_tokens

    def _sum(self, local_counts: torch.Tensor) -> None:
        """All-reduce a tensor of any shape in place, over the ranks with other tokens of the same layers."""
        for group in self.stage_groups:
            dist.all_reduce(local_counts, group=group)

    @torch.no_grad()
    def metrics(self, device: torch.device) -> dict[str, float]:
        """Return metrics over all layers, the same on all ranks. All ranks call it; it synchronizes with the device."""
        most, sums, layers = torch.zeros(2), torch.zeros(2), 0
        for part, load in zip(self.parts, self.loads, strict=True):
            values = {name: value.item() for name, value in self.rules.metrics(part, load).items()} if len(load) else {}
            if values:
                layers += len(load)
                most = torch.maximum(most, torch.tensor([values["load_max"], values.get("bias_range", 0.0)]))
                sums += torch.tensor([values["load_max_mean"], values["entropy"]]) * len(load)
        aux_loss = 0.0 if self.aux_loss is None else self.aux_loss.item()
        both = torch.cat((sums, torch.tensor([float(layers), aux_loss, float(self.aux_loss is not None)]))).to(device)
        most = most.to(device)
        if self.pp_group is not None:
            dist.all_reduce(both, group=self.pp_group)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.pp_group)
        load_sum, entropy_sum, count, aux_loss, has_aux_loss = both.tolist()
        load_max, bias_range = most.tolist()
        if not count:  # all layers are dense
            return {}
        metrics_by_name = {"load_max": load_max, "load_max_mean": load_sum / count, "entropy": entropy_sum / count}
        metrics_by_name |= {"bias_range": bias_range} | ({"aux_loss": aux_loss} if has_aux_loss else {})
        extra_losses = {name: loss.item() for name, loss in self.extra_losses.items()}
        return {f"expert_{name}": value for name, value in metrics_by_name.items()} | extra_losses

    def not_finite(self) -> list[str]:
        """Return the layers with router scores that were not finite on any rank. All ranks call it."""
        local_layers = [layer for part in self.parts for layer in self.rules.not_finite(part)]
        return sorted({layer for layers in distributed.all_gather_json(local_layers) for layer in layers}, key=_number)


class _Sum:
    """A function that sums counts over the ranks with tokens of the same sequences."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def __call__(self, counts: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(counts, group=self.group)
        return counts


def _number(layer: str) -> tuple[int, str]:
    digits = layer.rpartition(".")[2]
    return (int(digits) if digits.isdecimal() else 0, layer)
