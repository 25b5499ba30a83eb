"""What ranks send one another: every collective that is issued while `Traffic` is open, on this rank and thread.

Bytes are the least that the operation can do with, per rank: a rank's part to each of the n - 1 others for all-gather
and reduce-scatter, both of these for an all-reduce. What an algorithm of gloo or NCCL really sends is its own affair.
"""

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

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


@dataclass(frozen=True)
class Exchange:
    kind: str
    group: tuple[int, ...]  # ranks
    sent: Fraction  # bytes, by this rank
    dtype: torch.dtype


class Traffic(TorchDispatchMode):
    """Afterwards `exchanges` has them in order. An operation that it does not know is an AssertionError."""

    def __init__(self):
        super().__init__()
        self.exchanges: list[Exchange] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.name().split(".")[0]
        if name in KINDS:
            self.record(*KINDS[name], op, args)
        else:
            assert "c10d" not in name or name in SILENT, f"{name} is not counted: add it to KINDS"
        return op(*args, **(kwargs or {}))

    def record(self, kind, place, op, args):
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
            sent = Fraction(self.to_others(op, args, tensors[0], group))
        else:
            sent = Fraction(size if kind == "send" else 0)
        if others:
            self.exchanges.append(Exchange(kind, group, sent, tensors[0].dtype))

    @staticmethod
    def to_others(op, args, tensor, group):
        """Bytes of an all-to-all without what a rank keeps; split sizes may be left out, and are even then."""
        splits = next((arg for arg in args[::-1] if isinstance(arg, (list, tuple)) and arg), [1] * len(group))
        rest = sum(splits) - splits[group.index(dist.get_rank())]
        return Fraction(tensor.nbytes * rest, max(1, sum(splits)))

    def totals(self, axes=None):
        """{(kind, axis): (calls, bytes)}; `axes`: name -> ranks of the group, else the ranks stand for themselves."""
        names = {tuple(ranks): axis for axis, ranks in (axes or {}).items()}
        found = defaultdict(lambda: (0, Fraction(0)))
        for exchange in self.exchanges:
            key = exchange.kind, names.get(exchange.group, exchange.group)
            calls, sent = found[key]
            found[key] = calls + 1, sent + exchange.sent
        return dict(found)


def group_of(op, args):
    """The ranks of the group, which functional collectives name and the others hand over."""
    if op.namespace == "_c10d_functional":
        group = dist.distributed_c10d._resolve_process_group(args[-1])
    else:
        group = next(arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()))
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))


def axes_of(mesh):
    """Name -> ranks of the group that this rank is in, for every axis longer than 1."""
    names = [axis for axis in mesh.mesh_dim_names if mesh[axis].size() > 1]
    return {axis: tuple(dist.get_process_group_ranks(mesh[axis].get_group())) for axis in names}
