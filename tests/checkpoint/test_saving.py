"""Messages between ranks in a save and a load, in addition to tensors' files; they must scale to thousands of ranks."""

import json
import random
from collections import Counter
from io import BytesIO
from pathlib import Path

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.api import CheckpointException, _is_wrapped_exception, _wrap_exception
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

from tests.support.checkpoint_job import Job, TinyModel, rank
from tests.support.pool import run_ranks
from torchtitan.checkpoint import CheckpointError, agreement, layout, storage
from torchtitan.checkpoint.hashed_files import sha256_of
from torchtitan.process import distributed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SMALL = 1500
"""Bytes that a rank may send: names and checksums of its files, but no tensor names or random states."""


class CountingDistributed:
    """Replaces torchtitan.process.distributed in one module and counts the bytes that this rank sends, by function."""

    def __init__(self):
        self.given = Counter()

    def __getattr__(self, name):
        function = getattr(distributed, name)

        def call(value, *args):
            if not name.startswith(("broadcast", "scatter")) or rank() == 0:
                self.given[name] += len(json.dumps(value))
            return function(value, *args)

        return call


def sent_bytes(folder: Path, layers: int) -> list[tuple[Counter, Counter]]:
    """Count bytes sent by the project's code and by torch's planner in two saves and a load."""
    job = Job(folder, "fsdp", TinyModel(layers=layers), interval=1, verify=False, keep_latest_k=0)
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        for action in (lambda: job.train(1), lambda: job.train(1), job.checkpointer.load):
            own_counter, storage_counter = CountingDistributed(), CountingDistributed()
            patch.setattr(agreement, "distributed", own_counter)
            patch.setattr(storage, "distributed", storage_counter)
            action()
            counts.append((own_counter.given, storage_counter.given))
    return counts


def test_messages_do_not_grow_with_model_or_state(tmp_path):
    for bytes_by_rank in (
        run_ranks(2, sent_bytes, tmp_path / "small", 2),
        run_ranks(2, sent_bytes, tmp_path / "large", 20),
    ):
        for saves in bytes_by_rank:
            for ours, _ in saves[:2]:
                assert "all_gather_json" not in ours
                assert 0 < ours["gather_json"] < SMALL
                assert ours["broadcast_json"] < SMALL
            load, _ = saves[2]
            assert "gather_json" not in load and load["broadcast_json"] < SMALL


def without_pickles(folder: Path) -> tuple[int, str]:
    """Save, load, and fail to load on all ranks, while pickling between ranks is forbidden."""

    def refuse(*args):
        raise AssertionError("a pickle is sent")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_object_to_tensor", "_tensor_to_object"):
            patch.setattr(distributed_c10d, name, refuse)
        job = Job(folder, "fsdp")
        job.train(2)
        step = Job(folder, "fsdp").checkpointer.load()
        Job(folder, "fsdp").train(1)
        return step, of_another_width(folder)


def test_ranks_send_no_pickles(tmp_path):
    for step, text in run_ranks(2, without_pickles, tmp_path):
        assert step == 2 and "does not fit" in text


def test_plans_survive_serialization():
    """Plans of a shard, of a full tensor and each kind of error; nothing else is sent."""
    size = torch.Size([8, 2])
    chunk = ChunkStorageMetadata(torch.Size([4, 0]), torch.Size([4, 2]))
    tensor = TensorProperties(torch.bfloat16, requires_grad=True)
    index = MetadataIndex("model.w", torch.Size([4, 0]), 1)
    write = WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, tensor, size))
    read = ReadItem(LoadItemType.TENSOR, index, chunk.offsets, MetadataIndex("model.w"), torch.Size([0, 0]), size)
    result = WriteResult(index, 32, _StorageInfo("__1_0.distcp", 64, 32))
    for value in (
        *(None, [], SavePlan([write], _StoragePrefix("__1_")), SavePlan([], usable=False), LoadPlan([read])),
        [result, result],
    ):
        arrived = storage.decode_plan(json.loads(json.dumps(storage.encode_plan(value))))
        assert arrived == value
    arrived = storage.decode_plan(json.loads(json.dumps(storage.encode_plan(SavePlan([write])))))
    assert isinstance(arrived.items[0].tensor_data.size, torch.Size) and arrived.items[0].index.index == 1
    entry = TensorStorageMetadata(tensor, size, [chunk])
    arrived = storage.decode_plan(json.loads(json.dumps(storage.encode_plan(Metadata({"model.w": entry})))))
    received = arrived.state_dict_metadata["model.w"]
    assert (received.size, received.properties.dtype) == (size, torch.bfloat16)
    failure = _wrap_exception(OSError(28, "No space left on device"))
    for value in (failure, CheckpointException("write", {1: failure})):
        arrived = storage.decode_plan(json.loads(json.dumps(storage.encode_plan(value))))
        error, trace = arrived if value is failure else arrived.failures[1]
        assert str(error) == "No space left on device" and _is_wrapped_exception((error, trace))
    for value in (object(), BytesIO(), SavePlan([WriteItem(index, WriteItemType.BYTE_IO)])):
        with pytest.raises(TypeError):
            storage.encode_plan(value)
    with pytest.raises(CheckpointError, match='a rank has sent "torch.load" as the type of a tensor'):
        storage._dtype("torch.load")


def test_a_plan_is_sent_once(tmp_path):
    for first, second, _ in run_ranks(2, sent_bytes, tmp_path, 20):
        # the rest lists the written files, for the index
        assert first[1]["gather_json"] > 2 * second[1]["gather_json"], (first[1], second[1])


def saved(folder: Path) -> None:
    job = Job(folder, "fsdp")
    job.train(2)


def resumed(folder: Path) -> tuple[bool, float]:
    job = Job(folder, "fsdp")
    assert job.checkpointer.load() == 2
    (local_state,) = (state for number, state in enumerate(job.resumed_with[1]) if number == rank())
    return "rng" in local_state, random.random()


def test_each_rank_saves_its_random_state_in_its_own_file(tmp_path):
    run_ranks(2, saved, tmp_path)
    (folder,) = tmp_path.iterdir()
    state = json.loads((folder / "state.json").read_text())
    assert [set(of_rank) for of_rank in state["ranks"]] == [{"dataloader"}] * 2
    assert {"rank_0.json", "rank_1.json"} <= layout.read_manifest(folder).files.keys()
    answers = run_ranks(2, resumed, tmp_path)
    assert [has for has, _ in answers] == [True, True]
    # as until 2026-11: all in state.json
    for number, of_rank in enumerate(state["ranks"]):
        of_rank |= json.loads((folder / f"rank_{number}.json").read_text())
        (folder / f"rank_{number}.json").unlink()
    (folder / "state.json").write_text(layout.dump_json(state))
    seal(folder)
    assert run_ranks(2, resumed, tmp_path) == answers


def seal(folder: Path) -> None:
    """Make the manifest list the current files."""
    manifest = layout.read_manifest(folder)
    names = [name for name in manifest.files if (folder / name).exists()]
    entries = {n: layout.FileEntry((folder / n).stat().st_size, sha256_of(folder / n)) for n in names}
    manifest.files.clear()
    manifest.files.update(entries)
    (folder / "manifest.json").write_text(layout.manifest_text(manifest))


def refused(folder: Path) -> str:
    job = Job(folder, "fsdp")
    with pytest.raises(CheckpointError) as caught:
        job.checkpointer.load()
    return str(caught.value)


def test_a_damaged_file_of_a_rank_is_found_by_all(tmp_path):
    run_ranks(2, saved, tmp_path)
    (path,) = tmp_path.glob("*/rank_1.json")
    path.write_text(path.read_text().replace("a", "b"))
    assert all("damaged: rank_1.json" in text for text in run_ranks(2, refused, tmp_path))


def of_another_width(folder: Path) -> str:
    job = Job(folder, "fsdp", TinyModel(layers=2 + rank()))
    with pytest.raises(CheckpointError) as caught:
        job.checkpointer.load()
    return str(caught.value)


def test_a_name_that_one_rank_lacks_is_reported_by_all(tmp_path):
    """Each rank knows only the names that it loads."""
    run_ranks(2, saved, tmp_path)
    for text in run_ranks(2, of_another_width, tmp_path):
        assert "does not fit this job: it lacks model.layers.2.0.bias" in text
