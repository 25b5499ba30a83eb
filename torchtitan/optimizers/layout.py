"""The layout of a tensor over ranks, and collectives over the ranks that have its other shards.

Optimizers compute with this rank's shard, a plain tensor, and use these functions for sums over a sharded dimension and
for gathers. So the same code runs on one device and under every plan.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchtitan.optimizers.step_sizes import PIECE
from torchtitan.torch_internals.dispatch import FakeTensor, unset_fake_temporarily
from torchtitan.torch_internals.dtensor import StridedShard, local_shape_and_offset_at

T = TypeVar("T")
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape of a shard, and its offset in the full tensor."""


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
    def _local_box(self) -> Box:
        coordinate = None if self.mesh is None else self.mesh.get_coordinate()
        return self.box(coordinate or ())

    @unset_fake_temporarily()  # torch reads offsets from tensors, whose values a rehearsal would make up
    def box(self, coordinate: Sequence[int]) -> Box:
        """Return the shape of the shard at a coordinate of the mesh, and its offset in the full tensor."""
        if self.mesh is None:
            return self.shape, (0,) * len(self.shape)
        shape, offset = local_shape_and_offset_at(self.shape, self.mesh.shape, list(coordinate), self.placements)
        return tuple(shape), tuple(offset)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self._local_box[0]

    @property
    def offset(self) -> tuple[int, ...]:
        """Return the offset of this rank's shard in the full tensor."""
        return self._local_box[1]

    @property
    def replicated_axes(self) -> list[int]:
        """Return the mesh axes along which the tensor is replicated."""
        return [axis for axis, placement in enumerate(self.placements) if placement.is_replicate()]

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
                placements[axis] = StridedShard(other, split_factor=split)
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

    def part(self, full_tensor: torch.Tensor, coordinate: Sequence[int] | None = None) -> torch.Tensor:
        """Return a view of the shard of a full tensor of `shape` at a coordinate of the mesh; default: this rank."""
        shape, offset = self._local_box if coordinate is None else self.box(coordinate)
        return full_tensor[tuple(slice(first, first + size) for size, first in zip(shape, offset, strict=True))]

    def zeros(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return zeros of `shape`. This rank allocates only its shard, of `local_shape`."""
        return self.placed(torch.zeros(self.local_shape, dtype=dtype, device=device))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor of any shape; a plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def by_owners(
    tasks: Sequence[T],
    layout_of: Callable[[T], Layout],
    shard_of: Callable[[T], torch.Tensor],
    work: Callable[[T, torch.Tensor], torch.Tensor],
    result: Callable[[T], torch.Tensor] | None = None,
) -> Iterator[tuple[T, torch.Tensor]]:
    """Yield each task with `work` on its full matrix, done by one rank of its mesh, the owner.

    `shard_of(task)`: this rank's shard of the matrix, of the layout's `local_shape`. By default `work` returns a matrix
    of the same shape and dtype, and each rank receives its shard of that. With `result`, which returns an empty tensor
    of the shape that `work` returns, all ranks receive the full result.

    Tasks are processed in batches of one per rank. Every rank sends its shards to their owners, all work in parallel,
    and send the results: for matrices of M elements a rank sends and receives at most 2 M elements a batch.
    """
    by_mesh: dict[DeviceMesh | None, list[T]] = {}
    for task in tasks:
        by_mesh.setdefault(layout_of(task).mesh, []).append(task)
    for mesh, mesh_tasks in by_mesh.items():
        if mesh is None or mesh.size() == 1:
            yield from ((task, work(task, shard_of(task))) for task in mesh_tasks)
            continue
        for start in range(0, len(mesh_tasks), mesh.size()):
            batch = mesh_tasks[start : start + mesh.size()]
            owners, shards = Owners(mesh, [layout_of(task) for task in batch]), [shard_of(task) for task in batch]
            matrix = owners.gather(shards)
            full_result = None if matrix is None else work(batch[owners.local_number], matrix)
            if result is None:
                yield from zip(batch, owners.scatter(full_result, shards[0]), strict=True)
                continue
            for number, task in enumerate(batch):
                output = full_result if full_result is not None and number == owners.local_number else result(task)
                output = output.contiguous()
                owners.broadcast(output, number)
                yield task, output


Coordinate = tuple[int, ...]
"""Coordinates of a rank in a mesh."""
Route = tuple[Coordinate, Coordinate]
"""The rank that has a shard first, and the one that receives it. One of them owns the shard's matrix."""


class Owners:
    """Matrices of which each rank of a mesh owns at most one, by its number in the mesh.

    Shards are sent along one mesh axis after the other, so that only the mesh's own process groups are needed: before
    the exchange along `axis` a shard is at the receiver's coordinates of the axes before, and at the sender's of the
    others. A shard that is replicated along an axis is sent by the replica on the owner's line.
    """

    def __init__(self, mesh: DeviceMesh, layouts: Sequence[Layout]):
        """`layouts`: of one matrix [m, n] per owner, for the first ranks of the mesh."""
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        self.mesh, self.layouts, self.coordinate = mesh, layouts, tuple(coordinate)
        self.local_number = self._number(self.coordinate)

    def _number(self, coordinate: Coordinate) -> int:
        number = 0
        for axis, index in enumerate(coordinate):
            number = number * self.mesh.size(axis) + index
        return number

    def gather(self, shards: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Send the shards of all matrices to their owners. Return this rank's full matrix [m, n], if it owns one."""

        def box_of(sender: Coordinate, owner: Coordinate) -> Box | None:
            layout = self._layout_of(owner)
            if layout is None or any(sender[axis] != owner[axis] for axis in layout.replicated_axes):
                return None
            return layout.box(sender)

        first = [(self.coordinate, owner) for owner in product(*map(range, self.mesh.shape))]
        shards_by_route = {route: shards[self._number(route[1])] for route in first if box_of(*route) is not None}
        received = self._exchange(shards_by_route, box_of, shards[0])
        layout = self._layout_of(self.coordinate)
        if layout is None:
            return None
        matrix = shards[0].new_empty(layout.shape)
        for (sender, _), shard in received.items():
            layout.part(matrix, sender).copy_(shard)
        return matrix

    def scatter(self, result: torch.Tensor | None, like: torch.Tensor) -> list[torch.Tensor]:
        """Send each rank its shard of each owner's `result` [m, n], None on a rank that owns none. Return the shards
        of this rank, of the dtype and on the device of `like`."""

        def box_of(owner: Coordinate, receiver: Coordinate) -> Box | None:
            layout = self._layout_of(owner)
            return None if layout is None else layout.box(receiver)

        shards_by_route: dict[Route, torch.Tensor] = {}
        if result is not None:
            layout = self.layouts[self.local_number]
            receivers = product(*map(range, self.mesh.shape))
            shards_by_route = {(self.coordinate, to): layout.part(result.to(like), to) for to in receivers}
        received = self._exchange(shards_by_route, box_of, like)
        return [received[route] for route in sorted(received)]

    def _layout_of(self, owner: Coordinate) -> Layout | None:
        number = self._number(owner)
        return self.layouts[number] if number < len(self.layouts) else None

    def _exchange(
        self,
        shards: dict[Route, torch.Tensor],
        box_of: Callable[[Coordinate, Coordinate], Box | None],
        like: torch.Tensor,
    ) -> dict[Route, torch.Tensor]:
        """Send shards along their routes. Return those that end here. `box_of(sender, receiver)`: None if unused."""
        for axis in range(self.mesh.ndim):
            size = self.mesh.size(axis)
            if size == 1:
                continue
            outgoing = sorted(shards, key=lambda route: (route[1][axis], route))
            incoming = sorted(self._routes_after(axis), key=lambda route: (route[0][axis], route))
            boxes = {route: box for route in incoming if (box := box_of(*route)) is not None}
            lengths = [prod(shape) for shape, _ in boxes.values()]
            sent, received = [0] * size, [0] * size
            for route in outgoing:
                sent[route[1][axis]] += shards[route].numel()
            for (sender, _), length in zip(boxes, lengths, strict=True):
                received[sender[axis]] += length
            flat = torch.cat([like.new_empty(0), *(shards[route].flatten() for route in outgoing)])
            output = like.new_empty(sum(lengths))
            dist.all_to_all_single(output, flat, received, sent, group=self.mesh.get_group(axis))
            pieces = zip(boxes.items(), output.split(lengths), strict=True)
            shards = {route: piece.view(shape) for (route, (shape, _)), piece in pieces}
        return shards

    def _routes_after(self, axis: int) -> Iterator[Route]:
        """Yield the routes of shards that are at this rank after the exchange along `axis`."""
        ranges, coordinate = [range(size) for size in self.mesh.shape], self.coordinate
        for head in product(*ranges[: axis + 1]):
            for tail in product(*ranges[axis + 1 :]):
                yield (*head, *coordinate[axis + 1 :]), (*coordinate[: axis + 1], *tail)

    def broadcast(self, tensor: torch.Tensor, owner: int) -> None:
        """Broadcast a tensor of any shape from the `owner`-th rank, one mesh axis after the other.

        The first broadcasts also run on lines without the owner, with meaningless values; later ones overwrite these.
        """
        for axis in reversed(range(self.mesh.ndim)):
            owner, coordinate = divmod(owner, self.mesh.size(axis))
            if self.mesh.size(axis) > 1:
                dist.broadcast(tensor, group=self.mesh.get_group(axis), group_src=coordinate)


ON_CPU = 2**18
"""Elements of a piece on a CPU: a temporary in float32 takes 1 MiB, which stays in its cache, and elsewhere 8 MiB."""

Index = tuple[slice, ...]


def pieces_of(shard: torch.Tensor, row: int = 1) -> Iterator[Index]:
    """Yield indices that cut a shard of any shape into pieces, of whole rows if its last dimension is a `row`.

    A rehearsal gets the first piece alone: the others allocate as much, and free it.
    """
    size = ON_CPU if shard.device.type == "cpu" and not isinstance(shard, FakeTensor) else PIECE
    indices = pieces(shard.shape if row == 1 else shard.shape[:-1], max(1, size // max(1, row)))
    return islice(indices, 1) if isinstance(shard, FakeTensor) else indices


def pieces(shape: Sequence[int], size: int) -> Iterator[Index]:
    """Yield indices that cut a tensor of this shape into pieces of at most `size` elements, if a row has as many."""
    if not shape:
        yield ()
        return
    row = prod(shape[1:])
    if row > size and len(shape) > 1:
        for start in range(shape[0]):
            for inner in pieces(shape[1:], size):
                yield slice(start, start + 1), *inner
    else:
        rows = max(1, size // max(1, row))
        for start in range(0, shape[0], rows):
            yield (slice(start, start + rows),)
