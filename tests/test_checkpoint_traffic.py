"""What ranks tell one another for a save and a load, beside the tensors' files: thousands of them must be able to."""

import inspect
import json
import pickle
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import utils as torchs

from tests.support.checkpoint_job import Job, TinyModel, rank
from tests.support.pool import run_ranks
from torchtitan.checkpoint import CheckpointError, agreement, layout

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SMALL = 1500
"""Bytes that a rank may tell: names and checksums of its files, no tensors' names and no generators' states."""


class Counted:
    """torch.distributed for one module, counting the bytes of what this rank gives, by function."""

    def __init__(self):
        self.given = Counter()

    def __getattr__(self, name):
        function = getattr(dist, name)
        if name not in ("gather_object", "all_gather_object", "broadcast_object_list", "all_reduce"):
            return function

        def call(*args, **kwargs):
            given = inspect.signature(function).bind(*args, **kwargs).arguments
            value = given.get("obj", given.get("object_list", given.get("tensor")))
            size = value.nbytes if isinstance(value, torch.Tensor) else len(pickle.dumps(value))
            self.given[name] += size if name != "broadcast_object_list" or rank() == 0 else 0
            return function(*args, **kwargs)

        return call


def told(folder: Path, layers: int) -> list[tuple[Counter, Counter]]:
    """By us and by torch's planner, in the first save, the second, and a load."""
    job = Job(folder, "fsdp", TinyModel(layers=layers), interval=1, verify=False, keep_latest_k=0)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for action in (lambda: job.train(1), lambda: job.train(1), job.checkpointer.load):
            ours, theirs = Counted(), Counted()
            patch.setattr(agreement, "dist", ours)
            patch.setattr(torchs, "dist", theirs)
            action()
            found.append((ours.given, theirs.given))
    return found


def test_what_a_rank_tells_does_not_grow_with_model_or_state(tmp_path):
    for told_by_rank in run_ranks(2, told, tmp_path / "small", 2), run_ranks(2, told, tmp_path / "large", 20):
        for saves in told_by_rank:
            for ours, _ in saves[:2]:
                assert "all_gather_object" not in ours
                assert 0 < ours["gather_object"] < SMALL
                assert ours["broadcast_object_list"] < SMALL
            load, _ = saves[2]
            assert "gather_object" not in load and load["broadcast_object_list"] < SMALL


def test_a_plan_is_told_once(tmp_path):
    for first, second, _ in run_ranks(2, told, tmp_path, 20):
        # what is left is what has been written, of which the index is made
        assert first[1]["gather_object"] > 2 * second[1]["gather_object"], (first[1], second[1])


def saved(folder: Path) -> None:
    job = Job(folder, "fsdp")
    job.train(2)


def resumed(folder: Path) -> tuple[bool, float]:
    job = Job(folder, "fsdp")
    assert job.checkpointer.load() == 2
    (own,) = (state for number, state in enumerate(job.resumed_with[1]) if number == rank())
    return "rng" in own, random.random()


def test_a_rank_keeps_its_generators_in_a_file_of_its_own(tmp_path):
    run_ranks(2, saved, tmp_path)
    (folder,) = tmp_path.iterdir()
    state = json.loads((folder / "state.json").read_text())
    assert [set(of_rank) for of_rank in state["ranks"]] == [{"position"}] * 2
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
    """Have the manifest list what is there now."""
    manifest = layout.read_manifest(folder)
    names = [name for name in manifest.files if (folder / name).exists()]
    entries = {n: layout.FileEntry((folder / n).stat().st_size, layout.sha256_of(folder / n)) for n in names}
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


def test_what_only_one_rank_wants_is_named_by_all(tmp_path):
    """Each rank knows its own names alone."""
    run_ranks(2, saved, tmp_path)
    for text in run_ranks(2, of_another_width, tmp_path):
        assert "does not fit this job: it lacks model.layers.2.0.bias" in text
