"""Runs in a container whose /dev/shm is full, read-only or missing: they save and resume."""

import errno
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.jobs import ROOT, SHALLOW, arguments, write_texts
from torchtitan.config import manager
from torchtitan.core.errors import JobError
from torchtitan.datasets import preparing
from torchtitan.planner import rehearsal
from torchtitan.rules import check

STATES = {
    "full": "mount -t tmpfs -o size=64k,nr_inodes=2 tmpfs /dev/shm && head -c 64k /dev/zero > /dev/shm/full || true",
    "read-only": "mount -t tmpfs -o ro tmpfs /dev/shm",
    "missing": "mount -t tmpfs tmpfs /dev && mknod -m 666 /dev/null c 1 3 && mknod -m 666 /dev/urandom c 1 9",
}


def in_container(state: str, *command: str, **options) -> subprocess.CompletedProcess:
    """Run a command in a mount namespace with this /dev/shm. Skips the test where the machine has none."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("this machine cannot make a mount namespace (unshare -m, as root)")
    script = f'({STATES[state]}) && exec "$@"'
    whole = ["unshare", "-m", "sh", "-c", script, "sh", *command]
    return subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, timeout=300, **options)


def launch(state: str, ranks: int, argv: list[str]) -> subprocess.CompletedProcess:
    return in_container(state, sys.executable, "-m", "torchtitan.launch", str(ranks), *argv)


@pytest.mark.parametrize(("state", "ranks"), [("full", 1), ("full", 2), ("read-only", 2), ("missing", 2)])
def test_a_run_saves_and_resumes(state: str, ranks: int, tmp_path: Path):
    probe = "import multiprocessing\ntry: multiprocessing.Lock()\nexcept OSError: print('none')"
    assert in_container(state, sys.executable, "-c", probe).stdout == "none\n"
    options = {"checkpoint__enable": True, "checkpoint__interval": 2, "model__overrides": SHALLOW}
    options |= {"training__local_batch_size": 8 // ranks, "checkpoint__on_save_error": "stop"}
    texts = write_texts(tmp_path)
    for steps, resumed in ((2, False), (4, True)):
        done = launch(state, ranks, arguments(tmp_path / "run", texts, training__steps=steps, **options))
        assert done.returncode == 0, done.stderr
        assert (tmp_path / f"run/checkpoint/step-{steps:08d}/manifest.json").exists()
        assert ("resumed from step 2" in done.stdout + done.stderr) == resumed
        assert "failed" not in done.stdout + done.stderr


@pytest.mark.parametrize("state", STATES)
def test_workers_are_refused_before_the_start(state: str, tmp_path: Path):
    argv = arguments(tmp_path / "run", write_texts(tmp_path), training__dataloader__num_workers=1)
    done = launch(state, 1, argv)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    for text in ("training.dataloader.num_workers: given 1", "/dev/shm", "--shm-size", "--ipc=host", "num_workers = 0"):
        assert text in done.stderr
    assert not (tmp_path / "run").exists()


def test_prepare_and_rehearsals_need_no_shared_memory_or_say_so(tmp_path: Path, monkeypatch):
    """A unit test, for machines without namespaces."""

    def refuse() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("multiprocessing.Lock", refuse)
    with pytest.raises(JobError, match=r"3 workers: /dev/shm cannot be used \(No space left.*--shm-size.*--workers 1"):
        list(preparing._tokenized([], None, 3))
    assert list(preparing._tokenized([], None, 1)) == []
    assert rehearsal.run_in_processes(int, [("1",), ("2",)]) == [1, 2]
    config = manager.load(arguments(tmp_path / "run", write_texts(tmp_path), data__num_proc=2))
    (fault,) = check(config, 1, "cpu")
    assert fault.key == "data.num_proc" and "--ipc=host" in str(fault)


def test_room_for_batches_is_counted(tmp_path: Path, monkeypatch):
    free = SimpleNamespace(f_bavail=1, f_frsize=4096)
    monkeypatch.setattr("torchtitan.process.machine.os.statvfs", lambda path: free)
    config = manager.load(arguments(tmp_path / "run", write_texts(tmp_path), training__dataloader__num_workers=1))
    faults = [fault for fault in check(config, 1, "cpu") if fault.key == "training.dataloader.num_workers"]
    assert len(faults) == 1 and "/dev/shm has 4.0 KiB free, of 16.0 KiB" in str(faults[0])
