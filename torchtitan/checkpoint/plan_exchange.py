"""Exchange the plans of torch.distributed.checkpoint (DCP) between ranks as JSON.

DCP sends plans, results and errors as pickles, and unpickling can run the sender's code. This module replaces its
exchange for the groups of `Peers`; other users of DCP in the process keep torch's. Items are lists of plain fields,
because rank 0 reads millions of them in a large run, and generic encoding would take minutes.
"""

import json
import traceback
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException, _is_wrapped_exception
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
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
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from torchtitan.checkpoint.agreement import describe
from torchtitan.checkpoint.layout import CheckpointError
from torchtitan.process import distributed

Plain = Any


class JsonExchange(_DistWrapper):
    """DCP's exchange between ranks. Rank 0 is the coordinator."""

    def broadcast_object(self, object: Any) -> Any:
        plain = distributed.broadcast_json(encode(object) if self.is_coordinator else None, self.group)
        return object if self.is_coordinator else decode(plain)

    def gather_object(self, object: Any) -> list[Any] | None:
        values = distributed.gather_json(encode(object), self.group)
        return None if values is None else [decode(value) for value in values]

    def all_gather_object(self, object: Any) -> list[Any]:
        return [decode(value) for value in distributed.all_gather_json(encode(object), self.group)]

    def scatter_object(self, object_list: list[Any] | None) -> Any:
        values = None if object_list is None else [encode(value) for value in object_list]
        plain = distributed.scatter_json(values, self.group)
        return decode(plain) if object_list is None else object_list[0]


def exchange_of(group: dist.ProcessGroup | None, use_dist: bool, coordinator_rank: int) -> _DistWrapper:
    """Return the exchange for a save or a load: the JSON exchange for the groups of `Peers`, otherwise torch's."""
    ours = use_dist and group is not None and group.group_desc.startswith("checkpoint: ")
    return (JsonExchange if ours else _DistWrapper)(group, use_dist, coordinator_rank)


def install() -> None:
    """Make DCP's `save` and `load` use `exchange_of`."""
    for module in (state_dict_saver, state_dict_loader):
        module._DistWrapper = exchange_of  # type: ignore[attr-defined, assignment]


def encode(value: Any) -> Plain:
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
        return ["failed", str(value.args[0]), [[rank, describe(e)] for rank, (e, _) in value.failures.items()]]
    elif _is_wrapped_exception(value):
        return ["failure", describe(value[0])]
    elif isinstance(value, list) and all(isinstance(result, WriteResult) for result in value):
        return ["written", list(map(_result, value))]
    raise TypeError(f"{type(value).__name__} is nothing that ranks exchange for a checkpoint")


def decode(plain: Plain) -> Any:
    """Invert `encode`. Metadata come back without file locations, and errors only as their texts."""
    if plain is None:
        return None
    kind, *fields = plain
    if kind == "save":
        items, prefix, usable = fields
        storage_data = None if prefix is None else _StoragePrefix(prefix)
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
        return CheckpointException(fields[0], {rank: _failure(text) for rank, text in fields[1]})
    if kind == "failure":
        return _failure(fields[0])
    return [_read_result(*result) for result in fields[0]]


def _failure(text: str) -> tuple[BaseException, traceback.StackSummary]:
    return CheckpointError(text), traceback.StackSummary()


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
    info: _StorageInfo = result.storage_data
    place = [info.relative_path, info.offset, info.length, info.transform_descriptors]
    return [_index(result.index), result.size_in_bytes, place]


def _read_result(index: list[Plain], size: int, place: list[Plain]) -> WriteResult:
    return WriteResult(MetadataIndex(*index), size, _StorageInfo(*place))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"a rank has sent {json.dumps(name)} as the type of a tensor")
    return dtype
