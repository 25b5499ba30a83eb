"""Opening a checkpoint executes nothing that is in it, and reads no file but its own."""

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

from tests.checkpoint_job import Job, TinyModel
from torchtitan.checkpoint import CheckpointError, NothingLoadable, layout, load_model_for_inference, storage

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
    """As a stranger would: make the manifest agree with the files that were changed."""
    manifest = layout.read_manifest(folder)
    files = {
        path.name: layout.FileEntry(path.stat().st_size, layout.sha256_of(path))
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
    (folder / ".metadata").write_bytes(b"nonsense")
    assert_refused(folder, planted, ".metadata is damaged")
    manifest = layout.read_manifest(folder)
    with pytest.raises(CheckpointError, match=".metadata is damaged"):
        storage._CheckedReader(folder, manifest).read_metadata(rank=0)
    assert not planted.exists()


def test_an_entry_that_is_no_tensor_is_refused_and_not_unpickled(folder, planted, tmp_path):
    tensors = {name: tensor for name, tensor in TinyModel().state_dict().items()}
    dcp.save({**tensors, "evil": Payload(planted)}, checkpoint_id=tmp_path / "plain")
    shutil.rmtree(planted, ignore_errors=True)
    for name in (".metadata", "__0_0.distcp"):
        shutil.copy(tmp_path / "plain" / name, folder / name)
    assert_refused(folder, planted, "BytesStorageMetadata|evil is not a tensor")


def test_a_payload_in_a_shard_is_refused_and_not_run(folder, planted, tmp_path):
    """Every tensor's bytes are replaced by a pickle of the payload, at the place where the metadata says it lies."""
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
    asked = set()

    class Collecting(pickle.Unpickler):
        def find_class(self, module, name):
            asked.add((module, name))
            return super().find_class(module, name)

    with (folder / ".metadata").open("rb") as file:
        Collecting(file).load()
    dtypes = {(module, name) for module, name in asked if module == "torch" and name != "Size"}
    enum_member = {("builtins", "getattr")}  # Python 3.11.0 to 3.11.3
    assert asked - dtypes - enum_member <= set(storage._RECORDS)
    assert dtypes == {("torch", "float32")}


def test_nothing_of_the_state_is_executed(folder):
    state = json.loads((folder / "state.json").read_text())
    assert set(state) == {"step", "trainer", "ranks", "optimizer", "versions"}
    assert not list(folder.glob("*.pkl")) and not list(folder.glob("*.pt"))


class AttributeOf:
    """What Python 3.11.0 to 3.11.3 pickle an enum's member as, for anything."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return getattr, self.arguments


def test_enum_members_are_read_as_any_python_writes_them():
    member = DCP._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    text = pickle.dumps(AttributeOf(DCP._MEM_FORMAT_ENCODING, member.name))
    assert storage._RecordsUnpickler(io.BytesIO(text)).load() is member


@pytest.mark.parametrize(
    "arguments",
    [
        (DCP._MEM_FORMAT_ENCODING, "__class__"),
        (DCP.Metadata, "__init__"),
        (torch.Size, "__subclasses__"),
        (torch.float32, "__class__"),
    ],
)
def test_no_other_attribute_is_got(arguments):
    with pytest.raises(CheckpointError, match="which no checkpoint needs"):
        storage._RecordsUnpickler(io.BytesIO(pickle.dumps(AttributeOf(*arguments)))).load()


def test_metadata_cannot_change_the_classes_it_is_made_of():
    """Opcodes of pickle: find Metadata, set its attribute `planted`."""
    text = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x07\x00\x00\x00planted"
    text += b"X\x04\x00\x00\x00evils\x86b."
    with pytest.raises(CheckpointError, match="changes Metadata"):
        storage._load_records(io.BytesIO(text))
    assert not hasattr(DCP.Metadata, "planted")
