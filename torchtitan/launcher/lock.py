"""Allow one run per folder: a run writes a lock file into `job.dump_folder` that identifies its process.

Works where several machines see the folder (NFS): a lock file is created exclusively, which file servers guarantee, and
then all other lock files are read again, so that a stale listing is harmless. Kernel locks (flock) are not used, as
many mounts lack them. An owner is known to be dead from its machine, boot, process and start time if it ran on this
machine; for a SLURM job from its restart count and from SLURM. Otherwise it is assumed to be alive.
"""

import itertools
import json
import os
import random
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from torchtitan.core.errors import JobError
from torchtitan.core.files import FileError, read_file

_NAME = re.compile(r"run\.lock\.([0-9]{1,9})")
_LONGEST = 4096
WRITING_SECONDS = 3.0
"""Time during which an empty lock file counts as one that is still being written."""
ALIVE_STATES = {"RUNNING", "COMPLETING", "CONFIGURING", "STOPPED", "SUSPENDED", "SIGNALING", "STAGE_OUT"}
"""States in which the processes of a SLURM job may be alive."""


@dataclass(frozen=True)
class Owner:
    """A process, identified uniquely."""

    host: str
    machine: str
    """/etc/machine-id, because different hosts may have the same name."""
    boot: str
    pid_space: str
    """PID namespace, because containers number their own processes."""
    pid: int
    started: int
    """Start time in clock ticks since boot."""
    job: str
    """SLURM job ID, or empty."""
    restarts: int
    """Number of times that SLURM has started this job before."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f", SLURM job {self.job}" if self.job else "")


_OWNER = TypeAdapter(Owner)


def this_process(job: str = "", restarts: int = 0) -> Owner:
    def read(path: str) -> str:
        with suppress(OSError):
            return Path(path).read_text().strip()
        return ""

    space = os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""
    boot, machine = read("/proc/sys/kernel/random/boot_id"), read("/etc/machine-id")
    pid = os.getpid()
    return Owner(socket.gethostname(), machine, boot, space, pid, start_time(pid) or 0, job, restarts)


def start_time(pid: int) -> int | None:
    """Return when a process of this machine started, in clock ticks since boot; None if it does not exist or is a
    zombie. Without /proc, return 0 for an existing process.
    """
    if not os.path.exists("/proc/self/stat"):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return 0
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def job_is_over(job: str) -> bool:
    """Return True if SLURM says that no process of a job can be alive. False if SLURM does not answer."""
    try:
        command = ["squeue", "--noheader", f"--jobs={job}", "--format=%T"]
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    if result.returncode:
        return "invalid job id" in result.stderr.lower()
    return not ALIVE_STATES & set(result.stdout.split())


def may_be_alive(owner: Owner, current: Owner, is_over: Callable[[str], bool] = job_is_over) -> bool:
    """Return True if an owner may still be alive, as far as this process can tell."""
    if owner.job and owner.job == current.job and owner.restarts < current.restarts:
        return False
    if (owner.host, owner.machine) == (current.host, current.machine):
        if owner.boot != current.boot:
            return False
        if owner.pid_space == current.pid_space:
            return start_time(owner.pid) == owner.started
    return not (owner.job and owner.job != current.job and is_over(owner.job))


@contextmanager
def hold_lock(folder: Path, current: Owner) -> Iterator[bool]:
    """Hold the folder's lock during the block, which gets True if a run that was killed has left its lock here.

    Raises `JobError` if another run holds it or it cannot be written.
    """
    try:
        lock_file, was_left = _acquire(folder, current)
    except OSError as error:
        location = "" if error.filename is None else f": {error.filename}"  # a write error has no file name
        raise JobError(
            f"job.dump_folder: given {str(folder)!r}, which cannot be written ({error.strerror}{location}); "
            "allowed: one that this user may write to, with space on its disk"
        ) from None
    try:
        yield was_left
    finally:
        with suppress(OSError):
            lock_file.unlink()


def _acquire(folder: Path, current: Owner) -> tuple[Path, bool]:
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + WRITING_SECONDS
    while True:
        earlier = _read(folder)
        _refuse_if_owned(earlier, current)
        if None in earlier.values() and time.monotonic() < deadline:
            time.sleep(0.05)
            continue
        names = (folder / f"run.lock.{number}" for number in itertools.count(max(earlier, default=0) + 1))
        lock_file = next(name for name in names if not os.path.lexists(name))  # a folder or link of this name stays
        try:
            _write(lock_file, current)
        except FileExistsError:  # another process was faster; the next iteration reads its lock
            continue
        owners = _read(folder)
        read_back = owners.pop(_number(lock_file) or 0, None)
        if read_back not in (current, None):  # while this process was paused, another took over its file
            continue
        if (
            not any(owner is not None and may_be_alive(owner, current) for owner in owners.values())
            and lock_file.exists()
        ):
            for number in owners:
                (folder / f"run.lock.{number}").unlink(missing_ok=True)
            return lock_file, any(owners.values())
        lock_file.unlink(missing_ok=True)  # two processes saw each other: both back off, one is first to retry
        time.sleep(random.uniform(0.01, 0.2))


def is_held(folder: Path) -> bool | None:
    """Return True if a run may be at work in the folder, False if it was killed and has left its lock, else None."""
    try:
        owners = [owner for owner in _read(folder).values() if owner is not None]
    except OSError:
        return None
    return any(may_be_alive(owner, this_process()) for owner in owners) if owners else None


def _refuse_if_owned(owners: dict[int, Owner | None], current: Owner) -> None:
    for number, owner in owners.items():
        if owner is not None and may_be_alive(owner, current):
            raise JobError(
                f"job.dump_folder: given a folder in which another run is at work ({owner}); allowed: one run a "
                f"folder; stop that one or give another. If it is gone for certain, delete run.lock.{number} there"
            )


def _read(folder: Path) -> dict[int, Owner | None]:
    """Return the owners by the number of their lock file; None for a file that is not a valid lock (yet)."""
    owners: dict[int, Owner | None] = {}
    for path in folder.iterdir():
        number = _number(path)
        if number is None or path.is_symlink() or not path.is_file():
            continue
        owners[number] = None
        with suppress(FileError, ValidationError):
            owners[number] = _OWNER.validate_json(read_file(path, _LONGEST, follow_links=False), strict=True)
    return owners


def is_lock(name: str) -> bool:
    """Return True if this is the name of a lock file."""
    return _NAME.fullmatch(name) is not None


def _number(path: Path) -> int | None:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match and path.name == f"run.lock.{int(match[1])}" else None


def _write(path: Path, owner: Owner) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.write(descriptor, json.dumps(asdict(owner)).encode())
        os.fsync(descriptor)
    except OSError:  # e.g. a full disk; an empty file would count as a lock that is still being written
        with suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(descriptor)
