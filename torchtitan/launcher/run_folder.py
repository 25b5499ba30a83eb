"""What a run keeps in job.dump_folder beside checkpoints and metrics: the job of every start, and which step was saved
last, from which a folder of checkpoints that has been emptied is told from one that is new. Needs no torch.
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
"""What `torchtitan import --run` starts a run by."""
LOGS = "logs"
"""A file for each rank, of runs that are asked for them."""
EXPORTS = {"model", "model_hf", "adapter"}
"""The weights that a run has ended with."""
HANGS = "hangs"
"""Stacks of all ranks."""
WAYS_BACK = "ways_back.json"
"""The steps after which the run found its weights or optimizer state damaged and returned to a checkpoint."""
SECRET = "launch.secret"
"""By which the launchers of several machines know each other while the run lasts."""
REFERENCE = "reference.safetensors"
PICTURE = "training.png"
FILES = {"metrics.jsonl", "generated.jsonl", PICTURE, REFERENCE}
OWN = {JOB, STARTS, LAST, WAYS_BACK, IMPORTED, LOGS, "data", HANGS, SECRET} | FILES | EXPORTS
"""Names at the top of the folder that no option says."""
_EARLIER = re.compile(r"(metrics|generated)\.(previous(-[0-9]+)?|redone)\.jsonl")
_START = re.compile(r"([0-9]{4,})-from-step-[0-9]{8,}\.toml")


def keep_job(folder: Path, text: str, step: int) -> None:
    """The job as it starts at `step`: as config.toml, and beside it, never overwritten, among those of all starts."""
    history = folder / STARTS
    history.mkdir(parents=True, exist_ok=True)
    numbers = [int(match[1]) for path in history.iterdir() if (match := _START.fullmatch(path.name))]
    folders.replace_file(history / f"{max(numbers, default=0) + 1:04d}-from-step-{step:08d}.toml", text)
    folders.replace_file(folder / JOB, text)


def is_of_a_run(folder: Path) -> bool:
    """Whether `keep_job` has been at work in it."""
    starts = folder / STARTS
    return starts.is_dir() and not starts.is_symlink() and any(_START.fullmatch(p.name) for p in starts.iterdir())


def out_of_place(folder: Path) -> str | None:
    """What is a folder where a run has a file, or the other way round; None if nothing is."""
    for name in sorted({JOB, LAST, WAYS_BACK} | FILES):
        if (folder / name).is_dir():
            return f"{folder / name} is a folder, where a run has a file"
    for name in (STARTS, LOGS, HANGS):
        if os.path.lexists(folder / name) and not (folder / name).is_dir():
            return f"{folder / name} is no folder, where a run has one"
    return None


def is_of_every_run(name: str) -> bool:
    """Whether what is called so, at the top of the folder, is a run's whatever its options; or is left by a crash."""
    return name in OWN or _EARLIER.fullmatch(name) is not None or name.removesuffix(".tmp").removeprefix(".") in OWN


def note_saved(folder: Path, step: int) -> None:
    """That this step's checkpoint has been published. A note that cannot be written fails nothing."""
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
    """What shows that this run has saved before, where there is no checkpoint to be seen; None if nothing does."""
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
