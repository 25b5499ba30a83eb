"""The layout of a tensor over ranks, and collectives over the ranks that have its other shards.

Optimizers compute with this rank's shard, a plain tensor, and use these functions for sums over a sharded dimension and
for gathers. So the same code runs on one device and under every plan.
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
    """The layout of a tensor with this global `shape`. `mesh`: None if this rank has the full tensor."""

    shape: tuple[int, ...]
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Layout":
        """Return the layout of a tensor of any shape: a DTensor, or a plain tensor, which is not sharded."""
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
        """Return the offset of this rank's shard in the full tensor."""
        return self._place[1]

    def span(self, dim: int) -> slice:
        """Return the slice of the full tensor's `dim` that this rank has."""
        return slice(self.offset[dim], self.offset[dim] + self.local_shape[dim])

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def resized(self, dim: int, size: int) -> "Layout":
        """Return the layout with another size of `dim`, which is not sharded."""
        dim %= len(self.shape)
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        return replace(self, shape=shape, placements=self._without([dim]))

    def _without(self, dims: Sequence[int]) -> tuple[Placement, ...]:
        axes = set(self._axes(dims))
        return tuple(Replicate() if axis in axes else placement for axis, placement in enumerate(self.placements))

    def _axes(self, dims: Sequence[int]) -> list[int]:
        """Return the mesh axes along which one of these dimensions is sharded."""
        dims = [dim % len(self.shape) for dim in dims]
        # is_shard() is False for a strided shard
        axes = [
            axis for axis, p in enumerate(self.placements) if not p.is_replicate() and getattr(p, "dim", None) in dims
        ]
        return [axis for axis in axes if self.mesh is not None and self.mesh.size(axis) > 1]

    def is_cut(self, dim: int) -> bool:
        return bool(self._axes([dim]))

    def summed(self, part: torch.Tensor, *dims: int, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce `part` in place over the shards of these dimensions, by default of all dimensions.

        `part`: values of any shape that this rank computed from its shard.
        """
        for axis in self._axes(dims or range(len(self.shape))):
            assert self.mesh is not None
            dist.all_reduce(part, op=op, group=self.mesh.get_group(axis))
        return part

    def crossed(self, dim: int, size: int) -> "Layout":
        """Return the layout of a matrix with `dim` reduced to `size`, which is not sharded.

        Ranks that sharded `dim` instead shard the other dimension, within each rank's shard of that.
        """
        other, placements = 1 - dim, list(self.resized(dim, size).placements)
        for axis in self._axes([dim]):
            assert self.mesh is not None
            inner_axes = [inner for inner in self._axes([other]) if inner > axis]
            pieces = prod(self.mesh.size(mesh_axis) for mesh_axis in self._axes([dim, other]))
            if not inner_axes:
                placements[axis] = Shard(other)
            elif self.shape[other] % pieces == 0:  # torch places uneven strided shards differently
                split = prod(self.mesh.size(mesh_axis) for mesh_axis in inner_axes)
                placements[axis] = _StridedShard(other, split_factor=split)
        return replace(self.resized(dim, size), placements=tuple(placements))

    def _shares(self, dim: int, crossed: "Layout") -> list[tuple[int, int, int, int]]:
        """Return the splits of the other dimension in `crossed`, one for each mesh axis that shards it.

        Each is (axis, this rank's length before the split, length of the longest shard, length of this rank's shard).
        """
        splits, length = [], self.local_shape[1 - dim]
        for axis in self._axes([dim]):
            if not crossed.placements[axis].is_replicate():
                assert self.mesh is not None
                longest = -(-length // self.mesh.size(axis))
                local_length = max(0, min(longest, length - longest * self.mesh.get_local_rank(axis)))
                splits.append((axis, length, longest, local_length))
                length = local_length
        return splits

    def scattered(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Reduce-scatter values over the shards of `dim`: return this rank's part of the sum, laid out as `crossed`.

        `part` [size, n] or [m, size]: values that this rank computed from its shard of `dim`.
        """
        crossed, other = self.crossed(dim, part.shape[dim]), 1 - dim
        shares = self._shares(dim, crossed)
        for axis in self._axes([dim]):
            assert self.mesh is not None
            if crossed.placements[axis].is_replicate():
                dist.all_reduce(part, group=self.mesh.get_group(axis))
        rows = part if other == 0 else part.T
        for axis, length, longest, local_length in shares:
            assert self.mesh is not None
            padded = F.pad(rows, (0, 0, 0, longest * self.mesh.size(axis) - length)).contiguous()
            summed = rows.new_empty(longest, rows.shape[1])
            dist.reduce_scatter_tensor(summed, padded, group=self.mesh.get_group(axis))
            rows = summed[:local_length]
        return (rows if other == 0 else rows.T).contiguous()

    def collected(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Gather a tensor of the shape that `scattered` returns, or with as many rows or columns, to full length."""
        crossed, other = self.crossed(dim, part.shape[dim]), 1 - dim
        rows = part if other == 0 else part.T
        for axis, length, longest, local_length in reversed(self._shares(dim, crossed)):
            assert self.mesh is not None
            padded = F.pad(rows, (0, 0, 0, longest - local_length)).contiguous()
            full = rows.new_empty(longest * self.mesh.size(axis), rows.shape[1])
            dist.all_gather_into_tensor(full, padded, group=self.mesh.get_group(axis))
            rows = full[:length]
        return rows if other == 0 else rows.T

    def placed(self, local: torch.Tensor) -> torch.Tensor:
        """Wrap this rank's shard, of `local_shape`, as a DTensor of `shape`, as checkpoints need it."""
        assert tuple(local.shape) == self.local_shape, (tuple(local.shape), self.local_shape)
        if self.mesh is None:
            return local
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=stride
        )

    def gathered(self, local: torch.Tensor) -> torch.Tensor:
        """Gather shards of `local_shape` to the full tensor of `shape` on every rank. All ranks call it."""
        placed = self.placed(local)
        return placed.full_tensor() if isinstance(placed, DTensor) else placed

    def part(self, full_tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard, of `local_shape`, of a full tensor of `shape`, as a view."""
        return full_tensor[tuple(self.span(dim) for dim in range(full_tensor.dim()))]

    def zeros(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return zeros of `shape`. This rank allocates only its shard, of `local_shape`."""
        return self.placed(torch.zeros(self.local_shape, dtype=dtype, device=device))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor of any shape; a plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def by_owners(
    tasks: Sequence[T],
    layout_of: Callable[[T], Layout],
    gather: Callable[[T], torch.Tensor],
    work: Callable[[T, torch.Tensor], torch.Tensor],
    result: Callable[[T], torch.Tensor],
) -> Iterator[tuple[T, torch.Tensor]]:
    """Yield each task with work(task, gather(task)), computed by one rank and broadcast to all ranks of its mesh.

    Tasks are processed in batches of one task per rank. All ranks take part in every gather, but each retains only its
    task's full tensor. Then all ranks work in parallel, and broadcast their results. `result(task)`: an empty tensor of
    the shape that `work` returns, to receive into.
    """
    by_mesh: dict[DeviceMesh | None, list[T]] = {}
    for task in tasks:
        by_mesh.setdefault(layout_of(task).mesh, []).append(task)
    for mesh, mesh_tasks in by_mesh.items():
        size, local_number = (1, 0) if mesh is None else (mesh.size(), _number(mesh))
        for start in range(0, len(mesh_tasks), size):
            batch = mesh_tasks[start : start + size]
            local_input = None
            for number, task in enumerate(batch):
                full_tensor = gather(task)
                local_input = full_tensor if number == local_number else local_input
                del full_tensor
            local_result = work(batch[local_number], local_input) if local_input is not None else None
            for number, task in enumerate(batch):
                output = local_result if number == local_number and local_result is not None else result(task)
                if mesh is not None and size > 1:
                    output = output.contiguous()
                    _handed_out(output, mesh, number)
                yield task, output


def _number(mesh: DeviceMesh) -> int:
    """Return this rank's flat index in the mesh."""
    number = 0
    for axis, coordinate in enumerate(mesh.get_coordinate() or ()):
        number = number * mesh.size(axis) + coordinate
    return number


def _handed_out(tensor: torch.Tensor, mesh: DeviceMesh, owner: int) -> None:
    """Broadcast a tensor of any shape from the mesh's `owner`-th rank, one mesh axis after the other.

    The first broadcasts also run on lines without the owner, with meaningless values; later ones overwrite these.
    """
    for axis in reversed(range(mesh.ndim)):
        owner, coordinate = divmod(owner, mesh.size(axis))
        if mesh.size(axis) > 1:
            dist.broadcast(tensor, group=mesh.get_group(axis), group_src=coordinate)
