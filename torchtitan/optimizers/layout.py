"""Where this rank's part of a tensor lies in the whole, and sums over the ranks that have the other parts.

Optimizers compute with this rank's part, a plain tensor, and ask here for what they need of the others: sums over a
dimension that is cut, or the whole. So the same lines serve one device and every plan.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """Of a tensor of this `shape`. `mesh`: None where it is whole on this rank."""

    shape: tuple[int, ...]
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Layout":
        """Of a tensor of any shape, plain (whole on this rank) or a DTensor."""
        if not isinstance(tensor, DTensor):
            return cls(tuple(tensor.shape))
        return cls(tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements))

    @cached_property
    def _place(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if self.mesh is None:
            return self.shape, (0,) * len(self.shape)
        local, offset = compute_local_shape_and_global_offset(self.shape, self.mesh, self.placements)
        return tuple(local), tuple(offset)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self._place[0]

    @property
    def offset(self) -> tuple[int, ...]:
        """Where in the whole this rank's part begins."""
        return self._place[1]

    def span(self, dim: int) -> slice:
        """Of the whole's `dim`, what this rank has."""
        return slice(self.offset[dim], self.offset[dim] + self.local_shape[dim])

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def resized(self, dim: int, size: int) -> "Layout":
        """Of a tensor that differs in one dimension, which is whole on every rank."""
        dim %= len(self.shape)
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        return replace(self, shape=shape, placements=self._without([dim]))

    def _without(self, dims: Sequence[int]) -> tuple[Placement, ...]:
        cut = set(self._axes(dims))
        return tuple(Replicate() if axis in cut else placement for axis, placement in enumerate(self.placements))

    def _axes(self, dims: Sequence[int]) -> list[int]:
        """The mesh's axes along which one of these dimensions is cut."""
        dims = [dim % len(self.shape) for dim in dims]
        # a strided shard says no to is_shard()
        cut = [
            axis for axis, p in enumerate(self.placements) if not p.is_replicate() and getattr(p, "dim", None) in dims
        ]
        return [axis for axis in cut if self.mesh is not None and self.mesh.size(axis) > 1]

    def is_cut(self, dim: int) -> bool:
        return bool(self._axes([dim]))

    def summed(self, part: torch.Tensor, *dims: int, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """In place: of values that this rank has from its part of these dimensions, the sum over all parts, of
        the shape of `part`. By default of all dimensions.
        """
        for axis in self._axes(dims or range(len(self.shape))):
            assert self.mesh is not None
            dist.all_reduce(part, op=op, group=self.mesh.get_group(axis))
        return part

    def crossed(self, dim: int, size: int) -> "Layout":
        """Of a matrix of which `dim` is so short that it is whole on every rank: those that share it out share out the
        other dimension instead, of what each has of that.
        """
        other, placements = 1 - dim, list(self.resized(dim, size).placements)
        for axis in self._axes([dim]):
            assert self.mesh is not None
            within = [later for later in self._axes([other]) if later > axis]
            pieces = prod(self.mesh.size(each) for each in self._axes([dim, other]))
            if not within:
                placements[axis] = Shard(other)
            elif self.shape[other] % pieces == 0:  # else parts would not be where torch says that they are
                split = prod(self.mesh.size(each) for each in within)
                placements[axis] = _StridedShard(other, split_factor=split)
        return replace(self.resized(dim, size), placements=tuple(placements))

    def _shares(self, dim: int, crossed: "Layout") -> list[tuple[int, int, int, int]]:
        """For each of the mesh's axes that share out the other dimension in `crossed`: the axis, how long it was for
        this rank, how long the longest share of that is, and how long its own.
        """
        found, length = [], self.local_shape[1 - dim]
        for axis in self._axes([dim]):
            if not crossed.placements[axis].is_replicate():
                assert self.mesh is not None
                longest = -(-length // self.mesh.size(axis))
                own = max(0, min(longest, length - longest * self.mesh.get_local_rank(axis)))
                found.append((axis, length, longest, own))
                length = own
        return found

    def scattered(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Of values that this rank has from its part of `dim`, of which there are few, [size, n] or [m, size]: its part
        of the sum over all parts, as `crossed` has it.
        """
        crossed, other = self.crossed(dim, part.shape[dim]), 1 - dim
        shares = self._shares(dim, crossed)
        for axis in self._axes([dim]):
            assert self.mesh is not None
            if crossed.placements[axis].is_replicate():
                dist.all_reduce(part, group=self.mesh.get_group(axis))
        rows = part if other == 0 else part.T
        for axis, length, longest, own in shares:
            assert self.mesh is not None
            padded = F.pad(rows, (0, 0, 0, longest * self.mesh.size(axis) - length)).contiguous()
            summed = rows.new_empty(longest, rows.shape[1])
            dist.reduce_scatter_tensor(summed, padded, group=self.mesh.get_group(axis))
            rows = summed[:own]
        return (rows if other == 0 else rows.T).contiguous()

    def collected(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """The way back: from the shape that `scattered` gave, or one of as many rows or columns, to all of a rank's."""
        crossed, other = self.crossed(dim, part.shape[dim]), 1 - dim
        rows = part if other == 0 else part.T
        for axis, length, longest, own in reversed(self._shares(dim, crossed)):
            assert self.mesh is not None
            padded = F.pad(rows, (0, 0, 0, longest - own)).contiguous()
            whole = rows.new_empty(longest * self.mesh.size(axis), rows.shape[1])
            dist.all_gather_into_tensor(whole, padded, group=self.mesh.get_group(axis))
            rows = whole[:length]
        return rows if other == 0 else rows.T

    def placed(self, local: torch.Tensor) -> torch.Tensor:
        """This rank's part, of `local_shape`, as a part of the whole, of `shape`, as a checkpoint wants it."""
        assert tuple(local.shape) == self.local_shape, (tuple(local.shape), self.local_shape)
        if self.mesh is None:
            return local
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=stride
        )

    def gathered(self, local: torch.Tensor) -> torch.Tensor:
        """`local_shape` -> `shape`: the whole, on every rank; all of them call it."""
        placed = self.placed(local)
        return placed.full_tensor() if isinstance(placed, DTensor) else placed

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """`shape` -> `local_shape`: this rank's part of a whole tensor, a view."""
        return whole[tuple(self.span(dim) for dim in range(whole.dim()))]

    def zeros(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Of `shape`, of which this rank holds `local_shape`."""
        return self.placed(torch.zeros(self.local_shape, dtype=dtype, device=device))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, of any shape; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def by_owners(
    tasks: Sequence[T],
    layout_of: Callable[[T], Layout],
    gather: Callable[[T], torch.Tensor],
    work: Callable[[T, torch.Tensor], torch.Tensor],
    result: Callable[[T], torch.Tensor],
) -> Iterator[tuple[T, torch.Tensor]]:
    """Each task with work(task, gather(task)), a whole tensor, which one rank has computed and handed to those that
    share the task's tensor. They all gather it, but of as many tasks as they are each keeps and works on one, so that
    ranks work side by side and hold one whole tensor at a time. `result(task)`: an empty tensor of the shape
    of what `work` makes.
    """
    by_mesh: dict[DeviceMesh | None, list[T]] = {}
    for task in tasks:
        by_mesh.setdefault(layout_of(task).mesh, []).append(task)
    for mesh, sharing in by_mesh.items():
        size, here = (1, 0) if mesh is None else (mesh.size(), _number(mesh))
        for start in range(0, len(sharing), size):
            batch = sharing[start : start + size]
            mine = None
            for number, task in enumerate(batch):
                whole = gather(task)
                mine = whole if number == here else mine
                del whole
            done = work(batch[here], mine) if mine is not None else None
            for number, task in enumerate(batch):
                found = done if number == here and done is not None else result(task)
                if mesh is not None and size > 1:
                    found = found.contiguous()
                    _handed_out(found, mesh, number)
                yield task, found


def _number(mesh: DeviceMesh) -> int:
    """This rank's place in the mesh, counted along its axes."""
    number = 0
    for axis, coordinate in enumerate(mesh.get_coordinate() or ()):
        number = number * mesh.size(axis) + coordinate
    return number


def _handed_out(tensor: torch.Tensor, mesh: DeviceMesh, owner: int) -> None:
    """Along one axis after the other: what ranks off the owner's line send first is overwritten later."""
    for axis in reversed(range(mesh.ndim)):
        owner, coordinate = divmod(owner, mesh.size(axis))
        if mesh.size(axis) > 1:
            dist.broadcast(tensor, group=mesh.get_group(axis), group_src=coordinate)
