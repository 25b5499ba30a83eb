"""Which kind of weights lies at a path: ours, torchtitan's own, or in the form of Hugging Face. Needs no torch."""

import re
from pathlib import Path
from typing import Literal

from torchtitan.checkpoint.layout import MANIFEST, METADATA, NothingLoadable, resolve, step_folders

Kind = Literal["ours", "torchtitan", "hf"]
THEIR_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
ALLOWED = "a checkpoint, a folder of them, an export, a folder of Hugging Face or a .safetensors file"


def find_weights(path: Path) -> tuple[Kind, Path]:
    """The kind, and what holds it: of a folder of checkpoints, or a run's, the newest complete one.

    Raises `NothingLoadable` where there is neither.
    """
    if path.is_file():
        if path.suffix != ".safetensors":
            raise NothingLoadable(f"{path}: a file of another kind; give {ALLOWED}")
        return "hf", path
    if (path / MANIFEST).exists():
        return "ours", path
    if (path / METADATA).is_file():
        return "torchtitan", path
    for folder in (path, path / "checkpoint"):
        if step_folders(folder):
            return "ours", resolve(folder)
        if theirs := _steps_of_torchtitan(folder):
            return "torchtitan", theirs[-1]
    # last, as a run on pairs keeps what its reference says as such a file
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").is_file():
        return "hf", path
    what = "not a regular file" if path.exists() else "no such file or folder"
    found = "no weights in it" if path.is_dir() else what
    raise NothingLoadable(f"{path}: {found}; give {ALLOWED}")


def _steps_of_torchtitan(folder: Path) -> list[Path]:
    """Oldest first: `step-4`, without the zeros of ours, whose metadata are written last."""
    named = {int(match[1]): each for each in folder.glob("step-*") if (match := THEIR_STEP.fullmatch(each.name))}
    return [named[step] for step in sorted(named) if (named[step] / METADATA).is_file()]
