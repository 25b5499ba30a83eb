"""Files of a run in job.dump_folder in addition to checkpoints and metrics.

They include the job of every start and the step of the last save, which distinguishes a folder that lost its
checkpoints from a new one. Needs no torch.
"""

import logging
import os
import re
import shlex
from pathlib import Path

from torchtitan.checkpoint import folders, layout
from torchtitan.config.job import JobConfig

logger = logging.getLogger(__name__)

JOB, STARTS, LAST = "config.toml", "starts", "last_checkpoint"
IMPORTED = "imported.toml"
"""The job file that `torchtitan import --run` starts a run from."""
LOGS = "logs"
"""Folder of log files, one per rank, if the job asks for them."""
EXPORTS = {"model", "model_hf", "adapter"}
"""The weights exported at the end of a run."""
HANGS = "hangs"
"""Folder with the stacks of all ranks during hangs."""
WAYS_BACK = "ways_back.json"
"""The steps after which the run found its weights or optimizer state damaged and returned to a checkpoint."""
SECRET = "launch.secret"
"""Authenticates the launchers of several machines to each other while the run lasts."""
REFERENCE = "reference.safetensors"
PICTURE = "training.png"
FILES = {"metrics.jsonl", "generated.jsonl", PICTURE, REFERENCE}
OWN = {JOB, STARTS, LAST, WAYS_BACK, IMPORTED, LOGS, "data", HANGS, SECRET} | FILES | EXPORTS
"""Names at the top level of the folder that do not depend on options."""
_EARLIER = re.compile(r"(metrics|generated)\.(previous(-[0-9]+)?|redone)\.jsonl")
_START = re.compile(r"([0-9]{4,})-from-step-[0-9]{8,}\.toml")


def keep_job(folder: Path, text: str, step: int) -> None:
    """Save the job as it starts at `step`: as config.toml, and as a new file in the history of all starts."""
    history = folder / STARTS
    history.mkdir(parents=True, exist_ok=True)
    numbers = [int(match[1]) for path in history.iterdir() if (match := _START.fullmatch(path.name))]
    folders.replace_file(history / f"{max(numbers, default=0) + 1:04d}-from-step-{step:08d}.toml", text)
    folders.replace_file(folder / JOB, text)


def is_of_a_run(folder: Path) -> bool:
    """Return True if `keep_job` has written to this folder."""
    starts = folder / STARTS
    return starts.is_dir() and not starts.is_symlink() and any(_START.fullmatch(p.name) for p in starts.iterdir())


def out_of_place(folder: Path) -> str | None:
    """Describe a folder where a run needs a file, or the reverse; None if there is none."""
    for name in sorted({JOB, LAST, WAYS_BACK} | FILES):
        if (folder / name).is_dir():
            return f"{folder / name} is a folder, where a run has a file"
    for name in (STARTS, LOGS, HANGS):
        if os.path.lexists(folder / name) and not (folder / name).is_dir():
            return f"{folder / name} is no folder, where a run has one"
    return None


def is_of_every_run(name: str) -> bool:
    """Return True if a top-level name belongs to any run, whatever its options, or is left by a crash."""
    return name in OWN or _EARLIER.fullmatch(name) is not None or name.removesuffix(".tmp").removeprefix(".") in OWN


def note_saved(folder: Path, step: int) -> None:
    """Record that this step's checkpoint has been published. A failure to write the record is only logged."""
    try:
        folders.replace_file(folder / LAST, layout.step_name(step) + "\n")
    except OSError as error:
        logger.warning("%s cannot be written: %s", folder / LAST, error)


def note_way_back(folder: Path, step: int) -> bool:
    """Record that the run returns to a checkpoint because its state after `step` is damaged. Return True if it did so
    for this step before, in this process or an earlier one. A record that cannot be written or read is only logged.
    """
    path = folder / WAYS_BACK
    steps: set[int] = set()
    try:
        if path.exists():
            steps = set(layout.read_json(path)["steps"])
        folders.replace_file(path, layout.dump_json({"steps": sorted(steps | {step})}))
    except (OSError, layout.CheckpointError, KeyError, TypeError) as error:
        logger.warning("%s cannot be used: %s", path, error)
    return step in steps


def missing_checkpoints(folder: Path, checkpoints: Path) -> str | None:
    """Return evidence that this run has saved before, if its checkpoints are missing; None without evidence."""
    if layout.step_folders(checkpoints):
        return None
    try:
        name = layout.read_bytes(folder / LAST, most=100).decode(errors="replace").strip()
    except layout.CheckpointError:
        name = ""
    if layout.step_of(name) is not None:
        return f"{name} by {LAST}"
    aside = [path.name for path in checkpoints.glob(".aside-step-*")] if checkpoints.is_dir() else []
    return f"{aside[0]}, moved aside" if aside else None


def how_to_export(config: JobConfig) -> str:
    """Return what to do about a run of this job that is complete except for its export."""
    options = config.checkpoint
    if not options.enable or options.load_only:
        return "nothing was saved that could be exported again, as checkpoint.enable is off or load_only is set"
    command = ["torchtitan", "export", str(Path(config.job.dump_folder)), "--to", "NEW_FOLDER"]
    command += ["--merge", "--dtype", options.export_dtype] if options.last_save_model_only else []
    command += ["--best"] if options.export_best else []
    return f"everything is saved: run `{shlex.join(command)}`, or start the same job again, which then only exports"
