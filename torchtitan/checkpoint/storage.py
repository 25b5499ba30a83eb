"""Write tensors to files and read them by torch.distributed.checkpoint (DCP), with safeguards that it lacks.

DCP reads its `.metadata` with plain `pickle`, which executes code in a hostile file; safe_unpickle.py reads it instead.
DCP's error type is not an `Exception`; it is caught only here.
Only tensors are ever written, so no entry needs unpickling.

DCP's ranks exchange plans, results and errors as pickles too, and unpickling can run the sender's code. `JsonExchange`
replaces this for the groups of `Peers`; other users of DCP in the process keep torch's exchange. Its items are lists of
plain fields, because rank 0 reads millions of them in a large run, and generic encoding would take minutes.
"""

import io
import json
import os
import queue
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan.checkpoint import safe_unpickle
from torchtitan.checkpoint.agreement import Peers, describe
from torchtitan.checkpoint.hashed_files import PARALLEL_FILES, HashedFile, map_in_threads
from torchtitan.checkpoint.layout import METADATA, CheckpointError, FileEntry, Manifest, TensorEntry, read_bytes
from torchtitan.core.files import open_file
from torchtitan.core.machine_errors import MachineError, is_of_the_machine
from torchtitan.core.progress_bar import progress_bar
from torchtitan.core.random_draws import local_part
from torchtitan.process import distributed
from torchtitan.torch_internals import distributed_checkpoint as internals

# a single process is a normal case here
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

Tensors = dict[str, torch.Tensor]
SMALLEST_PART = 64 << 20
"""Smallest share in bytes of each of a rank's files, if it writes several."""


def write_tensors(
    folder: Path, tensors: Tensors, staged: Mapping[str, torch.Tensor], peers: Peers, keep_plan: bool = False
) -> tuple[dict[str, TensorEntry], dict[str, FileEntry]]:
    """Write every rank's share, synced to disk. Return the names, dtypes and global shapes of all ranks' tensors, and
    this rank's files.

    If a name is in `staged`, that copy of this rank's part is written instead of the live tensor. `keep_plan`: cache
    the plan for the next save of these peers, which then only confirm that nothing has changed. The tensors must keep
    their dtypes. If a save fails, all ranks must call `forget_plans`, because otherwise their plans could differ.
    """
    writer = _ParallelWriter(
        folder,
        overwrite=False,
        # copying ahead from a GPU would open a context on GPU 0 in the background thread of every rank
        per_thread_copy_ahead=0 if staged else 10_000_000,
    )
    writer.max_files = PARALLEL_FILES if staged or all(t.device.type == "cpu" for t in tensors.values()) else 1
    with translated_errors():
        saved = dcp.save(
            tensors,
            storage_writer=writer,
            planner=_StagedPlanner(staged, peers.name if keep_plan else None),
            process_group=peers.group,
            no_dist=peers.group is None,
        )
    entries = _entries(saved)
    if missing := sorted(tensors.keys() - entries.keys()):
        raise CheckpointError(f"{missing[0]} was planned to be written and was not; nothing is published")
    return entries, writer.fs.entries


class _HashedFiles(filesystem.FileSystem):
    """The files that DCP writes on this rank. `entries`: size and checksum of each complete one, by its name."""

    def __init__(self) -> None:
        self.entries: dict[str, FileEntry] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", mode
        with HashedFile(Path(path)) as file:
            yield cast(io.IOBase, file)
        self.entries[Path(path).name] = FileEntry(file.size, file.sha256)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.entries[Path(new_path).name] = self.entries.pop(Path(path).name)


class _ParallelWriter(filesystem.FileSystemWriter):
    """Writes large shares to several files at a time.

    torch's own threads would lose the error of a file, and with it tensors that the index lists.
    """

    max_files = 1
    """Of a device's live tensors only one: the threads would open a context on GPU 0."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, sync_files=False, **options)  # HashedFile syncs them
        self.fs: _HashedFiles = _HashedFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        size = sum(map(internals.item_size, plan.items))
        self.thread_count = max(1, min(self.max_files, size // SMALLEST_PART))
        return super().write_data(plan, planner)

    def _write_data(
        self, planner: SavePlanner, file_queue: "queue.Queue[tuple[Path, str, list[WriteItem]]]"
    ) -> Future[list[WriteResult]]:
        results: queue.Queue[list[WriteResult]] = queue.Queue()

        def write_files() -> None:
            internals.write_files_from_queue(
                self.fs.create_stream,
                file_queue,
                results,
                planner,
                self.transforms,
                self.per_thread_copy_ahead,
                self.sync_files,
                self.thread_count,
                self.serialization_format,
            )

        if self.thread_count == 1:
            write_files()  # in the thread that has this rank's GPU
        else:
            map_in_threads(lambda number: write_files(), range(self.thread_count), self.thread_count)
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for part in results.queue for result in part])
        return future


def forget_plans(peers: Peers) -> None:
    """Clear the cached plans of these peers."""
    internals.forget_plans(peers.name)


def read_tensors(folder: Path, index: metadata.Metadata, tensors: Tensors, peers: Peers) -> None:
    """Fill `tensors` in place: each rank reads its part, from any number of ranks' files.

    `index`: the result of `read_metadata` for the folder.
    """
    size = sum(local_part(tensor)[0].nbytes for tensor in tensors.values())
    with translated_errors(), progress_bar(f"loading {folder.name}", size) as progress:
        dcp.load(
            tensors,
            storage_reader=CheckedReader(folder, index),
            planner=_ReportingPlanner(progress.update),
            process_group=peers.group,
            no_dist=peers.group is None,
        )


def read_metadata(folder: Path, manifest: Manifest) -> metadata.Metadata:
    """Read DCP's index of a checkpoint, without executing anything in it. Raises `CheckpointError`."""
    return safe_unpickle.read(read_bytes(folder / METADATA, safe_unpickle.LARGEST), manifest)


class _RetriedFiles(filesystem.FileSystem):
    """The files that DCP reads. Errors of the machine are retried."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "rb", mode
        with open_file(path) as file:
            yield cast(io.IOBase, file)


class CheckedReader(filesystem.FileSystemReader):
    """Reads tensors by an index that has already been validated."""

    def __init__(self, folder: Path, index: metadata.Metadata):
        super().__init__(folder)
        self.fs = _RetriedFiles()
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Return the checked index, also when DCP asks for the metadata of one rank after a first failure."""
        return self.index


class _ReportingPlanner(DefaultLoadPlanner):
    """Reports the number of bytes of each tensor, or piece of one, that was read."""

    def __init__(self, report: Callable[[int], object]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.report = report

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        self.report(tensor.nbytes)


class _StagedPlanner(DefaultSavePlanner):
    """Plans with the live tensors, which keep their shapes and meshes, and writes from the copies."""

    def __init__(self, staged: Mapping[str, torch.Tensor], name: str | None):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, enable_plan_caching=name is not None)
        if name is not None:
            self._cached_plans_key = name  # torch's default is the class name, which other jobs in the process share
        self.staged = staged

    def lookup_object(self, index: metadata.MetadataIndex) -> Any:
        return self.staged[index.fqn] if index.fqn in self.staged else super().lookup_object(index)


@contextmanager
def translated_errors() -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:
        reasons = {describe(failure) for failure, _ in error.failures.values()}
        ranks = ", ".join(map(str, sorted(error.failures)))
        of_the_machine = any(is_of_the_machine(failure) for failure, _ in error.failures.values())
        kind = MachineError if of_the_machine else CheckpointError
        raise kind(f"{'; '.join(sorted(reasons))} (on rank {ranks})") from error


def _entries(index: metadata.Metadata) -> dict[str, TensorEntry]:
    entries = {}
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, metadata.TensorStorageMetadata):
            raise CheckpointError(f"{METADATA}: {name} is not a tensor")
        entries[name] = TensorEntry(str(entry.properties.dtype).removeprefix("torch."), list(entry.size))
    return entries


# The exchange of plans between ranks as JSON

Plain = Any


class JsonExchange(internals.RankExchange):
    """DCP's exchange between ranks. Rank 0 is the coordinator."""

    def broadcast_object(self, object: Any) -> Any:
        plain = distributed.broadcast_json(encode_plan(object) if self.is_coordinator else None, self.group)
        return object if self.is_coordinator else decode_plan(plain)

    def gather_object(self, object: Any) -> list[Any] | None:
        values = distributed.gather_json(encode_plan(object), self.group)
        return None if values is None else [decode_plan(value) for value in values]

    def all_gather_object(self, object: Any) -> list[Any]:
        return [decode_plan(value) for value in distributed.all_gather_json(encode_plan(object), self.group)]

    def scatter_object(self, object_list: list[Any] | None) -> Any:
        values = None if object_list is None else [encode_plan(value) for value in object_list]
        plain = distributed.scatter_json(values, self.group)
        return decode_plan(plain) if object_list is None else object_list[0]


def make_exchange(group: dist.ProcessGroup | None, use_dist: bool, coordinator_rank: int) -> internals.RankExchange:
    """Return the exchange for a save or a load: the JSON exchange for the groups of `Peers`, otherwise torch's."""
    ours = use_dist and group is not None and group.group_desc.startswith("checkpoint: ")
    return (JsonExchange if ours else internals.RankExchange)(group, use_dist, coordinator_rank)


def encode_plan(value: Any) -> Plain:
    """Encode an object of DCP's planners and storage as a plain value. Raises `TypeError` for any other object."""
    if value is None:
        return None
    if isinstance(value, SavePlan):
        prefix = None if value.storage_data is None else value.storage_data.prefix
        if value.planner_data is None:
            return ["save", list(map(_write_item, value.items)), prefix, value.usable]
    elif isinstance(value, LoadPlan):
        if value.planner_data is None and value.storage_data is None:
            return ["load", list(map(_read_item, value.items))]
    elif isinstance(value, Metadata):
        entries = cast(dict[str, TensorStorageMetadata], value.state_dict_metadata)
        return ["metadata", {name: [str(entry.properties.dtype), entry.size] for name, entry in entries.items()}]
    elif isinstance(value, CheckpointException):
        return ["failed", str(value.args[0]), [[rank, *_plain(e)] for rank, (e, _) in value.failures.items()]]
    elif internals.is_wrapped_exception(value):
        return ["failure", *_plain(value[0])]
    elif isinstance(value, list) and all(isinstance(result, WriteResult) for result in value):
        return ["written", list(map(_result, value))]
    raise TypeError(f"{type(value).__name__} is nothing that ranks exchange for a checkpoint")


def decode_plan(plain: Plain) -> Any:
    """Invert `encode_plan`. Metadata come back without file locations, and errors only as their texts."""
    if plain is None:
        return None
    kind, *fields = plain
    if kind == "save":
        items, prefix, usable = fields
        storage_data = None if prefix is None else internals.StoragePrefix(prefix)
        return SavePlan([_read_write_item(*item) for item in items], storage_data=storage_data, usable=usable)
    if kind == "load":
        return LoadPlan([_read_read_item(*item) for item in fields[0]])
    if kind == "metadata":
        return Metadata(
            {
                name: TensorStorageMetadata(TensorProperties(_dtype(dtype)), torch.Size(size), [])
                for name, (dtype, size) in fields[0].items()
            }
        )
    if kind == "failed":
        return CheckpointException(fields[0], {rank: _failure(*plain) for rank, *plain in fields[1]})
    if kind == "failure":
        return _failure(*fields)
    return [_read_result(*result) for result in fields[0]]


def _plain(error: BaseException) -> list[Plain]:
    return [describe(error), is_of_the_machine(error)]


def _failure(text: str, of_the_machine: bool) -> tuple[BaseException, traceback.StackSummary]:
    return (MachineError if of_the_machine else CheckpointError)(text), traceback.StackSummary()


def _index(index: MetadataIndex) -> list[Plain]:
    return [index.fqn, index.offset, index.index]


def _write_item(item: WriteItem) -> list[Plain]:
    data = item.tensor_data
    if data is None:
        raise TypeError(f"{item.index.fqn} is no tensor")
    chunk, properties = data.chunk, data.properties
    dtype, flags = str(properties.dtype), [properties.requires_grad, properties.pin_memory]
    return [_index(item.index), item.type.name, chunk.offsets, chunk.sizes, data.size, dtype, flags]


def _read_write_item(
    index: list[Plain], kind: str, offsets: list[int], sizes: list[int], size: list[int], dtype: str, flags: list[bool]
) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    properties = TensorProperties(_dtype(dtype), requires_grad=flags[0], pin_memory=flags[1])
    data = TensorWriteData(chunk, properties, torch.Size(size))
    return WriteItem(MetadataIndex(*index), WriteItemType[kind], tensor_data=data)


def _read_item(item: ReadItem) -> list[Plain]:
    places = [item.dest_offsets, item.storage_offsets, item.lengths]
    return [item.type.name, _index(item.dest_index), _index(item.storage_index), places]


def _read_read_item(kind: str, target: list[Plain], stored: list[Plain], places: list[list[int]]) -> ReadItem:
    target_offsets, stored_offsets, lengths = map(torch.Size, places)
    return ReadItem(
        LoadItemType[kind], MetadataIndex(*target), target_offsets, MetadataIndex(*stored), stored_offsets, lengths
    )


def _result(result: WriteResult) -> list[Plain]:
    info: internals.StorageInfo = result.storage_data
    place = [info.relative_path, info.offset, info.length, info.transform_descriptors]
    return [_index(result.index), result.size_in_bytes, place]


def _read_result(index: list[Plain], size: int, place: list[Plain]) -> WriteResult:
    return WriteResult(MetadataIndex(*index), size, internals.StorageInfo(*place))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"a rank has sent {json.dumps(name)} as the type of a tensor")
    return dtype


internals.replace_rank_exchange(make_exchange)
