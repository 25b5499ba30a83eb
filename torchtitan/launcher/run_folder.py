"""Files of a run in job.dump_folder in addition to checkpoints and metrics.

They include the job and plan of every start and the step of the last save, which distinguishes a folder that lost its
checkpoints from a new one. Needs no torch.

The folder is emptied before a new run begins in it if job.clean_start is set. Only files of a run are
deleted, and none that a user might miss: a folder belongs to a run if it contains the files of `record_start`, and it
is refused if it has anything at its top level that no run of this job writes. Links are removed and never followed. A
job that `torchtitan import --run` has written into the folder stays if the run is started from it. The file that marks
the folder is deleted last, so that the next start can finish an interrupted deletion.

One run uses a folder at a time: it writes a lock file into `job.dump_folder` that identifies its process. This works
where several machines see the folder (NFS): a lock file is created exclusively, which file servers guarantee, and
then all other lock files are read again, so that a stale listing is harmless. Kernel locks (flock) are not used, as
many mounts lack them. An owner is known to be dead from its machine, boot, process and start time if it ran on this
machine; for a SLURM job from its restart count and from SLURM. Otherwise it is assumed to be alive.
"""

import dataclasses
import glob
import itertools
import json
import logging
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from torchtitan.checkpoint import folders, layout, newest_complete
from torchtitan.config.job import JobConfig, as_dict, trackers_of
from torchtitan.config.sections.run import Checkpoint
from torchtitan.core.errors import JobError
from torchtitan.core.files import FileError, read_file
from torchtitan.metrics.json_lines import Record
from torchtitan.metrics.run_end import describe_end, end_of
from torchtitan.metrics.trackers import entries_of

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


logger = logging.getLogger(__name__)

JOB_FILE, STARTS_FOLDER, LAST_SAVE_FILE = "config.toml", "starts", "last_checkpoint"
IMPORTED_JOB_FILE = "imported.toml"
"""The job file that `torchtitan import --run` starts a run from."""
LOGS_FOLDER = "logs"
"""Folder of log files, one per rank, if the job asks for them."""
EXPORTS = {"model", "model_hf", "adapter"}
"""The weights exported at the end of a run."""
HANGS_FOLDER = "hangs"
"""Folder with the stacks of all ranks during hangs."""
ROLLBACKS_FILE = "ways_back.json"
"""The steps after which the run found its weights or optimizer state damaged and returned to a checkpoint."""
SECRET_FILE = "launch.secret"
"""Authenticates the launchers of several machines to each other while the run lasts."""
REFERENCE_FILE = "reference.safetensors"
PLOT_FILE = "training.png"
FILES = {"metrics.jsonl", "generated.jsonl", PLOT_FILE, REFERENCE_FILE}
KNOWN_NAMES = (
    {
        JOB_FILE,
        STARTS_FOLDER,
        LAST_SAVE_FILE,
        ROLLBACKS_FILE,
        IMPORTED_JOB_FILE,
        LOGS_FOLDER,
        "data",
        HANGS_FOLDER,
        SECRET_FILE,
    }
    | FILES
    | EXPORTS
)
"""Names at the top level of the folder that do not depend on options."""
_EARLIER = re.compile(r"(metrics|generated)\.(previous(-[0-9]+)?|redone)\.jsonl")
_START = re.compile(r"([0-9]{4,})-from-step-([0-9]{8,})\.toml")


@dataclasses.dataclass(frozen=True)
class RecordedPlan:
    """The plan that a start has used, which a job may leave to its number of ranks."""

    degrees: dict[str, int]
    """Axis of the mesh, or "ep" -> its degree."""
    samples: int
    """Of a step, over all ranks."""
    ranks: int
    ranks_per_machine: int
    device: str
    """Name of the first rank's GPU as torch reports it, or "cpu"."""


def record_start(folder: Path, text: str, step: int, plan: RecordedPlan | None = None) -> None:
    """Save the job as it starts at `step`: as config.toml, and as a new file in the history of all starts.

    The plan is saved next to the latter.
    """
    history = folder / STARTS_FOLDER
    history.mkdir(parents=True, exist_ok=True)
    numbers = [int(match[1]) for path in history.iterdir() if (match := _START.fullmatch(path.name))]
    path = history / f"{max(numbers, default=0) + 1:04d}-from-step-{step:08d}.toml"
    if plan is not None:
        folders.replace_file(path.with_suffix(".json"), layout.dump_json(dataclasses.asdict(plan)))
    folders.replace_file(path, text)
    folders.replace_file(folder / JOB_FILE, text)


def plan_of_start(file: Path) -> RecordedPlan | None:
    """Return the plan of the start with this job file; None if it is not recorded, as in runs of earlier versions."""
    try:
        record = layout.read_json(file.with_suffix(".json")) if _START.fullmatch(file.name) else {}
        plan = RecordedPlan(**record)
    except (OSError, layout.CheckpointError, TypeError):
        return None
    numbers = [*plan.degrees.values()] if isinstance(plan.degrees, dict) else [None]
    numbers += [plan.samples, plan.ranks, plan.ranks_per_machine]
    is_valid = all(isinstance(number, int) and number > 0 for number in numbers) and isinstance(plan.device, str)
    return plan if is_valid else None


def newest_start(folder: Path) -> Path:
    """Return the file of the job of the last start, or config.toml if no start is recorded."""
    return job_of_step(folder, sys.maxsize)


def job_of_step(folder: Path, step: int) -> Path:
    """Return the file of the job that made a step: of the last start before it, or config.toml if that is not known."""
    history = folder / STARTS_FOLDER
    matches = [(_START.fullmatch(path.name), path) for path in history.iterdir()] if history.is_dir() else []
    starts = [(int(match[1]), path) for match, path in matches if match and int(match[2]) < step]
    return max(starts)[1] if starts else folder / JOB_FILE


def jobs_of_steps(folder: Path, first: int, last: int) -> dict[int, Path]:
    """Return the files of the jobs that made the steps `first` to `last`, by the first step of each start there."""
    history = folder / STARTS_FOLDER
    starts = sorted({step_of_start(path) for path in history.iterdir()} if history.is_dir() else ())
    begins = [first, *(step + 1 for step in starts if first <= step < last)] if first <= last else []
    return {step: job_of_step(folder, step) for step in begins}


def step_of_start(file: Path) -> int:
    """Return the step from which the start with this job file went on; 0 if it is not recorded."""
    match = _START.fullmatch(file.name)
    return int(match[2]) if match else 0


def is_run_folder(folder: Path) -> bool:
    """Return True if `record_start` has written to this folder."""
    starts = folder / STARTS_FOLDER
    return starts.is_dir() and not starts.is_symlink() and any(_START.fullmatch(p.name) for p in starts.iterdir())


def find_misplaced(folder: Path) -> str | None:
    """Describe a folder where a run needs a file, or the reverse; None if there is none."""
    for name in sorted({JOB_FILE, LAST_SAVE_FILE, ROLLBACKS_FILE} | FILES):
        if (folder / name).is_dir():
            return f"{folder / name} is a folder, where a run has a file"
    for name in (STARTS_FOLDER, LOGS_FOLDER, HANGS_FOLDER):
        if os.path.lexists(folder / name) and not (folder / name).is_dir():
            return f"{folder / name} is no folder, where a run has one"
    return None


def is_name_of_any_run(name: str) -> bool:
    """Return True if a top-level name belongs to any run, whatever its options, or is left by a crash."""
    return (
        name in KNOWN_NAMES
        or _EARLIER.fullmatch(name) is not None
        or name.removesuffix(".tmp").removeprefix(".") in KNOWN_NAMES
    )


def record_save(folder: Path, step: int) -> None:
    """Record that this step's checkpoint has been published. A failure to write the record is only logged."""
    try:
        folders.replace_file(folder / LAST_SAVE_FILE, layout.step_name(step) + "\n")
    except OSError as error:
        logger.warning("%s cannot be written: %s", folder / LAST_SAVE_FILE, error)


def newest_step(checkpoints: Path) -> int:
    """Return the step of the newest complete checkpoint in a folder; -1 without one."""
    path, _ = newest_complete(checkpoints)
    step = None if path is None else layout.step_of(path.name)
    return -1 if step is None else step


def record_rollback(folder: Path, step: int) -> bool:
    """Record that the run returns to a checkpoint because its state after `step` is damaged. Return True if it did so
    for this step before, in this process or an earlier one. A record that cannot be written or read is only logged.
    """
    path = folder / ROLLBACKS_FILE
    steps: set[int] = set()
    try:
        if path.exists():
            steps = set(layout.read_json(path)["steps"])
        folders.replace_file(path, layout.dump_json({"steps": sorted(steps | {step})}))
    except (OSError, layout.CheckpointError, KeyError, TypeError) as error:
        logger.warning("%s cannot be used: %s", path, error)
    return step in steps


def describe_run_end(folder: Path, records: Sequence[Record]) -> str:
    """Describe how the last start of a run ended, by its records and its lock; "" if that is not known."""
    held = is_held(folder) if folder.is_dir() else None
    if held:
        return "still at work"
    if held is False:
        reached = f" after step {records[-1]['step']}" if records else ""
        return f"left no end{reached}: it was killed together with its launcher, or its machine failed"
    end = end_of(records)
    return describe_end(end) if end else ""


def last_saved(folder: Path) -> str | None:
    """Return the name of the checkpoint that a run saved last, as it has recorded; None without a record."""
    try:
        name = layout.read_bytes(folder / LAST_SAVE_FILE, most=100).decode(errors="replace").strip()
    except layout.CheckpointError:
        return None
    return None if layout.step_of(name) is None else name


def find_lost_checkpoints(folder: Path, checkpoints: Path) -> str | None:
    """Return evidence that this run has saved before, if its checkpoints are missing; None without evidence."""
    if layout.step_folders(checkpoints):
        return None
    if name := last_saved(folder):
        return f"{name} by {LAST_SAVE_FILE}"
    aside = [path.name for path in checkpoints.glob(".aside-step-*")] if checkpoints.is_dir() else []
    return f"{aside[0]}, moved aside" if aside else None


def export_advice(folder: Path, options: Checkpoint) -> str:
    """Return what to do about a run in this folder that is complete except for its export."""
    if not options.enable or options.load_only:
        return "nothing was saved that could be exported again, as checkpoint.enable is off or load_only is set"
    command = ["torchtitan", "export", str(folder), "--to", "NEW_FOLDER"]
    command += ["--merge", "--dtype", options.export_dtype] if options.last_save_model_only else []
    command += ["--best"] if options.export_best else []
    return f"everything is saved: run `{shlex.join(command)}`, or start the same job again, which then only exports"


# Emptying the folder (job.clean_start)

CLEAN_START = "job.clean_start"
NOT_INPUTS = ("job.dump_folder", "job.description", "job.tags", "data.cache_dir")
"""String options that are not paths, or are paths that only the run itself creates."""
_TOKENIZED = re.compile(r"\.lock|[0-9a-f]{16}")
"""Names of the entries in a folder of tokenized data."""


def empty_folder(config: JobConfig, started_before: int = 0) -> str:
    """Empty job.dump_folder, except for this run's lock, if job.clean_start is set. Return a message for the log.

    A job that SLURM has `started_before` resumes instead. Raises `JobError`, with nothing deleted, if the folder must
    not be emptied; also on a system error, which may leave the folder partly emptied.
    """
    folder = Path(config.job.dump_folder)
    if config.job.clean_start == "never" or not os.path.lexists(folder):
        return ""
    if started_before:
        return f"{folder} is not emptied ({CLEAN_START}): SLURM has started this job before"
    try:
        return _RunFolder(folder, config).empty()
    except OSError as error:
        raise JobError(
            f"{CLEAN_START}: given {config.job.clean_start}, but {error.filename or folder} cannot be read or deleted "
            f"({error.strerror or error}); mend that and start again, empty {folder} yourself, or name another "
            "job.dump_folder"
        ) from None


@dataclasses.dataclass
class _RunFolder:
    """An existing folder, and the job that a new run in it will have."""

    folder: Path
    config: JobConfig

    def empty(self) -> str:
        """Delete the files that a run has left, and return a message. Raises `OSError` if that cannot be done."""
        job_file = self._imported_file()
        entries = [entry for entry in os.scandir(self.folder) if not is_lock(entry.name) and entry.name != job_file]
        if not entries:
            return ""
        if reason := self._reason_not_to(job_file):
            allowed, value = "a folder that one run has made, and nothing else is in", self.config.job.clean_start
            raise JobError(f"{CLEAN_START}: given {value} with {self.folder}; allowed: {allowed}; {reason}")
        for entry in sorted(entries, key=lambda entry: entry.name == STARTS_FOLDER):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
        return f"{self.folder} is emptied of what an earlier run has left ({CLEAN_START}), {len(entries)} entries"

    def _imported_file(self) -> str:
        """Return the name of the job file of `torchtitan import --run` if the job is read from it here, else ""."""
        files = map(_location, self.config.job.config_file)
        return IMPORTED_JOB_FILE if self.folder.resolve() / IMPORTED_JOB_FILE in files else ""

    def _reason_not_to(self, job_file: str) -> str:
        """Return why the folder must not be emptied, or "". `job_file`: the name of a file in it that stays."""
        folder = self.folder
        if folder.is_symlink():
            return f"it is a link to {os.readlink(folder)}: name the folder itself"
        resolved = folder.resolve()
        if resolved == resolved.parent:
            return "it is the root of all files"
        if Path.home().resolve().is_relative_to(resolved):
            return "a home lies in it"
        if Path.cwd().is_relative_to(resolved):
            return "it is the folder that this was started in, or holds it"
        if inside := next(self._inputs(resolved, resolved / job_file), None):
            return f"the job reads {inside}, which lies in it: move that, or name another job.dump_folder"
        if not is_run_folder(resolved):
            return f"no run has left its {STARTS_FOLDER} in it: empty it yourself, or name another job.dump_folder"
        if protected := next(_protected_entries(resolved, self.config.job.clean_start == "always"), ""):
            return protected
        if foreign := next(self._foreign(resolved), None):
            return f"{foreign} is nothing that a run of this job makes: move it, or name another job.dump_folder"
        return ""

    def _inputs(self, root: Path, job_file: Path) -> Iterator[str]:
        """Yield the files that the job reads from the folder, except `job_file`."""
        files = [file for file in self.config.job.config_file if _location(file) != job_file]
        options = as_dict(self.config)
        return _inputs_inside(options | {"job": options["job"] | {"config_file": files}}, root)

    def _foreign(self, root: Path) -> Iterator[Path]:
        """Yield the paths at the top level, or in a folder of tokenized data, that no run of this job writes."""
        config = self.config
        cache = Path(config.data.cache_dir or root / "data").resolve()
        options = [config.checkpoint.folder, config.metrics.save_tb_folder]
        options += [config.profiling.save_traces_folder, config.profiling.save_memory_snapshot_folder]
        allowed = {os.path.normpath(folder).split(os.sep)[0] for folder in options}
        allowed |= entries_of(trackers_of(config.metrics).values())
        if root in cache.parents:
            allowed.add(cache.relative_to(root).parts[0])
        for path in sorted(root.iterdir()):
            if path.name not in allowed and not is_lock(path.name) and not is_name_of_any_run(path.name):
                yield path
        if root in cache.parents and cache.is_dir():
            yield from (path for path in sorted(cache.iterdir()) if not _TOKENIZED.fullmatch(path.name))


def _location(file: str) -> Path:
    """Return the absolute path of a file. Links to folders are followed, and a link to the file is not."""
    return Path(file).parent.resolve() / Path(file).name


def _protected_entries(root: Path, delete_all: bool) -> Iterator[str]:
    """Yield messages about anything in the folder, at any depth, that must not be deleted."""
    for folder, subfolders, files in os.walk(root, onerror=_raise):
        path, names = Path(folder), sorted([*subfolders, *files])
        if ".git" in names:
            yield f"{path} is a work tree of git"
        if path != root and (STARTS_FOLDER in names or any(map(is_lock, names))):
            yield f"{path} is another run's folder: move it, or name another job.dump_folder"
        if path != root and os.path.ismount(path):
            yield f"another disk is mounted at {path}: empty it yourself, or name another job.dump_folder"
        if delete_all:
            continue
        for name in names:
            if (step := layout.step_of(name)) is not None or name.startswith(".aside-step-"):
                contents = "a step" if step is None else f"step {step}"
                yield f'{contents} is saved in it, {path / name}: for this to go too write "always"'
            if path == root and name in EXPORTS:
                yield f'the weights of a run are in it, {name}: for these to go too write "always"'


def _raise(error: OSError) -> None:
    raise error


def _inputs_inside(value: Any, folder: Path, name: str = "") -> Iterator[str]:
    """Yield the job's strings that name a file, folder or glob in `folder`, except the run's own output."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _inputs_inside(item, folder, f"{name}.{key}".strip("."))
    elif isinstance(value, list):
        for item in value:
            yield from _inputs_inside(item, folder, name)
    elif isinstance(value, str) and value and "\0" not in value and name not in NOT_INPUTS:
        fixed = value[: min((value.index(sign) for sign in "*?[" if sign in value), default=len(value))]
        try:
            path = Path(value)
            candidates = [path.resolve()] if fixed == value else [path.resolve(), Path(fixed).parent.resolve()]
            is_inside = any(candidate.is_relative_to(folder) and candidate.exists() for candidate in candidates)
            if fixed != value:
                matches = (Path(match).resolve() for match in glob.iglob(str(path), recursive=True))
                is_inside = is_inside or any(folder in match.parents for match in matches)
            if is_inside:
                yield f"{value} ({name})"
        except (OSError, RuntimeError):  # not a valid path
            return
