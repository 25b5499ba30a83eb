"""Tensors to files and back by torch.distributed.checkpoint (DCP), with what it leaves open closed.

Notable: DCP reads its `.metadata` by plain `pickle`, which runs whatever a stranger put there; here an unpickler that
knows only DCP's own record types reads it, and what comes out must agree with our manifest. DCP's error type is no
`Exception`; it is caught here and nowhere else. Only tensors are ever written, so no entry needs unpickling.
"""

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import EnumMeta
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from torchtitan.checkpoint.agreement import Peers, describe
from torchtitan.checkpoint.layout import METADATA, CheckpointError, Manifest, TensorEntry

# a single process is an ordinary case here
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

Tensors = dict[str, torch.Tensor]

_RECORDS: dict[tuple[str, str], Any] = {
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    ("pathlib", "WindowsPath"): PureWindowsPath,
    ("pathlib._local", "WindowsPath"): PureWindowsPath,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    **{
        ("torch.distributed.checkpoint.metadata", kind.__name__): kind
        for kind in (
            metadata.Metadata,
            metadata.MetadataIndex,
            metadata.StorageMeta,
            metadata.TensorStorageMetadata,
            metadata.ChunkStorageMetadata,
            metadata.TensorProperties,
            metadata._MEM_FORMAT_ENCODING,
        )
    },
}
"""All that torch 2.13 writes into the metadata of a state dict of tensors."""
_ENUMS = [record for record in _RECORDS.values() if isinstance(record, EnumMeta)]


def _enum_member(enum: Any, name: str) -> Any:
    """What Python 3.11.0 to 3.11.3 write for an enum's member is getattr(enum, name); nothing else may be got by it."""
    if not any(enum is known for known in _ENUMS) or name not in enum.__members__:
        raise CheckpointError(f"{METADATA} asks for {name} of {enum}, which no checkpoint needs: not opened")
    return enum[name]


class _RecordsUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        record = _enum_member if (module, name) == ("builtins", "getattr") else _RECORDS.get((module, name))
        if record is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            record = getattr(torch, name)
        if record is None:
            raise CheckpointError(f"{METADATA} asks for {module}.{name}, which no checkpoint needs: not opened")
        return record


def _load_records(file: BinaryIO) -> Any:
    """Pickle can also set attributes of what it has found, so of the record classes themselves: that is undone and
    refused, or the process would go on with a stranger's `Path.name`.
    """
    classes = [record for record in _RECORDS.values() if isinstance(record, type)]
    before = [dict(vars(each)) for each in classes]
    changed = []
    try:
        return _RecordsUnpickler(file).load()
    finally:
        for each, attributes in zip(classes, before, strict=True):
            for name in {*vars(each), *attributes}:
                if vars(each).get(name) is not attributes.get(name):
                    changed.append(each.__name__)
                    setattr(each, name, attributes[name]) if name in attributes else delattr(each, name)
        if changed:
            raise CheckpointError(f"{METADATA} changes {changed[0]}, which no checkpoint needs: not opened")


def write_tensors(folder: Path, tensors: Tensors, staged: Tensors, peers: Peers) -> dict[str, TensorEntry]:
    """Write every rank's share, synced to disk; the names, dtypes and global shapes of all ranks' tensors.

    Where a name is in `staged`, that copy of this rank's part is written instead of the live tensor.
    """
    writer = filesystem.FileSystemWriter(
        folder,
        overwrite=False,
        # copying ahead from a GPU would open a context on GPU 0 in the background thread of every rank
        per_thread_copy_ahead=0 if staged else 10_000_000,
    )
    with _translated_errors():
        saved = dcp.save(
            tensors,
            storage_writer=writer,
            planner=_StagedPlanner(staged),
            process_group=peers.group,
            no_dist=peers.group is None,
        )
    return _entries(saved)


def files_of_rank(folder: Path, rank: int) -> list[str]:
    """Names of the files that `write_tensors` made on this rank."""
    names = [path.name for path in folder.glob(f"__{rank}_*{filesystem.DEFAULT_SUFFIX}")]
    return sorted(names) + ([METADATA] if rank == 0 else [])


def read_tensors(folder: Path, manifest: Manifest, tensors: Tensors, peers: Peers) -> None:
    """Fill `tensors` in place, each rank reading what it holds, however many ranks wrote the files."""
    with _translated_errors():
        dcp.load(
            tensors,
            storage_reader=_CheckedReader(folder, manifest),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=peers.group,
            no_dist=peers.group is None,
        )


def read_metadata(folder: Path, manifest: Manifest) -> metadata.Metadata:
    """DCP's index of a checkpoint, without executing anything in it. Raises `CheckpointError`."""
    try:
        with (folder / METADATA).open("rb") as file:
            found = _load_records(file)
        tensors = _entries(found)
        places = {(index.fqn, place.relative_path) for index, place in found.storage_data.items()}
        plain = all(place.transform_descriptors is None for place in found.storage_data.values())
    except CheckpointError:
        raise
    except Exception as error:  # the bytes of a stranger: any type, from anywhere in the records' own code
        raise CheckpointError(f"{METADATA} is damaged ({describe(error)})") from None
    if tensors != manifest.tensors:
        raise CheckpointError(f"{METADATA} and the manifest list different tensors")
    if not plain or any(name not in tensors or file not in manifest.files for name, file in places):
        raise CheckpointError(f"{METADATA} points outside the checkpoint's own files and tensors")
    return found


class _CheckedReader(filesystem.FileSystemReader):
    def __init__(self, folder: Path, manifest: Manifest):
        super().__init__(folder)
        self.manifest = manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Also when DCP, having failed once, asks for the metadata of one rank: there is one index and no other."""
        return read_metadata(self.path, self.manifest)


class _StagedPlanner(DefaultSavePlanner):
    """Plans by the live tensors, whose shapes and meshes do not change, and writes from the copies."""

    def __init__(self, staged: Tensors):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.staged = staged

    def lookup_object(self, index: metadata.MetadataIndex) -> Any:
        return self.staged[index.fqn] if index.fqn in self.staged else super().lookup_object(index)


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:
        reasons = {describe(failure) for failure, _ in error.failures.values()}
        ranks = ", ".join(map(str, sorted(error.failures)))
        raise CheckpointError(f"{'; '.join(sorted(reasons))} (on rank {ranks})") from error


def _entries(found: metadata.Metadata) -> dict[str, TensorEntry]:
    entries = {}
    for name, entry in found.state_dict_metadata.items():
        if not isinstance(entry, metadata.TensorStorageMetadata):
            raise CheckpointError(f"{METADATA}: {name} is not a tensor")
        entries[name] = TensorEntry(str(entry.properties.dtype).removeprefix("torch."), list(entry.size))
    return entries
