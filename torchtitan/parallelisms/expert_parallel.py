"""Expert parallel: each rank of the axis ep has some of the experts of every layer, and tokens travel to them and back.

The axis borrows ranks that have different tokens: those of dp_shard, cp and, under sequence parallel, tp. What is left
of them, efsdp = dp_shard * cp * tp / ep, shards the experts as FSDP does the rest. Nothing is dropped: ranks tell each
other how many tokens come, which the host has to know, so it waits once per layer. A layer that is computed again keeps
to what was told the first time, as to what its router chose (steps.same_notes).
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchtitan.parallelisms.degrees import check_experts
from torchtitan.parallelisms.pipeline.overlap.exchange import Sizes
from torchtitan.parallelisms.plan import ParallelPlan, match_blocks
from torchtitan.parallelisms.steps import running_notes
from torchtitan.parallelisms.tensor_parallel import LocalWeights


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
    """Split the experts of `model`, whole or a pipeline part, in place over `mesh`, the axis ep. JobError where their
    number does not divide.
    """
    for _, module in match_blocks(model, plan, plan.experts):
        for parameter_name, parameter in module.named_parameters():
            check_experts(mesh.size(), parameter.shape[0])
            # every rank takes its part of its own values: they are the same everywhere, or have yet to come
            part = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(parameter_name, nn.Parameter(part, parameter.requires_grad))
        module.forward = partial(run_experts, mesh.size(), mesh.get_group().group_name, module)


def run_experts(ep: int, group: str, module: nn.Module, xs: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """xs [R, D], this rank's tokens sorted by expert, sizes [E], how many each of all experts gets -> [R, D]."""
    exchange_sizes, notes = partial(_tell, ep, group, sizes), running_notes()
    counts, send, receive = exchange_sizes() if notes is None else notes.once("sizes", exchange_sizes)
    ys = run_received(module, _Exchange.apply(xs, send, receive, group), counts)
    return _Exchange.apply(ys, receive, send, group)


def _tell(ep: int, group: str, sizes: torch.Tensor) -> Sizes:
    """sizes [E], how many rows each of all experts gets from this rank."""
    splits = [sizes.numel() // ep] * ep
    counts = _all_to_all(sizes, splits, splits, group).view(ep, -1)  # [ep, experts here], tokens from each rank
    return Sizes(counts, *torch.stack((sizes.view(ep, -1).sum(1), counts.sum(1))).tolist())  # here the host waits


def run_received(module: nn.Module, received: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The experts of this rank on the rows that came, [R, D], of which `counts` [ep, experts here] tell from which rank
    for which expert they are, in that order -> [R, D] in the same order.
    """
    rows = by_expert(counts, len(received))
    is_split = any(hasattr(parameter, "to_local") for parameter in module.parameters())
    local = LocalWeights(module) if is_split else module
    return permute(type(module).forward(local, permute(received, rows), counts.sum(0)), inverse(rows))


def by_expert(counts: torch.Tensor, total: int) -> torch.Tensor:
    """counts [ep, experts here] of `total` rows that came in the order of ranks and experts -> which of them stands in
    each row when they are sorted by expert, int64 [total].
    """
    experts = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    return experts.repeat_interleave(counts.flatten(), output_size=total).argsort(stable=True)


def inverse(rows: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a permutation, int64 [R]."""
    return torch.empty_like(rows).scatter_(0, rows, torch.arange(rows.numel(), device=rows.device))


def permute(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x[rows], where `rows` names every row of x [R, D] once."""
    return _Permute.apply(x, rows)


def _all_to_all(rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: str) -> torch.Tensor:
    """[sum(send), ...] -> [sum(receive), ...]. A functional collective, whose result recompute by operator can keep."""
    received = torch.ops._c10d_functional.all_to_all_single(rows.contiguous(), receive, send, group)
    return torch.ops._c10d_functional.wait_tensor(received)


class _Permute(torch.autograd.Function):
    """torch's backward of an index would add rows one after the other; knowing that each comes once, it is an index."""

    @staticmethod
    def forward(ctx, x, rows):
        ctx.save_for_backward(rows)
        return x[rows]

    @staticmethod
    def backward(ctx, grad):
        (rows,) = ctx.saved_tensors
        return grad[inverse(rows)], None


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; backward sends gradients the way back."""

    @staticmethod
    def forward(ctx, rows, send, receive, group):
        ctx.way_back = receive, send, group
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_to_all(grad, *ctx.way_back), None, None, None
