"""Opening a checkpoint executes none of its content and reads no files outside of it."""

import dataclasses
import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as DCP
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tests.support.checkpoint_job import Job, TinyModel
from torchtitan.checkpoint import (
    CheckpointError,
    NothingLoadable,
    layout,
    load_model_for_inference,
    safe_unpickle,
    storage,
)
from torchtitan.checkpoint.hashed_files import sha256_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Payload:
    """Unpickled by plain pickle, makes a folder."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def planted(tmp_path):
    return tmp_path / "planted"


@pytest.fixture
def folder(tmp_path):
    Job(tmp_path / "run").train(2)
    return tmp_path / "run" / "step-00000002"


def seal(folder: Path) -> None:
    """Make the manifest agree with the changed files, as an attacker would."""
    manifest = layout.read_manifest(folder)
    files = {
        path.name: layout.FileEntry(path.stat().st_size, sha256_of(path))
        for path in folder.iterdir()
        if path.name != layout.MANIFEST
    }
    (folder / layout.MANIFEST).write_text(layout.manifest_text(dataclasses.replace(manifest, files=files)))


def assert_refused(folder: Path, planted: Path, reason: str) -> None:
    seal(folder)
    with pytest.raises(CheckpointError, match=reason):
        load_model_for_inference(folder, TinyModel())
    with pytest.raises(NothingLoadable, match=reason):
        Job(folder.parent).checkpointer.load()
    assert not planted.exists()


def test_a_payload_in_the_metadata_is_refused_and_not_run(folder, planted):
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(planted)))
    assert_refused(folder, planted, "asks for posix.mkdir, which no checkpoint needs")
    with pytest.raises(AttributeError):  # the control: torch's own reader runs it, then finds the result odd
        FileSystemReader(folder).read_metadata()
    assert planted.exists()


def test_a_payload_inside_good_metadata_is_refused(folder, planted):
    metadata = FileSystemReader(folder).read_metadata()
    metadata.planner_data = Payload(planted)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_refused(folder, planted, "asks for posix.mkdir")


def test_the_metadata_of_a_single_rank_is_never_read(folder, planted):
    """torch falls back to it when the common one fails."""
    (folder / "__0.metadata").write_bytes(pickle.dumps(Payload(planted)))
    index = storage.read_metadata(folder, layout.read_manifest(folder))
    assert storage.CheckedReader(folder, index).read_metadata(rank=0) is index
    (folder / ".metadata").write_bytes(b"nonsense")
    assert_refused(folder, planted, ".metadata is damaged")
    assert not planted.exists()


def test_an_entry_that_is_no_tensor_is_refused_and_not_unpickled(folder, planted, tmp_path):
    tensors = {name: tensor for name, tensor in TinyModel().state_dict().items()}
    dcp.save({**tensors, "evil": Payload(planted)}, checkpoint_id=tmp_path / "plain")
    shutil.rmtree(planted, ignore_errors=True)
    for name in (".metadata", "__0_0.distcp"):
        shutil.copy(tmp_path / "plain" / name, folder / name)
    assert_refused(folder, planted, "BytesStorageMetadata|evil is not a tensor")


def test_a_payload_in_a_shard_is_refused_and_not_run(folder, planted, tmp_path):
    """Every tensor's bytes are replaced by a pickle of the payload, at the offset in the metadata."""
    torch.save(Payload(planted), tmp_path / "evil.pt")
    evil = (tmp_path / "evil.pt").read_bytes()
    metadata = FileSystemReader(folder).read_metadata()
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, len(evil)
    (folder / "__0_0.distcp").write_bytes(evil)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(folder)
    with pytest.raises(CheckpointError, match="Weights only load failed"):
        load_model_for_inference(folder, TinyModel())
    assert not planted.exists()


@pytest.mark.parametrize("path", ["../outside.distcp", "/etc/passwd", "unlisted.distcp"])
def test_metadata_that_points_outside_is_refused(folder, planted, path):
    metadata = FileSystemReader(folder).read_metadata()
    next(iter(metadata.storage_data.values())).relative_path = path
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_refused(folder, planted, "points outside")


def test_metadata_with_stream_transforms_is_refused(folder, planted):
    metadata = FileSystemReader(folder).read_metadata()
    next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.zstd"]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_refused(folder, planted, "points outside")


def test_metadata_and_manifest_must_list_the_same_tensors(folder, planted):
    metadata = FileSystemReader(folder).read_metadata()
    metadata.state_dict_metadata["model.more"] = next(iter(metadata.state_dict_metadata.values()))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_refused(folder, planted, "list different tensors")


@pytest.mark.parametrize("value", ["text", 5, None, [], torch.Size([1])])
def test_metadata_that_is_something_else_is_refused(folder, planted, value):
    (folder / ".metadata").write_bytes(pickle.dumps(value))
    assert_refused(folder, planted, ".metadata is damaged")


@pytest.mark.parametrize("name", ["load", "os.system", "hub", "__class__", "float32.__class__"])
def test_the_torch_module_gives_away_only_its_dtypes(folder, planted, name):
    (folder / ".metadata").write_bytes(f"ctorch\n{name}\n.".encode())
    assert_refused(folder, planted, "which no checkpoint needs")


def test_the_records_allowed_are_those_that_torch_writes(folder):
    """Re-collected on every torch that the tests run on: a new record type shows up here and not at a user's."""
    requested = set()

    class Collecting(pickle.Unpickler):
        def find_class(self, module, name):
            requested.add((module, name))
            return super().find_class(module, name)

    with (folder / ".metadata").open("rb") as file:
        Collecting(file).load()
    dtypes = {(module, name) for module, name in requested if module == "torch" and name != "Size"}
    assert requested - dtypes <= safe_unpickle.ALLOWED_NAMES
    assert dtypes == {("torch", "float32")}


def test_nothing_of_the_state_is_executed(folder):
    state = json.loads((folder / "state.json").read_text())
    assert set(state) == {"step", "trainer", "ranks", "optimizer", "versions"}
    assert not list(folder.glob("*.pkl")) and not list(folder.glob("*.pt"))


class AttributeOf:
    """Pickles as a call of getattr, like an enum's member under Python 3.11.0 to 3.11.3."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return getattr, self.arguments


@pytest.mark.parametrize(
    "arguments",
    [
        (DCP._MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"),
        (DCP._MEM_FORMAT_ENCODING, "__class__"),
        (DCP.Metadata, "__init__"),
        (torch.Size, "__subclasses__"),
    ],
)
def test_no_attribute_is_got(arguments):
    """An enum's member, as some Pythons write it, is a record like any other."""
    loaded = safe_unpickle._SafeUnpickler(io.BytesIO(pickle.dumps(AttributeOf(*arguments)))).load()
    assert isinstance(loaded, safe_unpickle._Record) and loaded.kind == ("builtins", "getattr")


def test_metadata_cannot_change_the_classes_it_is_made_of(folder, planted):
    """Opcodes of pickle: find Metadata, set its attribute `planted`."""
    text = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x07\x00\x00\x00planted"
    text += b"X\x04\x00\x00\x00evils\x86b."
    (folder / ".metadata").write_bytes(text)
    assert_refused(folder, planted, "changes Metadata")
    assert not hasattr(DCP.Metadata, "planted")


def test_what_is_read_is_what_torch_reads(folder):
    expected, ours = (
        FileSystemReader(folder).read_metadata(),
        storage.read_metadata(folder, layout.read_manifest(folder)),
    )
    assert ours.state_dict_metadata == expected.state_dict_metadata
    assert ours.storage_data == expected.storage_data


@pytest.mark.parametrize(
    "text",
    [
        b"\x80\x04}()" + 60 * b"2\x86" + b"K\x01u.",
        b"\x80\x04})" + 60 * b"2\x86" + b"K\x01s.",
        b"\x80\x04\x8f()" + 60 * b"2\x86" + b"\x90.",
        b"\x80\x04()" + 60 * b"2\x86" + b"K\x01d.",
    ],
    ids=["items", "item", "set", "table"],
)
def test_a_tuple_that_doubles_itself_is_refused_at_once(folder, planted, text):
    """An empty tuple, put into a pair with itself sixty times. To be a key, it would be hashed 2^60 times."""
    (folder / ".metadata").write_bytes(text)
    assert_refused(folder, planted, "which no checkpoint needs|damaged")


def test_records_that_hold_each_other_are_not_compared(folder, planted):
    """Records that contain each other serve as the name of an index."""
    metadata = FileSystemReader(folder).read_metadata()
    nested = ()
    for _ in range(60):
        nested = (nested, nested)
    index, place = next(iter(metadata.storage_data.items()))
    place.relative_path = nested
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_refused(folder, planted, "a tuple in the place of a str")


def first_tensor(metadata, dimensions=2):
    return next(name for name, entry in metadata.state_dict_metadata.items() if len(entry.size) == dimensions)


def without_a_chunk(metadata):
    metadata.state_dict_metadata[first_tensor(metadata)].chunks.clear()


def half_a_chunk(metadata):
    (chunk,) = metadata.state_dict_metadata[first_tensor(metadata)].chunks
    chunk.sizes = torch.Size([chunk.sizes[0] - 1, *chunk.sizes[1:]])


def twice_the_first_half(metadata):
    entry = metadata.state_dict_metadata[first_tensor(metadata)]
    rows = entry.size[0] // 2
    assert 2 * rows < entry.size[0] or rows
    chunk = DCP.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([rows, entry.size[1]]))
    other_chunk = DCP.ChunkStorageMetadata(torch.Size([1, 0]), torch.Size([entry.size[0] - rows, entry.size[1]]))
    entry.chunks[:] = [chunk, other_chunk] if rows > 1 else entry.chunks


def beyond_the_end(metadata):
    (chunk,) = metadata.state_dict_metadata[first_tensor(metadata)].chunks
    chunk.offsets = torch.Size([1, 0])


def no_place(metadata):
    name = first_tensor(metadata)
    metadata.storage_data = {index: place for index, place in metadata.storage_data.items() if index.fqn != name}


def another_dimension(metadata):
    (chunk,) = metadata.state_dict_metadata[first_tensor(metadata)].chunks
    chunk.offsets = torch.Size([0])


def beyond_the_file(metadata):
    next(iter(metadata.storage_data.values())).length = 10**9


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_a_chunk, "is not all there"),
        (half_a_chunk, "is not all there"),
        (twice_the_first_half, "has a piece outside of it|has pieces that overlap"),
        (beyond_the_end, "has a piece outside of it"),
        (no_place, "has no place in the files"),
        (another_dimension, "has a piece of other dimensions"),
        (beyond_the_file, "points outside"),
    ],
)
def test_every_element_of_every_tensor_has_its_place(folder, planted, change, reason):
    """Otherwise half a weight could silently keep its initial values."""
    metadata = FileSystemReader(folder).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_refused(folder, planted, reason)


@pytest.mark.parametrize("name", [".metadata", "manifest.json", "state.json", "__0_0.distcp"])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
        load_model_for_inference(folder, TinyModel())
    with pytest.raises(NothingLoadable, match=f"{name} is not a regular file"):
        Job(folder.parent).checkpointer.load()


def test_a_state_of_another_step_than_its_folder_is_refused(folder, planted):
    """A sealed state that says 999999 would end a run at once, or skip its data."""
    for change in ({"step": 999999}, {"trainer": {"step": 999999}}):
        state = json.loads((folder / "state.json").read_text())
        state |= {"trainer": state["trainer"] | change["trainer"]} if "trainer" in change else change
        (folder / "state.json").write_text(json.dumps(state))
        assert_refused(folder, planted, "state.json is of step 999999, its folder of 2")
