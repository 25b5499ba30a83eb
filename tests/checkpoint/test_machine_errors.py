"""What the machine cannot read is not called bad: no checkpoint is refused, and no older one loaded in its place."""

import errno
import os

import pytest

from tests.support.checkpoint_job import Job, saved_steps
from torchtitan.checkpoint import CheckpointError, hashed_files, layout
from torchtitan.core import files, machine_errors
from torchtitan.core.machine_errors import MachineError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected call of")
NUMBERS = [errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EACCES, errno.ENOMEM]
PLACES = ["", "/step-00000004", "/step-00000004/manifest.json", "/step-00000004/__0_0.distcp"]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(machine_errors.time, "sleep", lambda seconds: None)


@pytest.fixture
def run(tmp_path):
    Job(tmp_path, interval=2).train(4)
    assert saved_steps(tmp_path) == ["step-00000002", "step-00000004"]
    return tmp_path


def make_unreadable(monkeypatch, name: str, number: int, call: str = "open"):
    right = getattr(os, call)

    def fail(path, *args, **kwargs):
        if str(path).endswith(name):
            raise OSError(number, os.strerror(number), str(path))
        return right(path, *args, **kwargs)

    monkeypatch.setattr(os, call, fail)


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["manifest.json", "state.json", ".metadata", "__0_0.distcp", "rank_0.json"])
def test_a_checkpoint_that_cannot_be_read_is_not_called_bad(name, number, run, monkeypatch):
    make_unreadable(monkeypatch, f"step-00000004/{name}", number)
    with pytest.raises(MachineError, match=name) as caught:
        Job(run).checkpointer.load()
    assert not isinstance(caught.value, CheckpointError) and os.strerror(number) in str(caught.value)
    for word in ("damaged", "Repair", "remove", "bad"):
        assert word not in str(caught.value)
    monkeypatch.undo()
    assert Job(run).checkpointer.load() == 4


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
@pytest.mark.parametrize(("call", "place"), [("listdir", ""), *(("stat", place) for place in PLACES)])
def test_a_folder_that_cannot_be_read_does_not_count_as_empty(call, place, number, run, monkeypatch):
    make_unreadable(monkeypatch, f"{run}{place}", number, call)
    for read in (layout.complete_steps, layout.newest_complete, layout.resolve):
        with pytest.raises(MachineError, match=f"{run}{place}"):
            read(run)


def test_a_passing_error_costs_nothing(run, monkeypatch, caplog):
    right, errors = os.open, [OSError(errno.EIO, "Input/output error")] * 2

    def sometimes(path, *args, **kwargs):
        if errors and str(path).endswith(".distcp"):
            raise errors.pop()
        return right(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", sometimes)
    assert Job(run).checkpointer.load() == 4 and not errors
    assert "again in 1 s" in caplog.text


def test_tensors_are_read_with_retries_too(run, monkeypatch):
    """DCP opens the files a second time, after they have been hashed."""
    count, right = 0, files.os.open

    def fail_later(path, *args, **kwargs):
        nonlocal count
        count += str(path).endswith(".distcp")
        if count > 1:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return right(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", fail_later)
    with pytest.raises(MachineError, match="__0_0.distcp.*Input/output error"):
        Job(run).checkpointer.load()
    assert count >= 4  # the hash, and three attempts


def test_old_checkpoints_stay_if_the_newer_cannot_be_verified(run, monkeypatch, caplog):
    job = Job(run, interval=2, keep_latest_k=2)
    assert job.checkpointer.load() == 4
    make_unreadable(monkeypatch, "step-00000004/__0_0.distcp", errno.EIO)
    job.train(2)
    assert saved_steps(run) == ["step-00000002", "step-00000004", "step-00000006"]
    assert "cannot be deleted" in caplog.text and "not sound" not in caplog.text


def test_a_save_that_cannot_be_read_back_is_retried_and_then_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(hashed_files, "open_file", lambda path: (_ for _ in ()).throw(OSError(errno.EIO, "I/O", "x")))
    job = Job(tmp_path, interval=1)
    job.checkpointer.retry_pauses = (0.0,)
    with pytest.raises(CheckpointError, match="failed on rank 0: x: I/O"):
        job.train(1)
    assert saved_steps(tmp_path) == [] and not list(tmp_path.glob(".tmp-*"))


def test_no_inodes_are_told_from_no_bytes(tmp_path, monkeypatch):
    from torchtitan.checkpoint import saving

    monkeypatch.setattr(saving, "is_out_of_inodes", lambda path: True)
    job = Job(tmp_path, interval=1)
    job.checkpointer.retry_pauses = ()
    with pytest.raises(CheckpointError, match="has no inodes left, though it has bytes"):
        job.train(1)


def test_no_semaphore_is_needed(tmp_path, monkeypatch):
    """As in a container whose /dev/shm is full, read-only or missing."""
    import _multiprocessing

    def refuse(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_multiprocessing, "SemLock", refuse)
    monkeypatch.setattr("multiprocessing.synchronize._multiprocessing.SemLock", refuse)
    Job(tmp_path, interval=2).train(2)
    assert Job(tmp_path).checkpointer.load() == 2
