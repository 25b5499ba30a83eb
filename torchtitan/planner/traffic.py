"""What a rank sends: every collective and message that is issued while `Traffic` is open, on this rank and thread.

Bytes are the least that the operation can do with, per rank: a rank's part to each of the n - 1 others for all-gather
and reduce-scatter, both of these for an all-reduce. What an algorithm of gloo or NCCL really sends is its own affair.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.planner.live_tensors import Watching

# operation -> its kind, and which argument has the bytes: the part of a rank, or all that is reduced
KINDS = {
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "c10d::_allgather_base_": ("all_gather", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("receive", 0),
}
SILENT = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd", "c10d::barrier")
Group = tuple[int, ...]
"""Ranks."""


@dataclass(frozen=True)
class Exchange:
    kind: str
    group: Group
    sent: Fraction
    """Bytes, by this rank."""
    dtype: torch.dtype


class Traffic(Watching):
    """Afterwards `exchanges` has them in order. An operation that it does not know is an AssertionError."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: list[Exchange] = []

    def saw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if "c10d" in func.namespace:
            name = func.name().split(".")[0]
            if name in KINDS:
                self._record(*KINDS[name], func, args)
            else:
                assert name in SILENT, f"{name} is not counted: add it to KINDS"
        return func(*args, **kwargs)

    def _record(self, kind: str, place: int, op: Any, args: Any) -> None:
        group = group_of(op, args)
        tensors = args[place] if isinstance(args[place], (list, tuple)) else [args[place]]
        size, others = sum(tensor.nbytes for tensor in tensors), len(group) - 1
        if kind == "all_gather":
            sent = Fraction(size * others)
        elif kind == "reduce_scatter":
            sent = Fraction(size * others, len(group))
        elif kind == "all_reduce":
            sent = Fraction(2 * size * others, len(group))
        elif kind == "all_to_all":
            sent = self._to_others(args, tensors[0], group)
        else:
            sent = Fraction(size if kind == "send" else 0)
        if others:
            self.exchanges.append(Exchange(kind, group, sent, tensors[0].dtype))

    @staticmethod
    def _to_others(args: Any, tensor: torch.Tensor, group: Group) -> Fraction:
        """Bytes of an all-to-all without what a rank keeps; split sizes may be left out, and are even then."""
        splits = next((arg for arg in args[::-1] if isinstance(arg, (list, tuple)) and arg), [1] * len(group))
        rest = sum(splits) - splits[group.index(dist.get_rank())]
        return Fraction(tensor.nbytes * rest, max(1, sum(splits)))

    def totals(self, axes: Mapping[str, Group] | None = None) -> dict[tuple[str, Any], tuple[int, Fraction]]:
        """{(kind, axis): (calls, bytes)}; `axes`: name -> ranks of the group, else the ranks stand for themselves."""
        names = {tuple(ranks): axis for axis, ranks in (axes or {}).items()}
        found: dict[tuple[str, Any], tuple[int, Fraction]] = defaultdict(lambda: (0, Fraction(0)))
        for exchange in self.exchanges:
            key = exchange.kind, names.get(exchange.group, exchange.group)
            calls, sent = found[key]
            found[key] = calls + 1, sent + exchange.sent
        return dict(found)


def group_of(op: Any, args: Any) -> Group:
    """The ranks of the group, which functional collectives name and the others hand over."""
    if op.namespace == "_c10d_functional":
        group = dist.distributed_c10d._resolve_process_group(args[-1])
    else:
        boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()))
        group = dist.ProcessGroup.unbox(boxed)
    return tuple(dist.get_process_group_ranks(group))


def axes_of(mesh: DeviceMesh) -> dict[str, Group]:
    """Name -> ranks of the group that this rank is in, for every axis longer than 1."""
    names = [axis for axis in mesh.mesh_dim_names or () if mesh[axis].size() > 1]
    return {axis: tuple(dist.get_process_group_ranks(mesh[axis].get_group())) for axis in names}
