"""Folders of checkpoints: private, never replaced, and deleted only if they are of this project."""

import os
import random
from pathlib import Path

import pytest

from tests.support.checkpoint_folders import make_step, names
from torchtitan.checkpoint import folders, layout, saving
from torchtitan.checkpoint.agreement import Peers


def retain(root: Path, keep: int, protected: set[Path]) -> None:
    saving.delete_old(root, keep, protected, Peers("test"), set())


def test_folders_are_private_and_files_are_never_replaced(tmp_path):
    temporary = folders.create_temporary(tmp_path / "new" / "step-00000001")
    assert temporary.stat().st_mode & 0o777 == temporary.parent.stat().st_mode & 0o777 == 0o700
    (temporary / "a.tmp").write_text("")
    with pytest.raises(FileExistsError):
        folders.write_file(temporary / "a", "text")


@pytest.mark.parametrize(
    ("keep", "expected"), [(0, [1, 2, 3, 4, 5]), (1, [4, 5]), (2, [4, 5]), (3, [3, 4, 5]), (9, [1, 2, 3, 4, 5])]
)
def test_retention_keeps_the_newest_and_at_least_two(tmp_path, keep, expected):
    for step in range(1, 6):
        make_step(tmp_path, step)
    retain(tmp_path, keep, set())
    assert names(tmp_path) == [layout.step_name(step) for step in expected]


def test_retention_deletes_only_complete_checkpoints_of_this_project(tmp_path):
    root, outside = tmp_path / "checkpoint", tmp_path / "outside"
    for step in range(10, 16):
        make_step(root, step)
    make_step(outside, 1)
    foreign = ["my-step-00000010-notes", "step-10", "step-00000010.bak", "step-00000002", ".tmp-mine"]
    for name in foreign:
        (root / name).mkdir()
        (root / name / "precious").write_text("")
    (root / "step-00000001").symlink_to(outside / "step-00000001")
    (root / "step-00000012" / layout.MANIFEST).unlink()
    (root / "step-00000013" / "link").symlink_to(outside)
    retain(root, 2, {root / "step-00000011"})
    expected = {"step-00000011", "step-00000012", "step-00000014", "step-00000015", "step-00000001", *foreign}
    assert set(names(root)) == expected
    assert (outside / "step-00000001" / layout.MANIFEST).exists()


def test_an_old_checkpoint_that_cannot_be_deleted_is_only_a_warning(tmp_path, monkeypatch, caplog):
    for step in range(4):
        make_step(tmp_path, step)

    def fail(folder):
        raise PermissionError("planted")

    monkeypatch.setattr(folders, "delete", fail)
    retain(tmp_path, 2, set())
    assert "cannot be deleted: planted" in caplog.text


def test_only_temporary_folders_of_this_project_are_removed(tmp_path):
    ours = [".tmp-step-00000003-0123456789abcdef", ".tmp-step-00000009-ffffffffffffffff"]
    foreign = [".tmp-step-00000003-xyz", "x.tmp-step-00000003-0123456789abcdef", ".tmp-other-0123456789abcdef", ".tmp-"]
    for name in ours + foreign:
        (tmp_path / name).mkdir()
    (tmp_path / "target").mkdir()
    link = ".tmp-step-00000004-0123456789abcdef"
    (tmp_path / link).symlink_to(tmp_path / "target")
    folders.remove_leftovers(tmp_path / "step-00000010")
    assert set(names(tmp_path)) == {*foreign, link, "target"}
    folders.remove_leftovers(tmp_path / "other")
    assert ".tmp-other-0123456789abcdef" not in names(tmp_path)


def test_random_actions_always_leave_the_newest_complete_checkpoint(tmp_path):
    """A complete checkpoint exists and the newest one is retained, over 120 random saves, damages and retentions."""
    rng = random.Random(0)
    make_step(tmp_path, 0)
    for step in range(1, 121):
        complete = layout.complete_steps(tmp_path)[0]
        action = rng.choice(["save", "save", "damage", "retain"])
        if action == "save":
            make_step(tmp_path, step)
        elif action == "damage" and len(complete) > 1:
            os.truncate(rng.choice(complete) / "__0_0.distcp", 0)
        elif action == "retain":
            newest = complete[0]
            retain(tmp_path, rng.randint(1, 4), set())
            assert layout.newest_complete(tmp_path)[0] == newest
        assert layout.newest_complete(tmp_path)[0] is not None


@pytest.mark.parametrize("highest", [False, True])
def test_the_oldest_of_equally_good_checkpoints_is_the_best(tmp_path, monkeypatch, highest):
    """Others that are as good came later, and values that are none are not compared."""
    values = [float("nan"), 0.5, 0.5, 0.5, float("inf")]
    steps = [tmp_path / layout.step_name(step) for step in range(len(values))]
    monkeypatch.setattr(folders, "_measured", lambda folder: {"value": values[steps.index(folder)]})
    for complete in (steps, steps[::-1]):
        assert folders.best_of(complete, folders.Metric("value", highest)) == (steps[1], 0.5)
    assert folders.best_of(steps[:1], folders.Metric("value", highest)) is None
