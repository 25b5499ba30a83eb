"""What the modes that watch a rehearsal have in common. They see every operator, so what they cost is felt.

Tensors that live, counted by kind while a program runs; and answers in place of values, where tensors have none.

Why not torch's MemTracker and FSDPMemTracker (torch.distributed._tools, torch 2.13): their totals are these (201.3 and
132.4 MiB of the debug model on one rank and on one of 8, within 0.3 %), but they keep one peak of a whole step, from
which no line over the depth can be drawn where another part of it becomes the highest, they name neither loss nor
caches of adapters, and the second takes a model that is one unit at its root, which the parts of a pipeline are not.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_DEVICE = torch.ops.prim.device.default
"""What autograd asks a tensor without values before most operators: more than half of all that is seen."""


class Watching(TorchDispatchMode):
    """`saw` is called in the place of every operator, and gives what that gives."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # torch's: for a program that compiles nothing, two calls more an operator
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        return self.saw(func, args, kwargs or {})

    def saw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


ACTIVATIONS, BACKWARD, GATHERED = "activations", "work of backward", "gathered parameters"
Bytes = Counter[str]
"""By kind."""


class Live(Watching):
    """`now`: bytes of all storages that operators have made and that still live, by kind; `peak`: the same at the
    moment when they were the most. What is made is an activation, in backward the work of it, within `of` of the kind
    that is said there; what FSDP copies its gathered shards to is that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[int, tuple[str, int]] = {}  # by storage
        self.now: Bytes = Counter()
        self.peak: Bytes = Counter()
        self.total = self.most = 0
        self._said: list[str] = []

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        """What is made inside is of this kind."""
        self._said.append(kind)
        try:
            yield
        finally:
            self._said.pop()

    def begin(self, kind: str) -> None:
        self._said.append(kind)

    def end(self) -> None:
        self._said.pop()

    def forget_peak(self) -> None:
        """The next one counts from here on."""
        self.most, self.peak = self.total, self.now.copy()

    def add(self, tensor: torch.Tensor, kind: str) -> None:
        """Count the storage of a tensor of any shape as of this kind, whatever it was before."""
        self._count(tensor, kind)

    def rename(self, kinds: set[str], kind: str) -> None:
        """What lives now of these kinds is of another."""
        self.kinds = {key: (kind if old in kinds else old, size) for key, (old, size) in self.kinds.items()}
        self.now[kind] += sum(self.now.pop(old, 0) for old in kinds)

    def saw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        made = func(*args, **kwargs)
        if func.namespace == "fsdp" and kwargs.get("out") is not None:
            kind = BACKWARD if "chunk_cat" in func.name() else GATHERED
            for tensor in tree_iter(kwargs["out"]):
                self.add(tensor, kind)
        for tensor in (made,) if isinstance(made, torch.Tensor) else tree_iter(made):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        return made

    def _kind(self) -> str:
        if self._said:
            return self._said[-1]
        return ACTIVATIONS if torch._C._current_autograd_node() is None else BACKWARD

    def _count(self, tensor: torch.Tensor, kind: str | None = None) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor, this rank's part
        if tensor.device.type != "meta":  # of which shapes are asked
            self._count_storage(tensor.untyped_storage(), kind)

    def _count_storage(self, storage: torch.UntypedStorage, kind: str | None = None) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.kinds:
            before, counted = self.kinds[key]
            if size == counted and kind in (None, before):
                return
            self._take(before, counted)
            kind = kind or before
        else:
            weakref.finalize(storage, self._drop, key)
        self._give(key, kind or self._kind(), size)

    def _give(self, key: int, kind: str, size: int) -> None:
        self.kinds[key] = kind, size
        self.now[kind] += size
        self.total += size
        if self.total > self.most:
            self.most, self.peak = self.total, self.now.copy()

    def _take(self, kind: str, size: int) -> None:
        self.now[kind] -= size
        self.total -= size

    def _drop(self, key: int) -> None:
        if key in self.kinds:
            self._take(*self.kinds.pop(key))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count; storages that FSDP frees and fills again by their size, of which no mode is told, as well."""
        resize: Callable = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            if storage._cdata in self.kinds:
                self._count_storage(storage)
            return storage

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign,assignment]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


class Answers(Watching):
    """Says for tensors without values what only values tell: numbers are 1, masks are True everywhere, and of `rows`
    that go to the `peers` of an expert-parallel group each gets as many as any other.
    """

    def __init__(self, rows: int = 0, peers: int = 1) -> None:
        super().__init__()
        self.rows, self.peers = rows, peers

    def saw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return self._number(args[0])
        if func is torch.ops.aten.index.Tensor:
            args = args[0], [place for index in args[1] for place in _places(index)]
        return func(*args, **kwargs)

    def _number(self, tensor: torch.Tensor) -> bool | int | float:
        if tensor.dtype.is_floating_point:
            return 1.0
        alone = tensor.untyped_storage().nbytes() == tensor.itemsize  # a vote of ranks, and no list of numbers
        if alone or tensor.dtype is torch.bool:
            return True if tensor.dtype is torch.bool else 1
        share, rest = divmod(self.rows, self.peers)
        return share + (tensor.storage_offset() % self.peers < rest)


def _places(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    """An index of a tensor; a mask as the places of all that it lies over."""
    if index is None or index.dtype is not torch.bool:
        return [index]
    return [index.new_zeros(index.numel(), dtype=torch.int64)] * index.dim()
