"""Expert parallel (GShard, arXiv:2006.16668): each rank of the ep axis holds some of every layer's experts, and tokens
travel to them and back by all-to-all.

The axis consists of ranks with different tokens: dp_shard, cp and, under sequence parallel, tp. FSDP shards the experts
over the remaining degree, efsdp = dp_shard * cp * tp / ep. No tokens are dropped: ranks first exchange the numbers of
tokens, which the host needs as split sizes, so it waits once per layer. A recomputed layer reuses these sizes and the
router's choice (steps.same_notes).

`ExpertBalance` has the load of experts over all ranks, for the bias update of each step (arXiv:2408.15664) and metrics.
The model counts tokens and moves the biases (models/moe/router.py). This module sums its counts and extra losses over
the ranks with other tokens of the same layers, and combines its metrics over pipeline stages.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import Optimizer

from torchtitan.parallelisms.degrees import ParallelDims, check_num_experts
from torchtitan.parallelisms.pipeline.overlap.exchange import SplitSizes
from torchtitan.parallelisms.plan import ParallelPlan, match_blocks
from torchtitan.parallelisms.steps import running_notes
from torchtitan.parallelisms.tensor_parallel import LocalWeights
from torchtitan.process import distributed
from torchtitan.torch_internals import collectives
from torchtitan.torch_internals.meshes import flattened


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
    """Shard the experts of `model`, full or a pipeline part, in place over `mesh`, the axis ep.

    Raises JobError if their number is not divisible by ep.
    """
    for _, module in match_blocks(model, plan, plan.experts):
        for parameter_name, parameter in module.named_parameters():
            check_num_experts(mesh.size(), parameter.shape[0])
            # without a broadcast: values are the same on all ranks, or not yet initialized
            part = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(parameter_name, nn.Parameter(part, parameter.requires_grad))
        module.forward = partial(run_experts, mesh.size(), mesh.get_group().group_name, module)


def run_experts(ep: int, group: str, module: nn.Module, xs: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Run this rank's tokens xs [R, D], sorted by expert, through the experts of all ranks -> [R, D].

    sizes [E]: the number of rows for each of all E experts.
    """
    exchange_sizes, notes = partial(_exchange_counts, ep, group, sizes), running_notes()
    counts, send, receive = exchange_sizes() if notes is None else notes.once("sizes", exchange_sizes)
    ys = run_local_experts(module, _AllToAll.apply(xs, send, receive, group), counts)
    return _AllToAll.apply(ys, receive, send, group)


def _exchange_counts(ep: int, group: str, sizes: torch.Tensor) -> SplitSizes:
    """Exchange the numbers of rows. sizes [E]: rows that this rank sends to each of all E experts."""
    splits = [sizes.numel() // ep] * ep
    counts = _all_to_all(sizes, splits, splits, group).view(ep, -1)  # [ep, local experts], tokens from each rank
    return SplitSizes(counts, *torch.stack((sizes.view(ep, -1).sum(1), counts.sum(1))).tolist())  # the host waits here


def run_local_experts(module: nn.Module, received: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Run the local experts on received rows [R, D] -> [R, D] in the same order.

    The rows are sorted by source rank, then by expert; counts [ep, local experts] has the number of each.
    """
    rows = expert_order(counts, len(received))
    is_split = any(hasattr(parameter, "to_local") for parameter in module.parameters())
    local = LocalWeights(module) if is_split else module
    return permute(type(module).forward(local, permute(received, rows), counts.sum(0)), inverse_permutation(rows))


def expert_order(counts: torch.Tensor, total: int) -> torch.Tensor:
    """Return the permutation, int64 [total], that sorts received rows by expert.

    The rows are sorted by source rank, then by expert; counts [ep, local experts] has the number of each, `total` rows
    in all.
    """
    experts = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    return experts.repeat_interleave(counts.flatten(), output_size=total).argsort(stable=True)


def inverse_permutation(rows: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a permutation, int64 [R]."""
    return torch.empty_like(rows).scatter_(0, rows, torch.arange(rows.numel(), device=rows.device))


def permute(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return x[rows] for a permutation `rows` of the rows of x [R, D]."""
    return _Permute.apply(x, rows)


def _all_to_all(rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: str) -> torch.Tensor:
    """All-to-all of rows [sum(send), ...] -> [sum(receive), ...].

    It is a functional collective, so that selective recompute can save its result.
    """
    received = collectives.all_to_all_single(rows.contiguous(), receive, send, group)
    return collectives.wait_tensor(received)


class _Permute(torch.autograd.Function):
    """x[rows] for a permutation. Its backward indexes too, which is faster than the accumulating backward of torch's
    indexing.
    """

    @staticmethod
    def forward(ctx, x, rows):
        ctx.save_for_backward(rows)
        return x[rows]

    @staticmethod
    def backward(ctx, grad):
        (rows,) = ctx.saved_tensors
        return grad[inverse_permutation(rows)], None


class _AllToAll(torch.autograd.Function):
    """All-to-all of rows. Backward sends the gradients in the reverse direction."""

    @staticmethod
    def forward(ctx, rows, send, receive, group):
        ctx.way_back = receive, send, group
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_to_all(grad, *ctx.way_back), None, None, None


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
