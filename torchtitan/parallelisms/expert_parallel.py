"""Expert parallel (GShard, arXiv:2006.16668): each rank of the ep axis holds some of every layer's experts, and tokens
travel to them and back by all-to-all.

The axis consists of ranks with different tokens: dp_shard, cp and, under sequence parallel, tp. FSDP shards the experts
over the remaining degree, efsdp = dp_shard * cp * tp / ep. No tokens are dropped: ranks first exchange the numbers of
tokens, which the host needs as split sizes, so it waits once per layer. A recomputed layer reuses these sizes and the
router's choice (steps.same_notes).
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchtitan.parallelisms.degrees import check_num_experts
from torchtitan.parallelisms.pipeline.overlap.exchange import SplitSizes
from torchtitan.parallelisms.plan import ParallelPlan, match_blocks
from torchtitan.parallelisms.steps import running_notes
from torchtitan.parallelisms.tensor_parallel import LocalWeights
from torchtitan.torch_internals import collectives


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
