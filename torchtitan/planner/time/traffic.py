"""Count the collectives and messages that this rank and thread issue while `Traffic` is open.

Bytes are the minimum that a rank must send for the operation: its part to each of the n - 1 others for all-gather and
reduce-scatter, twice that for an all-reduce. The algorithms of gloo and NCCL may send more.

`FewMicrobatches` rehearses few microbatches of a pipeline and repeats them for the others, which allocate, free and
send the same. Of each kind of action of a stage the first two microbatches run, since the first one of all also gathers
parameters or creates gradients. Then the memory of the full table is added up action by action. Schedules that overlap
all-to-alls are not replayed: they defer weight gradients from one action to another, so that their actions differ.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.parallelisms.pipeline.runtime import TableSchedule
from torchtitan.planner.memory.live_tensors import Bytes, LiveTensors, OperatorMode
from torchtitan.torch_internals.collectives import resolve_process_group

# operation -> its kind, and the index of the argument with the bytes: a rank's part, or the tensor to reduce
KINDS = {
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "c10d::allgather_": ("all_gather", 1),
    "c10d::_allgather_base_": ("all_gather", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("receive", 0),
    "c10d::barrier": ("barrier", 0),
}
SECOND_SHARDS = INNER, OUTER = "inner shards", "outer shards"
"""Names of FSDP's groups with second shards: those that share one, and those with the same part of it."""
SILENT = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")
Group = tuple[int, ...]
"""Global ranks of a process group."""


@dataclass(frozen=True)
class Exchange:
    kind: str
    group: Group
    sent: Fraction
    """Bytes that this rank sends."""
    dtype: torch.dtype
    elements: int
    """Numbers of this rank's part, or of the tensor to reduce."""
    peer: int | None = None
    """Global rank of the other end of a message between two."""
    by_fsdp: bool = False
    """True for a message of weights or their gradients. Those of other axes are functional collectives."""


class Traffic(OperatorMode):
    """Records the exchanges in order in `exchanges`. An unknown operation raises AssertionError."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: list[Exchange] = []

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
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
        size, peers = sum(tensor.nbytes for tensor in tensors), len(group) - 1
        if kind == "all_gather":
            sent = Fraction(size * peers)
        elif kind == "reduce_scatter":
            sent = Fraction(size * peers, len(group))
        elif kind == "all_reduce":
            sent = Fraction(2 * size * peers, len(group))
        elif kind == "all_to_all":
            sent = self._to_others(args, tensors[0], group)
        else:
            sent = Fraction(size if kind == "send" else 0)
        if peers:
            peer = group[args[2]] if kind in ("send", "receive") else None
            elements = sum(tensor.numel() for tensor in tensors)
            by_fsdp = op.namespace == "c10d" and kind in ("all_gather", "reduce_scatter", "all_to_all")
            self.exchanges.append(Exchange(kind, group, sent, tensors[0].dtype, elements, peer, by_fsdp))

    @staticmethod
    def _to_others(args: Any, tensor: torch.Tensor, group: Group) -> Fraction:
        """Return the bytes of an all-to-all that leave this rank. Without split sizes the parts are equal."""
        splits = next((arg for arg in args[::-1] if isinstance(arg, (list, tuple)) and arg), [1] * len(group))
        outgoing = sum(splits) - splits[group.index(dist.get_rank())]
        return Fraction(tensor.nbytes * outgoing, max(1, sum(splits)))

    def totals(self, axes: Mapping[str, Group] | None = None) -> dict[tuple[str, Any], tuple[int, Fraction]]:
        """Return {(kind, axis): (calls, bytes)}. `axes`: name -> ranks; other groups are keyed by their ranks.

        Of axes with the same ranks the last name counts, but for messages of FSDP its own.
        """
        ranks_of = {axis: tuple(ranks) for axis, ranks in (axes or {}).items()}
        names = {ranks: axis for axis, ranks in ranks_of.items() if axis not in SECOND_SHARDS}
        fsdp_names = names | {ranks: axis for axis, ranks in ranks_of.items() if axis in ("fsdp", *SECOND_SHARDS)}
        sums: dict[tuple[str, Any], tuple[int, Fraction]] = defaultdict(lambda: (0, Fraction(0)))
        for exchange in self.exchanges:
            key = exchange.kind, (fsdp_names if exchange.by_fsdp else names).get(exchange.group, exchange.group)
            calls, sent = sums[key]
            sums[key] = calls + 1, sent + exchange.sent
        return dict(sums)


def group_of(op: Any, args: Any) -> Group:
    """Return the ranks of an operation's group. Functional collectives pass its name, the others the group itself."""
    if op.namespace == "_c10d_functional":
        group = resolve_process_group(args[-1])
    else:
        boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()))
        group = dist.ProcessGroup.unbox(boxed)
    return tuple(dist.get_process_group_ranks(group))


def axes_of(mesh: DeviceMesh) -> dict[str, Group]:
    """Return axis -> ranks of this rank's group, for every mesh axis longer than 1."""
    names = [axis for axis in mesh.mesh_dim_names or () if mesh[axis].size() > 1]
    return {axis: tuple(dist.get_process_group_ranks(mesh[axis].get_group())) for axis in names}


RUNNING = 2
"""Number of microbatches that run for each kind of action."""


class Record(NamedTuple):
    """An action's effect: bytes by kind that it adds and that its peak adds to its start, and its messages."""

    added: Bytes
    peak: Bytes
    messages: list[Any]


def kind_of(action: Any) -> Hashable:
    return action.computation_type, action.stage_index


def running_microbatches(actions: list[Any]) -> set[int | None]:
    """Return the microbatches that run: the first of each kind of action, in the order of the table.

    The microbatch of an action that is done once per stage is None.
    """
    numbers: dict[Hashable, int] = defaultdict(int)
    running: set[int | None] = {None}
    for action in actions:
        if numbers[kind_of(action)] < RUNNING:
            running.add(action.microbatch_index)
        numbers[kind_of(action)] += 1
    return running


class FewMicrobatches:
    """Runs some microbatches of a pipeline's passes, and counts all in `live.peak` and `traffic` at their ends.

    It observes the actions of `schedule`.
    """

    def __init__(self, schedule: TableSchedule, live: LiveTensors, traffic: Traffic) -> None:
        self.schedule, self.live, self.traffic = schedule, live, traffic
        self.actions = schedule.pipeline_order_with_comms[schedule.rank]
        self.start: Bytes = Counter()
        self.records: dict[tuple[Hashable, int | None], Record] = {}

    def begin_pass(self) -> None:
        running, schedule = running_microbatches(self.actions), self.schedule
        few = [action for action in self.actions if action.microbatch_index in running]
        schedule.pipeline_order_with_comms[schedule.rank] = few
        schedule.observer = self
        self.records.clear()

    def begin(self, action: Any) -> None:
        self.before, self.sent_before = self.live.now.copy(), len(self.traffic.exchanges)
        if not self.records:
            self.start = self.before
        self.live.forget_peak()

    def end(self, action: Any) -> None:
        live, exchanges = self.live, self.traffic.exchanges
        added, peak = live.now.copy(), live.peak.copy()
        for sizes in (added, peak):
            sizes.subtract(self.before)
        self.records[kind_of(action), action.microbatch_index] = Record(added, peak, exchanges[self.sent_before :])
        del exchanges[self.sent_before :]
        live.forget_peak()

    def end_pass(self) -> None:
        self.schedule.pipeline_order_with_comms[self.schedule.rank] = self.actions
        self.schedule.observer = None
        peak = self._replay()
        if peak.total() > self.live.most:
            self.live.most, self.live.peak = peak.total(), peak

    def _replay(self) -> Bytes:
        """Return the peak of all actions by kind, and count the messages of all."""
        last = {kind: record for (kind, _), record in self.records.items()}
        now, peak = self.start.copy(), self.start.copy()
        for action in self.actions:
            kind = kind_of(action)
            record = self.records.get((kind, action.microbatch_index), last[kind])
            if now.total() + record.peak.total() > peak.total():
                peak = now.copy()
                peak.update(record.peak)
            now.update(record.added)
            self.traffic.exchanges += record.messages
        return peak
