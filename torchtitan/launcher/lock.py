"""One run a folder: whoever is at work in `job.dump_folder` says so in a file there, with all that tells whether it
still lives.

Sound where several machines see the folder (NFS): a file is made exclusively, which file servers guarantee, and then
all others are looked at again, so that a stale listing misleads nobody. Locks of the kernel (flock) are not used, as
mounts without them are common. Whether an owner is dead is known on its own machine (boot, process, time it started)
and, for a job of SLURM, from its restart count and from SLURM; else it is taken to live.
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
"""Longest that a lock without content is taken for one that is just being written."""
AT_WORK = {"RUNNING", "COMPLETING", "CONFIGURING", "STOPPED", "SUSPENDED", "SIGNALING", "STAGE_OUT"}
"""States of a SLURM job in which its processes may live."""


@dataclass(frozen=True)
class Owner:
    """A process, so that no other is ever taken for it."""

    host: str
    machine: str
    """/etc/machine-id: hosts of one name are not always the same."""
    boot: str
    pid_space: str
    """Containers have numbers of their own for processes."""
    pid: int
    started: int
    """In ticks of the clock since boot."""
    job: str
    """Of SLURM, or empty."""
    restarts: int
    """How often SLURM has started this job before."""

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
    return Owner(socket.gethostname(), machine, boot, space, pid, start_of(pid) or 0, job, restarts)


def start_of(pid: int) -> int | None:
    """When a process of this machine started, in ticks since boot; None if there is none, or only what is left of one
    that has ended. Where there is no /proc, 0 for a process that is there."""
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
    """Whether SLURM says that nothing of a job can be at work. False where nobody answers."""
    try:
        command = ["squeue", "--noheader", f"--jobs={job}", "--format=%T"]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    if asked.returncode:
        return "invalid job id" in asked.stderr.lower()
    return not AT_WORK & set(asked.stdout.split())


def lives(owner: Owner, here: Owner, is_over: Callable[[str], bool] = job_is_over) -> bool:
    """Whether an owner may still be at work, as far as can be known from here."""
    if owner.job and owner.job == here.job and owner.restarts < here.restarts:
        return False
    if (owner.host, owner.machine) == (here.host, here.machine):
        if owner.boot != here.boot:
            return False
        if owner.pid_space == here.pid_space:
            return start_of(owner.pid) == owner.started
    return not (owner.job and owner.job != here.job and is_over(owner.job))


@contextmanager
def held(folder: Path, here: Owner) -> Iterator[None]:
    """The folder is this run's until the end of the block. Raises `JobError` if it is another's, or can't be used."""
    try:
        mine = _acquire(folder, here)
    except OSError as error:
        place = "" if error.filename is None else f": {error.filename}"  # a write to an open file names none
        raise JobError(
            f"job.dump_folder: given {str(folder)!r}, which cannot be written ({error.strerror}{place}); "
            "allowed: one that this user may write to, with space on its disk"
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):
            mine.unlink()


def _acquire(folder: Path, here: Owner) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    patience = time.monotonic() + WRITING_SECONDS
    while True:
        before = _read(folder)
        _refuse_if_owned(before, here)
        if None in before.values() and time.monotonic() < patience:
            time.sleep(0.05)
            continue
        names = (folder / f"run.lock.{number}" for number in itertools.count(max(before, default=0) + 1))
        mine = next(name for name in names if not os.path.lexists(name))  # a folder or link of this name stays
        try:
            _write(mine, here)
        except FileExistsError:  # somebody was faster; who, is seen next time
            continue
        others = _read(folder)
        own = others.pop(_number(mine) or 0, None)
        if own not in (here, None):  # while this process stood still its file was taken for torn, and its name again
            continue
        if not any(owner is not None and lives(owner, here) for owner in others.values()) and mine.exists():
            for number in others:
                (folder / f"run.lock.{number}").unlink(missing_ok=True)
            return mine
        mine.unlink(missing_ok=True)  # both have seen each other and step back; one comes again first
        time.sleep(random.uniform(0.01, 0.2))


def _refuse_if_owned(found: dict[int, Owner | None], here: Owner) -> None:
    for number, owner in found.items():
        if owner is not None and lives(owner, here):
            raise JobError(
                f"job.dump_folder: given a folder in which another run is at work ({owner}); allowed: one run a "
                f"folder; stop that one or give another. If it is gone for certain, delete run.lock.{number} there"
            )


def _read(folder: Path) -> dict[int, Owner | None]:
    """The owners by the number of their file; None for a file that is no lock (yet)."""
    found: dict[int, Owner | None] = {}
    for path in folder.iterdir():
        number = _number(path)
        if number is None or path.is_symlink() or not path.is_file():
            continue
        found[number] = None
        with suppress(FileError, ValidationError):
            found[number] = _OWNER.validate_json(read_file(path, _LONGEST, follow_links=False), strict=True)
    return found


def is_lock(name: str) -> bool:
    """Whether a file of this name says who is at work."""
    return _NAME.fullmatch(name) is not None


def _number(path: Path) -> int | None:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match and path.name == f"run.lock.{int(match[1])}" else None


def _write(path: Path, owner: Owner) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.write(descriptor, json.dumps(asdict(owner)).encode())
        os.fsync(descriptor)
    except OSError:  # a full disk: without content it would be taken for one that is being written
        with suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(descriptor)
