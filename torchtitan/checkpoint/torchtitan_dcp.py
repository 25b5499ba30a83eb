"""Read the weights of checkpoints that torchtitan itself wrote with torch.distributed.checkpoint.

They have no manifest to verify them against. Their metadata are a pickle, which is read without executing it
(safe_unpickle.py), and only files of the checkpoint are opened. Pickled values in it are never read.
"""

import re
import stat
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from torchtitan.checkpoint import safe_unpickle
from torchtitan.checkpoint.layout import METADATA, MODEL, CheckpointError, read_bytes
from torchtitan.checkpoint.storage import translated_errors

_FILE = re.compile(r"[A-Za-z0-9_]{1,128}\.distcp")
NOT_WEIGHTS = ("optimizer", "lr_scheduler", "dataloader", "train_state")
COMPUTED = ("freqs_cis",)
"""A table of rotary angles, which some versions of torchtitan saved."""


class TorchtitanCheckpoint:
    """The weights of a torchtitan checkpoint. `tensors`: torchtitan's name of a weight -> dtype and shape.

    Raises `CheckpointError`.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self.found = safe_unpickle.read_foreign(read_bytes(folder / METADATA, safe_unpickle.LARGEST))
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from None
        entries = self.found.state_dict_metadata
        # until 2024 the names of all weights had the prefix "model."
        self.prefix = MODEL if any(name.startswith(MODEL) for name in entries) else ""
        weights = {name.removeprefix(self.prefix): entry for name, entry in entries.items() if self._is_weight(name)}
        self.tensors = {name: (entry.properties.dtype, tuple(entry.size)) for name, entry in weights.items()}
        if not self.tensors:
            raise CheckpointError(f"{folder}: holds no weights, only {', '.join(sorted(entries)[:5]) or 'values'}")
        self._check_places()
        for name in self.tensors:
            if (fault := safe_unpickle.lack_of(self.prefix + name, self.found)) is not None:
                raise CheckpointError(f"{folder / METADATA}: {name} {fault}")

    def _is_weight(self, name: str) -> bool:
        inner = name.removeprefix(self.prefix)
        return name.startswith(self.prefix) and inner not in COMPUTED and inner.split(".")[0] not in NOT_WEIGHTS

    def _check_places(self) -> None:
        """Check that each tensor is stored in regular files of this folder."""
        for index, place in self.found.storage_data.items():
            if index.fqn.removeprefix(self.prefix) not in self.tensors:
                continue
            if not _FILE.fullmatch(place.relative_path):
                raise CheckpointError(f"{self.folder / METADATA} points to {place.relative_path!r}: not opened")
            if place.transform_descriptors is not None:
                raise CheckpointError(
                    f"{self.folder / METADATA}: {index.fqn} is stored in a transformed way: not opened"
                )
            try:
                status = (self.folder / place.relative_path).lstat()
            except OSError as error:
                raise CheckpointError(
                    f"{self.folder / place.relative_path} cannot be read ({error.strerror})"
                ) from None
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{self.folder / place.relative_path} is not a regular file")
            if place.offset + place.length > status.st_size:
                raise CheckpointError(f"{self.folder / place.relative_path} is cut off: {index.fqn} is not all there")

    def read(self, name: str) -> torch.Tensor:
        """Return the full tensor, of the shape in `tensors`, from any number of ranks' files."""
        dtype, shape = self.tensors[name]
        target = {self.prefix + name: torch.empty(shape, dtype=dtype)}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with translated_errors():
            dcp.load(target, storage_reader=_Reader(self.folder, self.found), planner=planner, no_dist=True)
        return target[self.prefix + name]


class _Reader(filesystem.FileSystemReader):
    """Reads tensors by metadata that have already been validated."""

    def __init__(self, folder: Path, index: metadata.Metadata):
        super().__init__(folder)
        self.found = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        return self.found
