"""Read all tensors of a checkpoint or of a folder of weights by their stored names, one at a time.

A checkpoint of this project also holds the optimizer's state, and numbers of it that are not tensors. Contents are not
compared with their checksums: `torchtitan checkpoints --verify` does that.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from torchtitan.checkpoint import layout, storage
from torchtitan.checkpoint.agreement import Peers
from torchtitan.checkpoint.base_weights import Kind
from torchtitan.checkpoint.weight_sources import TorchtitanCheckpoint
from torchtitan.models.hf.load import Shards, tensor_files


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
        self.peers = Peers("tensors")

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
    if kind == "ours":
        yield _Checkpoint(location)
    elif kind == "torchtitan":
        yield _Torchtitan(location)
    else:
        folder = location.parent if location.is_file() else location
        with ExitStack() as stack:
            yield _HuggingFace(Shards(folder, tensor_files(location), None, stack))
