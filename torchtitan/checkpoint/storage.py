"""Write tensors to files and read them by torch.distributed.checkpoint (DCP), with safeguards that it lacks.

DCP reads its `.metadata` with plain `pickle`, which executes code in a hostile file; safe_unpickle.py reads it instead.
Ranks exchange their plans as JSON (plan_exchange.py). DCP's error type is not an `Exception`; it is caught only here.
Only tensors are ever written, so no entry needs unpickling.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem, SavePlanner

from torchtitan.checkpoint import plan_exchange, safe_unpickle
from torchtitan.checkpoint.agreement import Peers, describe
from torchtitan.checkpoint.layout import METADATA, CheckpointError, Manifest, TensorEntry, read_bytes
from torchtitan.core.initialization import local_part
from torchtitan.core.progress_bar import progress_bar

# a single process is a normal case here
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

plan_exchange.install()

Tensors = dict[str, torch.Tensor]


def write_tensors(
    folder: Path, tensors: Tensors, staged: Mapping[str, torch.Tensor], peers: Peers, keep_plan: bool = False
) -> dict[str, TensorEntry]:
    """Write every rank's share, synced to disk. Return the names, dtypes and global shapes of all ranks' tensors.

    If a name is in `staged`, that copy of this rank's part is written instead of the live tensor. `keep_plan`: cache
    the plan for the next save of these peers, which then only confirm that nothing has changed. The tensors must keep
    their dtypes. If a save fails, all ranks must call `forget_plans`, because otherwise their plans could differ.
    """
    writer = filesystem.FileSystemWriter(
        folder,
        overwrite=False,
        # copying ahead from a GPU would open a context on GPU 0 in the background thread of every rank
        per_thread_copy_ahead=0 if staged else 10_000_000,
    )
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
    return entries


def forget_plans(peers: Peers) -> None:
    """Clear the cached plans of these peers."""
    for cache in (
        SavePlanner._cached_save_plan,
        SavePlanner._cached_final_save_plan,
        SavePlanner._cached_all_plans,
        SavePlanner._cached_global_plan,
        SavePlanner._cached_metadata,
    ):
        cache.pop(peers.name, None)


def files_of_rank(folder: Path, rank: int) -> list[str]:
    """Return the names of the files that `write_tensors` wrote on this rank."""
    names = [path.name for path in folder.glob(f"__{rank}_*{filesystem.DEFAULT_SUFFIX}")]
    return sorted(names) + ([METADATA] if rank == 0 else [])


def read_tensors(folder: Path, index: metadata.Metadata, tensors: Tensors, peers: Peers) -> None:
    """Fill `tensors` in place: each rank reads its part, from any number of ranks' files.

    `index`: the result of `read_metadata` for the folder.
    """
    size = sum(local_part(tensor)[0].nbytes for tensor in tensors.values())
    with translated_errors(), progress_bar(f"loading {folder.name}", size) as progress:
        dcp.load(
            tensors,
            storage_reader=_CheckedReader(folder, index),
            planner=_ToldPlanner(progress.update),
            process_group=peers.group,
            no_dist=peers.group is None,
        )


def read_metadata(folder: Path, manifest: Manifest) -> metadata.Metadata:
    """Read DCP's index of a checkpoint, without executing anything in it. Raises `CheckpointError`."""
    return safe_unpickle.read(read_bytes(folder / METADATA, safe_unpickle.LARGEST), manifest)


class _CheckedReader(filesystem.FileSystemReader):
    def __init__(self, folder: Path, index: metadata.Metadata):
        super().__init__(folder)
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Return the checked index, also when DCP asks for the metadata of one rank after a first failure."""
        return self.index


class _ToldPlanner(DefaultLoadPlanner):
    """Reports the number of bytes of each tensor, or piece of one, that was read."""

    def __init__(self, tell: Callable[[int], object]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.tell = tell

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        self.tell(tensor.nbytes)


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
        raise CheckpointError(f"{'; '.join(sorted(reasons))} (on rank {ranks})") from error


def _entries(index: metadata.Metadata) -> dict[str, TensorEntry]:
    entries = {}
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, metadata.TensorStorageMetadata):
            raise CheckpointError(f"{METADATA}: {name} is not a tensor")
        entries[name] = TensorEntry(str(entry.properties.dtype).removeprefix("torch."), list(entry.size))
    return entries
