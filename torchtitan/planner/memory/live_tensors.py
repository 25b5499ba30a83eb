"""Dispatch modes that watch a rehearsal. They see every operator, so they must be cheap.

`LiveTensors` counts live tensors by kind while a program runs. `FakeValues` supplies numbers for value-less tensors.

Why not torch's MemTracker and FSDPMemTracker (torch.distributed._tools, torch 2.13): their totals agree with ours
(201.3 and 132.4 MiB for the debug model on one rank and on one of 8, within 0.3 %). But they keep one peak per step,
which cannot be extrapolated over the depth when another part of the step becomes the highest. They report neither the
loss nor the caches of adapters. FSDPMemTracker also needs a model with an FSDP unit at its root, which the model parts
of a pipeline do not have.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchtitan.torch_internals.dispatch import (
    FakeTensor,
    TorchDispatchMode,
    current_node,
    local_scalar_dense,
    storage_key,
    tree_iter,
)
from torchtitan.torch_internals.dtensor import local_part
from torchtitan.torch_internals.replacement import replaced

_DEVICE = torch.ops.prim.device.default
"""Query of a fake tensor's device, which autograd makes before most operators: more than half of all calls."""


class OperatorMode(TorchDispatchMode):
    """A dispatch mode that calls `call` in place of every operator and returns its result."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # torch's own makes two more calls per operator
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


ACTIVATIONS, BACKWARD, GATHERED = "activations", "work of backward", "gathered parameters"
Bytes = Counter[str]
"""Bytes by kind of memory."""


class LiveTensors(OperatorMode):
    """Counts the bytes of live storages that operators have made, by kind: `now`, and `peak` at the highest total.

    A new storage is an activation, or work of backward during backward. Inside `of` it has the kind given there.
    Storages to which FSDP copies gathered shards are gathered parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[int, tuple[str, int]] = {}  # by storage
        self.now: Bytes = Counter()
        self.peak: Bytes = Counter()
        self.total = self.most = 0
        self._kind_stack: list[str] = []

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        """Count storages made inside the block as this kind."""
        self._kind_stack.append(kind)
        try:
            yield
        finally:
            self._kind_stack.pop()

    def begin(self, kind: str) -> None:
        self._kind_stack.append(kind)

    def end(self) -> None:
        self._kind_stack.pop()

    def forget_peak(self) -> None:
        """Start a new peak from the current total."""
        self.most, self.peak = self.total, self.now.copy()

    def add(self, tensor: torch.Tensor, kind: str) -> None:
        """Count the storage of a tensor of any shape as this kind, whatever it was before."""
        self._count(tensor, kind)

    def rename(self, kinds: set[str], kind: str) -> None:
        """Count the live storages of these `kinds` as `kind` from now on."""
        self.kinds = {key: (kind if old in kinds else old, size) for key, (old, size) in self.kinds.items()}
        self.now[kind] += sum(self.now.pop(old, 0) for old in kinds)

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if func.namespace == "fsdp" and kwargs.get("out") is not None:
            kind = BACKWARD if "chunk_cat" in func.name() else GATHERED
            for tensor in tree_iter(kwargs["out"]):
                self.add(tensor, kind)
        for tensor in (result,) if isinstance(result, torch.Tensor) else tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        return result

    def _kind(self) -> str:
        if self._kind_stack:
            return self._kind_stack[-1]
        return ACTIVATIONS if current_node() is None else BACKWARD

    def _count(self, tensor: torch.Tensor, kind: str | None = None) -> None:
        tensor = local_part(tensor)
        if tensor.device.type != "meta":  # only used to find shapes
            self._count_storage(tensor.untyped_storage(), kind)

    def _count_storage(self, storage: torch.UntypedStorage, kind: str | None = None) -> None:
        key, size = storage_key(storage), storage.nbytes()
        if key in self.kinds:
            before, counted_size = self.kinds[key]
            if size == counted_size and kind in (None, before):
                return
            self._subtract(before, counted_size)
            kind = kind or before
        else:
            weakref.finalize(storage, self._drop, key)
        self._add(key, kind or self._kind(), size)

    def _add(self, key: int, kind: str, size: int) -> None:
        self.kinds[key] = kind, size
        self.now[kind] += size
        self.total += size
        if self.total > self.most:
            self.most, self.peak = self.total, self.now.copy()

    def _subtract(self, kind: str, size: int) -> None:
        self.now[kind] -= size
        self.total -= size

    def _drop(self, key: int) -> None:
        if key in self.kinds:
            self._subtract(*self.kinds.pop(key))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count inside the block, also when FSDP resizes storages to free and refill them, which no mode sees."""

        def counting_resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            if storage_key(storage) in self.kinds:
                self._count_storage(storage)
            return storage

        with replaced(torch.UntypedStorage, "resize_", counting_resize) as resize, self:
            yield


class FakeValues(OperatorMode):
    """Supplies values for tensors without values: numbers are 1 and masks are True everywhere.

    The `rows` that go to the `peers` of an expert-parallel group are spread evenly.
    """

    def __init__(self, rows: int = 0, peers: int = 1) -> None:
        super().__init__()
        self.rows, self.peers = rows, peers

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return self._number(args[0])
        if func is torch.ops.aten.index.Tensor:
            args = args[0], [place for index in args[1] for place in _places(index)]
        return func(*args, **kwargs)

    def _number(self, tensor: torch.Tensor) -> bool | int | float:
        if tensor.dtype.is_floating_point:
            return 1.0
        is_single = tensor.untyped_storage().nbytes() == tensor.itemsize  # e.g. a vote of ranks, not part of a list
        if is_single or tensor.dtype is torch.bool:
            return True if tensor.dtype is torch.bool else 1
        share, remainder = divmod(self.rows, self.peers)
        return share + (tensor.storage_offset() % self.peers < remainder)


def _places(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Return the indices to use for an index: int64 [N] for each dimension of a mask, else the index itself."""
    if index is None or index.dtype is not torch.bool:
        return [index]
    return [index.new_zeros(index.numel(), dtype=torch.int64)] * index.dim()
