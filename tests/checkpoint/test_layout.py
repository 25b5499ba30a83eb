"""Tests of checkpoint folders without torch and ranks: finding, checking, publishing and deleting them."""

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from tests.support.checkpoint_folders import make_step
from torchtitan.checkpoint import NothingLoadable, layout
from torchtitan.checkpoint.layout import CheckpointError, TensorEntry


def edit_manifest(folder: Path, reseal: bool = True, **changes) -> None:
    """Change a manifest's fields; `reseal`: update its checksum."""
    body = json.loads((folder / layout.MANIFEST).read_text())
    body.update(changes)
    if reseal:
        body.pop("sha256")
        body["sha256"] = layout._body_digest(body)
    (folder / layout.MANIFEST).write_text(json.dumps(body))


def test_importing_and_finding_checkpoints_needs_no_torch():
    code = (
        "import sys, torchtitan.checkpoint as c; c.newest_complete(c.layout.Path('x')); print('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    import torchtitan.checkpoint

    with pytest.raises(AttributeError, match="no_such_name"):
        torchtitan.checkpoint.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-00000500", 500),
        ("step-123456789", 123456789),
        ("step-500", None),
        ("step-0000000500", None),
        ("my-step-00000500", None),
        ("step-00000500-notes", None),
        ("step-00000500\n", None),
        ("step-٠٠٠٠٠٠٠١", None),
    ],
)
def test_step_names_match_in_full(name, step):
    assert layout.step_of(name) == step


def test_newest_complete_sorts_by_number_and_ignores_other_folders(tmp_path):
    assert layout.newest_complete(tmp_path / "absent") == (None, [])
    for step in (9, 100, 20):
        make_step(tmp_path, step)
    (tmp_path / "notes").mkdir()
    (tmp_path / ".tmp-step-00000200-0123456789abcdef").mkdir()
    assert layout.newest_complete(tmp_path) == (tmp_path / "step-00000100", [])


def test_a_manifest_round_trips(tmp_path):
    folder = make_step(tmp_path, 7)
    manifest = layout.check_complete(folder)
    assert (manifest.step, manifest.tensors) == (7, {"model.w": TensorEntry("float32", [2, 3])})
    assert layout.damaged_files(folder, manifest, manifest.files) == []
    (folder / "__0_0.distcp").write_bytes(b"paYload")
    assert layout.damaged_files(folder, manifest, manifest.files) == ["__0_0.distcp"]


def delete_manifest(folder):
    (folder / layout.MANIFEST).unlink()


def truncate_shard(folder):
    (folder / "__0_0.distcp").write_bytes(b"pay")


def delete_shard(folder):
    (folder / "__0_0.distcp").unlink()


def link_shard(folder):
    (folder / "__0_0.distcp").rename(folder.parent / "elsewhere")
    (folder / "__0_0.distcp").symlink_to(folder.parent / "elsewhere")


def write_manifest(text):
    return lambda folder: (folder / layout.MANIFEST).write_bytes(text)


def change(reseal=True, **changes):
    return lambda folder: edit_manifest(folder, reseal, **changes)


FILE = {"size": 1, "sha256": "0"}
DAMAGES = [
    (delete_manifest, "never finished"),
    (truncate_shard, "3 bytes instead of 7"),
    (delete_shard, "__0_0.distcp cannot be read"),
    (link_shard, "not a regular file"),
    (write_manifest(b"{"), "manifest.json cannot be read"),
    (write_manifest(b"\xff"), "manifest.json cannot be read"),
    (write_manifest(b"[]"), "not a JSON object"),
    (write_manifest(b"[" * 100_000), "manifest.json cannot be read"),
    (write_manifest(b'{"format": 1, "format": 1}'), "a key occurs twice"),
    (write_manifest(b'{"format": NaN}'), "NaN is not JSON"),
    (change(step=8), "another step"),
    (change(reseal=False, step=8), "own checksum"),
    (change(format=2), "format 2 is unknown"),
    (change(step="7"), "step: Input should be a valid integer"),
    (change(surprise=1), "surprise"),
    (change(files={"../state.json": FILE}), "'../state.json' is not a plain file name"),
    (change(files={"/etc/passwd": FILE}), "not a plain file name"),
    (change(files={"..": FILE}), "not a plain file name"),
    (change(files={"state.json": FILE}), "does not list state.json and .metadata"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_a_damaged_folder_is_reported_and_the_older_one_is_newest(tmp_path, damage, reason):
    older, newer = make_step(tmp_path, 3), make_step(tmp_path, 7)
    damage(newer)
    newest, refused = layout.newest_complete(tmp_path)
    assert newest == older
    assert [old.folder for old in refused] == [newer]
    assert reason in str(refused[0])


def test_a_file_or_link_in_place_of_a_folder_is_refused(tmp_path):
    make_step(tmp_path / "elsewhere", 4)
    (tmp_path / "step-00000004").symlink_to(tmp_path / "elsewhere" / "step-00000004")
    (tmp_path / "step-00000005").write_text("")
    newest, refused = layout.newest_complete(tmp_path)
    assert newest is None
    assert all("not a folder of its own" in str(old) for old in refused)
    assert len(refused) == 2


def test_resolve_accepts_a_checkpoint_or_a_folder_of_checkpoints(tmp_path):
    folder = make_step(tmp_path, 4)
    assert layout.resolve(folder) == layout.resolve(tmp_path) == folder
    (folder / layout.MANIFEST).unlink()
    with pytest.raises(NothingLoadable, match="step-00000004: it has no manifest.json"):
        layout.resolve(tmp_path)
    with pytest.raises(NothingLoadable, match="no such folder"):
        layout.resolve(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NothingLoadable, match="no step-\\* folders"):
        layout.resolve(tmp_path / "empty")


def test_reading_a_small_file_takes_little_memory(tmp_path):
    """The limit on a file's size, 1 GiB, is not the size of the read buffer."""
    (tmp_path / "small").write_bytes(b"12345")
    tracemalloc.start()
    try:
        assert layout.read_bytes(tmp_path / "small") == b"12345"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_state_without_trainer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="trainer is not the dict"):
        layout.read_state(make_step(tmp_path, 1))
