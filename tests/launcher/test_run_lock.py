"""The lock of a run's folder: several starters, locks of living and dead owners, a second job in the same folder."""

import errno
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.support import jobs
from torchtitan.checkpoint import folders
from torchtitan.core.errors import JobError
from torchtitan.launcher import run_folder
from torchtitan.launcher.run_folder import hold_lock, may_be_alive, this_process

HERE = this_process()


def locks(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("run.lock"))


def forge(folder: Path, number: int = 1, **changes) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"run.lock.{number}").write_text(json.dumps(asdict(replace(HERE, **changes))))


def can_acquire(folder: Path, **changes) -> bool:
    try:
        with hold_lock(folder, replace(HERE, **changes)):
            assert len(locks(folder)) == 1
            return True
    except JobError:
        return False


def test_a_folder_is_locked_during_a_run_and_released_afterwards(tmp_path):
    with hold_lock(tmp_path / "new", HERE), pytest.raises(JobError) as refusal, hold_lock(tmp_path / "new", HERE):
        raise AssertionError
    message = str(refusal.value)
    assert (
        f"process {os.getpid()} on {HERE.host}" in message and "delete run.lock.1" in message and "allowed" in message
    )
    assert locks(tmp_path / "new") == [] and can_acquire(tmp_path / "new")


def test_lock_names_that_are_no_files_are_skipped(tmp_path, monkeypatch):
    """The name is taken by something other than a lock file; it used to be tried forever."""
    tries = iter([1, 2])
    monkeypatch.setattr(run_folder, "_refuse_if_owned", lambda locks_found, owner: next(tries))
    (tmp_path / "run.lock.1").mkdir()
    (tmp_path / "run.lock.2").symlink_to(tmp_path / "nowhere")
    with hold_lock(tmp_path, HERE):
        assert locks(tmp_path) == ["run.lock.1", "run.lock.2", "run.lock.3"]


DEAD = {
    "its process is gone": dict(pid=2**22 + 1),
    "its number is another process's now": dict(started=HERE.started + 1),
    "its machine was started again": dict(boot="another"),
    "SLURM has started its job again": dict(host="n1", job="7", restarts=0),
    "SLURM does not know its job any more": dict(host="n1", job="8"),
}
ALIVE = {
    "this process": {},
    "on another machine": dict(host="elsewhere"),
    "on another machine of the same name": dict(machine="elsewhere"),
    "in another container, where the number means another process": dict(pid_space="pid:[1]", pid=2**22 + 1),
    "SLURM says that it runs": dict(host="n1", job="9"),
    "another step of our own job": dict(host="n1", job="7", restarts=1),
}


@pytest.mark.parametrize("owner", [*DEAD, *ALIVE])
def test_only_locks_of_dead_owners_are_taken_over(owner, tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "job_is_over", {"8": True, "9": False}.__getitem__)
    monkeypatch.setattr(may_be_alive, "__defaults__", (run_folder.job_is_over,))
    forge(tmp_path, 5, **(DEAD | ALIVE)[owner])
    assert can_acquire(tmp_path, job="7", restarts=1) == (owner in DEAD)
    assert locks(tmp_path) == ([] if owner in DEAD else ["run.lock.5"])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows whether a process is a zombie")
def test_a_zombie_counts_as_dead(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    started = run_folder.start_time(child.pid)
    child.stdout.read()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not may_be_alive(replace(HERE, pid=child.pid, started=started or 0), HERE)
    child.wait()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": 3}', "x" * 10**6])
def test_a_lock_damaged_by_a_crash_has_no_owner(content, tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "WRITING_SECONDS", 0.1)
    (tmp_path / "run.lock.3").write_text(content)
    assert can_acquire(tmp_path) and locks(tmp_path) == []


def test_an_incomplete_lock_is_read_again(tmp_path, monkeypatch):
    (tmp_path / "run.lock.3").touch()
    monkeypatch.setattr(run_folder.time, "sleep", lambda seconds: forge(tmp_path, 3))
    assert not can_acquire(tmp_path)


def test_a_lock_taken_over_while_it_was_written_belongs_to_the_other(tmp_path, monkeypatch):
    """A process that paused so long that its lock counted as torn then writes into the deleted file."""
    write = run_folder._write

    def late(path, owner):
        write(path, owner)
        path.unlink()
        forge(tmp_path, pid=os.getppid(), started=run_folder.start_time(os.getppid()))

    monkeypatch.setattr(run_folder, "_write", late)
    assert not can_acquire(tmp_path) and json.loads((tmp_path / "run.lock.1").read_text())["pid"] == os.getppid()


def test_other_files_are_not_touched(tmp_path):
    (tmp_path / "elsewhere").write_text("kept")
    for name in ("run.lock", "run.lock.x", "run.lock.01", "my.run.lock.1"):
        (tmp_path / name).write_text("kept")
    (tmp_path / "run.lock.4").symlink_to(tmp_path / "elsewhere")
    with hold_lock(tmp_path, HERE):
        assert (tmp_path / "run.lock.1").is_file()
    assert (tmp_path / "elsewhere").read_text() == "kept" and len(list(tmp_path.iterdir())) == 6


STARTER = """
import random, sys, time
from pathlib import Path
from torchtitan.core.errors import JobError
from torchtitan.launcher.run_folder import hold_lock, this_process
here = this_process()
print("ready", flush=True)
sys.stdin.readline()
for turn in range(10):
    try:
        with hold_lock(Path(sys.argv[1]), here):
            print("in", flush=True)
            mark = Path(sys.argv[1], "inside")
            mark.touch(exist_ok=False)  # fails if another process holds the lock
            time.sleep(random.uniform(0, 0.01))
            mark.unlink()
    except JobError:
        time.sleep(random.uniform(0, 0.005))
"""


def test_without_the_lock_an_unfinished_save_of_another_job_is_deleted(tmp_path):
    """The control: without the lock, a job deletes the unfinished save of another."""
    temporary = folders.create_temporary(tmp_path / "step-00000004")
    folders.remove_leftovers(tmp_path / "step-00000008")
    assert not temporary.exists()


def test_of_several_starters_only_one_holds_the_lock(tmp_path):
    """All of them try to take over the lock of a dead owner."""
    forge(tmp_path, 2, pid=2**22 + 1)
    command = [sys.executable, "-c", STARTER, str(tmp_path)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    starters = [subprocess.Popen(command, cwd=jobs.ROOT, **pipes) for _ in range(3)]
    for starter in starters:
        assert starter.stdout.readline() == "ready\n"
    for starter in starters:
        starter.stdin.write("go\n")
        starter.stdin.flush()
    ended = [starter.communicate(timeout=300) for starter in starters]
    assert [starter.returncode for starter in starters] == [0, 0, 0], ended
    assert "in\n" in "".join(out for out, _ in ended) and locks(tmp_path) == []


@pytest.mark.parametrize("number", [1, 7])
def test_an_outdated_directory_listing_does_no_harm(number, tmp_path, monkeypatch):
    """Clients of a file server may not see the newest names at once."""
    forge(tmp_path, number)
    read = run_folder._read
    stale = iter([True])
    monkeypatch.setattr(run_folder, "_read", lambda folder: {} if next(stale, False) else read(folder))
    assert not can_acquire(tmp_path) and locks(tmp_path) == [f"run.lock.{number}"]


def test_an_unusable_folder_is_refused_with_a_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    message = re.escape(f"given '{tmp_path}/file/run'") + ".*cannot be written.*allowed"
    with pytest.raises(JobError, match=message), hold_lock(tmp_path / "file" / "run", HERE):
        raise AssertionError


def test_a_full_disk_is_reported_also_without_a_file_name(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder.os, "fsync", full)
    message = re.escape("cannot be written (No space left on device); allowed")
    with pytest.raises(JobError, match=message), hold_lock(tmp_path, HERE):
        raise AssertionError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("under", ["launcher", "torchrun"])
def test_a_second_job_in_a_folder_is_refused_and_changes_nothing(under, tmp_path, monkeypatch):
    if under == "torchrun":
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
    texts = jobs.write_texts(tmp_path / "texts")
    with hold_lock(tmp_path / "run", HERE):
        before = sorted((tmp_path / "run").iterdir())
        command = [sys.executable, "-m", "torchtitan.train", *jobs.arguments(tmp_path / "run", texts)]
        done = subprocess.run(command, cwd=jobs.ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        message = " ".join(done.stderr.split())
        assert message.startswith("job.dump_folder: given a folder") and message.endswith("delete run.lock.1 there")
        assert f"another run is at work (process {os.getpid()}" in message
        assert sorted((tmp_path / "run").iterdir()) == before
