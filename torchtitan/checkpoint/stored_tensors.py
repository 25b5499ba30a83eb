"""Read all tensors of a checkpoint or of a folder of weights by their stored names, one at a time, and compare two.

A checkpoint of this project also holds the optimizer's state, and numbers of it that are not tensors. Contents are not
compared with their checksums: `torchtitan checkpoints --verify` does that.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from torchtitan.checkpoint import layout, storage
from torchtitan.checkpoint.agreement import Peers
from torchtitan.checkpoint.base_weights import Kind
from torchtitan.checkpoint.weight_sources import TorchtitanCheckpoint
from torchtitan.models.hf.load import Shards, tensor_files
from torchtitan.models.hf.packed import PackedFormat

AT_ONCE = 2**20
"""Elements that are compared at a time."""


class StoredTensors(ABC):
    """The tensors of a folder. `names`: in the order of the folder."""

    names: list[str]

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """Return the full tensor on the CPU, with its stored shape and dtype."""


class _Checkpoint(StoredTensors):
    def __init__(self, folder: Path):
        self.folder, self.manifest = folder, layout.check_complete(folder)
        self.index = storage.read_metadata(folder, self.manifest)
        self.values: Mapping[str, float] = layout.read_state(folder)["optimizer"]
        self.names = [*self.manifest.tensors, *self.values]
        self.peers = Peers("tensors", of_job=False)  # ranks of a pipeline read other tensors

    def read(self, name: str) -> torch.Tensor:
        if name in self.values:
            return torch.tensor(self.values[name])
        entry = self.manifest.tensors[name]
        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        storage.read_tensors(self.folder, self.index, {name: tensor}, self.peers)
        return tensor


class _Torchtitan(StoredTensors):
    def __init__(self, folder: Path):
        self.checkpoint = TorchtitanCheckpoint(folder)
        self.names = list(self.checkpoint.tensors)

    def read(self, name: str) -> torch.Tensor:
        return self.checkpoint.read(name)


class _HuggingFace(StoredTensors):
    def __init__(self, shards: Shards):
        self.shards, self.names = shards, list(shards.files)

    def read(self, name: str) -> torch.Tensor:
        return self.shards.read(name)


@contextmanager
def open_tensors(kind: Kind, location: Path) -> Iterator[StoredTensors]:
    """Open the tensors at a location of `base_weights.find_weights`. Raises JobError if they cannot be read."""
    if kind == "native":
        yield _Checkpoint(location)
    elif kind == "torchtitan":
        yield _Torchtitan(location)
    else:
        folder = location.parent if location.is_file() else location
        with ExitStack() as stack:
            yield _HuggingFace(Shards(folder, tensor_files(location), PackedFormat(), stack))


@dataclass(frozen=True)
class TensorDifference:
    """`index`: the first element that differs, with the values `a` and `b`. `relative`: `largest`, the largest
    difference, divided by the largest absolute value. `count` and `index` are 0 and [] if types or shapes differ.
    """

    name: str
    a: str
    b: str
    count: int = 0
    total: int = 0
    index: list[int] = field(default_factory=list)
    largest: float = 0.0
    relative: float = 0.0

    def __str__(self) -> str:
        change = f"{self.a} -> {self.b}"
        if self.total > 1:
            change = f"{self.count:,} of {self.total:,} elements, first {self.index} {change}"
            change += f"; largest difference {self.largest:.3g}, {self.relative:.3g} of the largest value"
        return f"{self.name}: {change}"


def compare_tensors(name: str, a: torch.Tensor, b: torch.Tensor, tolerance: float) -> TensorDifference | None:
    """Compare two tensors of any shape bit by bit, or, with a tolerance, by their values.

    The tolerance is relative to the largest absolute value of both. Returns None if they are equal.
    """
    castable = tolerance > 0 and a.is_floating_point() and b.is_floating_point()
    if a.shape != b.shape or (a.dtype != b.dtype and not castable):
        return TensorDifference(name, _kind(a), _kind(b))
    flat_a, flat_b = a.contiguous().reshape(-1), b.contiguous().reshape(-1)
    if a.dtype == b.dtype and torch.equal(flat_a.view(torch.uint8), flat_b.view(torch.uint8)):
        return None
    count, first, largest, magnitude = 0, -1, 0.0, 0.0
    for start in range(0, len(flat_a), AT_ONCE):
        piece_a, piece_b = (flat[start : start + AT_ONCE] for flat in (flat_a, flat_b))
        x, y = piece_a.double(), piece_b.double()
        gaps = (x - y).abs()
        gaps[(x == y) | (x.isnan() & y.isnan())] = 0  # infinities, and NaN with another payload
        gaps[gaps.isnan()] = torch.inf
        differs = gaps > 0 if tolerance else (_bits(piece_a) != _bits(piece_b)).any(1)
        count += int(differs.sum())
        if first < 0 and differs.any():
            first = start + int(differs.nonzero()[0])
        largest = max(largest, float(gaps.max()))
        magnitude = max(magnitude, *(float(side.abs().nan_to_num(0, 0).amax()) for side in (x, y)))
    relative = largest / magnitude if magnitude else largest
    if not count or (tolerance and relative <= tolerance):
        return None
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), a.shape)]
    value_a, value_b = (f"{float(flat[first].double()):.9g}" for flat in (flat_a, flat_b))
    return TensorDifference(name, value_a, value_b, count, a.numel(), index, largest, relative)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes [n, bytes of an element] of a contiguous tensor [n]."""
    return values.view(torch.uint8).view(len(values), -1)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
