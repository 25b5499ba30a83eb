"""Gradient clipping by the global 2-norm over all mesh axes, without synchronizing with the device."""

from collections import defaultdict
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan.torch_internals import dispatch

ROW = 4096
Ranks = tuple[tuple[int, ...], ...]
"""The ranks of each of several process groups."""


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    pp_group: dist.ProcessGroup | None = None,
    copies: Collection[nn.Parameter] = (),
) -> torch.Tensor:
    """Scale gradients in place so that their joint 2-norm is at most `max_norm` (0: only measure).

    Returns the norm before clipping, a scalar in float32 or wider, the same on all ranks. `pp_group`: the ranks with
    other parameters of the same model. `copies`: tied weights that a pipeline holds twice; they are scaled but do not
    count in the norm.

    torch.nn.utils.clip_grad_norm_ stacks per-parameter norms, which fails for parameters on different meshes. This
    function sums squares over the axes that a gradient is sharded on, with one reduction for all gradients on these.
    """
    parameters = list(parameters)
    sum_partial_gradients(parameters)
    grads = [(p.grad, p in copies) for p in parameters if p.grad is not None]
    sharing: dict[Ranks, list[torch.Tensor]] = defaultdict(list)
    groups = _GroupRegistry()
    for grad, is_copy in grads:
        if not is_copy:
            sharing[groups.ranks(_groups_sharing(grad))].append(_local(grad))
    squares = []
    for ranks, locals_ in sharing.items():
        norms = [norm.to(torch.promote_types(norm.dtype, torch.float32)) for norm in _norms(locals_)]
        square = torch.linalg.vector_norm(torch.stack(norms)) ** 2
        for group in groups.groups(ranks):
            dist.all_reduce(square, group=group)
        squares.append(square)
    if squares:
        total = torch.stack(squares).sum()
    else:  # no gradients here, but the sum with other pipeline ranks needs the same device type and dtype
        like = parameters[0] if parameters else torch.zeros(())
        total = torch.zeros((), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    if pp_group is not None:
        dist.all_reduce(total, group=pp_group)
    total = total.sqrt()
    if max_norm > 0:
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # the constant of torch's clip_grad_norm_
        local = [_local(grad) for grad, _ in grads]
        if local:
            dispatch.foreach_mul_(local, factor.to(local[0].device))
    return total


def _norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the 2-norm of each tensor, on a CPU by rows of ROW elements.

    torch's CPU norm accumulates in the tensor's dtype: in float32 the error is 4e-6 for 5 million elements, and
    clipping applies it to every weight. By rows it is 1e-9.
    """
    if tensors[0].device.type != "cpu":
        return dispatch.foreach_norm(tensors)
    return [_norm_by_rows(tensor.flatten()) for tensor in tensors]


def _norm_by_rows(flat: torch.Tensor) -> torch.Tensor:
    rows = flat.numel() // ROW
    parts = [torch.linalg.vector_norm(flat[: rows * ROW].view(rows, ROW), dim=1)] if rows else []
    parts.append(torch.linalg.vector_norm(flat[rows * ROW :], keepdim=True))
    return torch.linalg.vector_norm(torch.cat(parts), dtype=torch.float64).to(flat.dtype)


def sum_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """All-reduce gradients with a Partial placement, all of the same ranks and dtype in one reduction.

    These are the gradients of norms under sequence parallel, to which each tensor-parallel rank contributes its tokens.
    With FSDP they have been summed already.
    """
    waiting: dict[tuple[Ranks, torch.dtype], list[nn.Parameter]] = defaultdict(list)
    groups = _GroupRegistry()
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor):
            for axis, placement in enumerate(grad.placements):
                if placement.is_partial():
                    assert placement.reduce_op == "sum" and parameter.placements[axis].is_replicate()
                    waiting[groups.ranks((grad.device_mesh.get_group(axis),)), grad.dtype].append(parameter)
    for (ranks, _), owners in waiting.items():
        flat = torch.cat([owner.grad.to_local().flatten() for owner in owners])
        for group in groups.groups(ranks):
            dist.all_reduce(flat, group=group)
        for owner, summed in zip(owners, flat.split([owner.grad.to_local().numel() for owner in owners]), strict=True):
            local = summed.view_as(owner.grad.to_local())
            owner.grad = DTensor.from_local(local, owner.device_mesh, owner.placements, run_check=False)


class _GroupRegistry:
    """Process groups identified by their ranks.

    Two equal meshes have different groups, and DTensor's caches may assign either mesh to a tensor, differently on each
    rank. Merging groups of equal ranks ensures that all ranks run the same reductions.
    """

    def __init__(self) -> None:
        self._ranks: dict[tuple[dist.ProcessGroup, ...], Ranks] = {}
        self._first: dict[Ranks, tuple[dist.ProcessGroup, ...]] = {}

    def ranks(self, groups: tuple[dist.ProcessGroup, ...]) -> Ranks:
        if groups not in self._ranks:
            ranks = tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)
            self._ranks[groups] = ranks
            self._first.setdefault(ranks, groups)
        return self._ranks[groups]

    def groups(self, ranks: Ranks) -> tuple[dist.ProcessGroup, ...]:
        """Return the first groups registered with these ranks."""
        return self._first[ranks]


def _groups_sharing(grad: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of the mesh axes over which this gradient is sharded."""
    if not isinstance(grad, DTensor):
        return ()
    mesh = grad.device_mesh
    sharded = [axis for axis, placement in enumerate(grad.placements) if not placement.is_replicate()]
    return tuple(mesh.get_group(axis) for axis in sharded if mesh.size(axis) > 1)


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad
