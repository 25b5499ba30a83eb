"""Emptying a run's folder before a new run begins in it (job.clean_start): only what is certainly a run's, and nothing
that somebody could miss. Needs no torch.

A folder is a run's by what `run_folder.keep_job` leaves in it, and is refused with anything at its top that no run of
this job makes. Links are removed and never followed. The job that `torchtitan import --run` has written into it stays
where the run is started by it. What marks the folder goes last, so that an end in the midst
leaves a folder that can be emptied by the next start.
"""

import dataclasses
import glob
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan.checkpoint import layout
from torchtitan.config.job import JobConfig, as_dict, trackers_of
from torchtitan.core.errors import JobError
from torchtitan.launcher.lock import is_lock
from torchtitan.launcher.run_folder import EXPORTS, IMPORTED, STARTS, is_of_a_run, is_of_every_run
from torchtitan.metrics.trackers import left_by

KEY = "job.clean_start"
NO_PLACES = ("job.dump_folder", "job.description", "job.tags", "data.cache_dir")
"""Options whose texts name no file, or only what the run itself has made."""
_TOKENIZED = re.compile(r"\.lock|[0-9a-f]{16}")
"""What lies in a folder of tokenized data."""


def clean(config: JobConfig, started_before: int = 0) -> str:
    """Empty job.dump_folder, if the job says so, but for the lock of this run, which holds it; what was done, in words.
    A job that SLURM has `started_before` goes on. JobError, with nothing deleted, where it may not be emptied; also
    where the system fails, which may be in the midst.
    """
    folder = Path(config.job.dump_folder)
    if config.job.clean_start == "never" or not os.path.lexists(folder):
        return ""
    if started_before:
        return f"{folder} is not emptied ({KEY}): SLURM has started this job before"
    try:
        return _empty(config, folder)
    except OSError as error:
        what = f"{error.filename or folder} cannot be read or deleted ({error.strerror or error})"
        remedy = "mend that and start again, empty it yourself, or name another job.dump_folder"
        raise JobError(f"{KEY}: given {config.job.clean_start} with {folder}, of which {what}; {remedy}") from None


def _empty(config: JobConfig, folder: Path) -> str:
    config, started_by = _beside_its_file(config, folder)
    entries = [entry for entry in os.scandir(folder) if not is_lock(entry.name) and entry.name != started_by]
    if not entries:
        return ""
    if reason := why_not(config, folder):
        allowed = "a folder that one run has made, and nothing else is in"
        raise JobError(f"{KEY}: given {config.job.clean_start} with {folder}; allowed: {allowed}; {reason}")
    for entry in sorted(entries, key=lambda entry: entry.name == STARTS):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
    return f"{folder} is emptied of what an earlier run has left ({KEY}), {len(entries)} entries"


def _beside_its_file(config: JobConfig, folder: Path) -> tuple[JobConfig, str]:
    """The job without the file of `torchtitan import --run` in this folder, and its name; nothing where it has none."""
    own = folder.resolve() / IMPORTED
    files = [file for file in config.job.config_file if Path(file).parent.resolve() / Path(file).name != own]
    if files == config.job.config_file:
        return config, ""
    return dataclasses.replace(config, job=dataclasses.replace(config.job, config_file=files)), IMPORTED


def why_not(config: JobConfig, folder: Path) -> str:
    """Why the folder, which is there, may not be emptied; nothing if it may. OSError where it cannot be looked at."""
    if folder.is_symlink():
        return f"it is a link to {os.readlink(folder)}: name the folder itself"
    here = folder.resolve()
    if here == here.parent:
        return "it is the root of all files"
    if Path.home().resolve().is_relative_to(here):
        return "a home lies in it"
    if Path.cwd().is_relative_to(here):
        return "it is the folder that this was started in, or holds it"
    if inside := next(_named_inside(as_dict(config), here), None):
        return f"the job reads {inside}, which lies in it: move that, or name another job.dump_folder"
    if not is_of_a_run(here):
        return f"no run has left its {STARTS} in it: empty it yourself, or name another job.dump_folder"
    if held := next(_held(here, config.job.clean_start == "always"), ""):
        return held
    if foreign := next(_foreign(config, here), None):
        return f"{foreign} is nothing that a run of this job makes: move it, or name another job.dump_folder"
    return ""


def _held(here: Path, always: bool) -> Iterator[str]:
    """What lies anywhere in it that is not to go, in words."""
    for folder, folders, files in os.walk(here, onerror=_raise):
        place, names = Path(folder), sorted([*folders, *files])
        if ".git" in names:
            yield f"{place} is a work tree of git"
        if place != here and (STARTS in names or any(map(is_lock, names))):
            yield f"{place} is another run's folder: move it, or name another job.dump_folder"
        if place != here and os.path.ismount(place):
            yield f"another disk is mounted at {place}: empty it yourself, or name another job.dump_folder"
        if always:
            continue
        for name in names:
            if (step := layout.step_of(name)) is not None or name.startswith(".aside-step-"):
                what = "a step" if step is None else f"step {step}"
                yield f'{what} is saved in it, {place / name}: for this to go too write "always"'
            if place == here and name in EXPORTS:
                yield f'the weights of a run are in it, {name}: for these to go too write "always"'


def _raise(error: OSError) -> None:
    raise error


def _foreign(config: JobConfig, here: Path) -> Iterator[Path]:
    """What lies at the top, or in a folder of tokenized data, and no run of this job has put there."""
    cache = Path(config.data.cache_dir or here / "data").resolve()
    options = [config.checkpoint.folder, config.metrics.save_tb_folder]
    options += [config.profiling.save_traces_folder, config.profiling.save_memory_snapshot_folder]
    own = {os.path.normpath(folder).split(os.sep)[0] for folder in options} | left_by(trackers_of(config).values())
    if here in cache.parents:
        own.add(cache.relative_to(here).parts[0])
    for path in sorted(here.iterdir()):
        if path.name not in own and not is_lock(path.name) and not is_of_every_run(path.name):
            yield path
    if here in cache.parents and cache.is_dir():
        yield from (path for path in sorted(cache.iterdir()) if not _TOKENIZED.fullmatch(path.name))


def _named_inside(said: Any, folder: Path, name: str = "") -> Iterator[str]:
    """Texts of the job that name a file, a folder or a glob inside of it, but what the run itself puts there."""
    if isinstance(said, dict):
        for key, value in said.items():
            yield from _named_inside(value, folder, f"{name}.{key}".strip("."))
    elif isinstance(said, list):
        for value in said:
            yield from _named_inside(value, folder, name)
    elif isinstance(said, str) and said and "\0" not in said and name not in NO_PLACES:
        fixed = said[: min((said.index(sign) for sign in "*?[" if sign in said), default=len(said))]
        try:
            place = Path(said)
            known = [place.resolve()] if fixed == said else [place.resolve(), Path(fixed).parent.resolve()]
            found = any(each.is_relative_to(folder) and each.exists() for each in known)
            if fixed != said:
                matches = (Path(match).resolve() for match in glob.iglob(str(place), recursive=True))
                found = found or any(folder in match.parents for match in matches)
            if found:
                yield f"{said} ({name})"
        except (OSError, RuntimeError):  # no name that a file can have
            return
