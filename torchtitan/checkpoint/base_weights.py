"""Which kind of weights lies at a path: ours, torchtitan's own, or in the form of Hugging Face. Needs no torch.

How far the weights were trained that another run starts from: what their folder says of it. Needs no torch.

What a checkpoint that holds an adapter alone says of the model that it belongs to: where it was, and its content's
digest. Needs no torch.
"""

import hashlib
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torchtitan.checkpoint.layout import (
    MANIFEST,
    METADATA,
    CheckpointError,
    NothingLoadable,
    complete_steps,
    read_json,
    read_manifest,
    read_state,
    resolve,
    sha256_of,
    step_folders,
)

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


SCHEDULE_START = "schedule_start"
"""In the trainer's state: the step at which the schedule of the learning rate began."""

TRAINING_STATE = "training_state.json"
"""Beside the weights of ReLoRA's scripts: {update_step, tokens_seen, ...}."""


class Counters(NamedTuple):
    step: int
    tokens: int


def counters_of(kind: Kind, place: Path) -> Counters | None:
    """Of weights that `find_weights` found; None where nothing is said, as beside an export."""
    try:
        if kind == "ours":
            said, names = read_state(place)["trainer"], ("step", "tokens")
        else:
            beside = place if place.is_dir() else place.parent
            said, names = read_json(beside / TRAINING_STATE), ("update_step", "tokens_seen")
    except (OSError, CheckpointError):
        return None
    step, tokens = (said.get(name, 0) for name in names)
    return Counters(step, tokens) if type(step) is int and type(tokens) is int and step > 0 else None


def schedule_start(dump_folder: str, options: Any) -> int:
    """The step at which the schedule of a run begins or began, by its options in the section [checkpoint]. 0 where
    nothing can be read, which loading and the rules have words for.
    """
    try:
        complete, _ = complete_steps(Path(dump_folder, options.folder)) if options.enable else ([], [])
        if complete:
            return int(read_state(complete[0])["trainer"].get(SCHEDULE_START, 0))
        if not options.initial_load_counters or options.initial_load_path is None:
            return 0
        found = counters_of(*find_weights(Path(options.initial_load_path)))
        return 0 if found is None else found.step
    except (OSError, ValueError, TypeError, CheckpointError):
        return 0


KEY = "base"
"""In the trainer's state."""


def reference(path: str) -> dict[str, str]:
    """To a checkpoint of ours, a folder of them (its newest), or weights of others, which are read whole."""
    kind, place = find_weights(Path(path))
    if kind == "ours":
        digest = sha256_of(place / MANIFEST)  # which has the digests of all other files
    else:
        digest = _of_files([place] if place.is_file() else _files_of(place, kind))
    return {"path": str(Path(path).resolve()), "sha256": digest}


def adapter_save(adapter: Any, options: Any, dump_folder: str) -> Literal["whole", "alone"]:
    """Return the value of adapter.save for a job with these sections [adapter] and [checkpoint]. If it is unset, a run
    that has checkpoints keeps their form, and a new one saves the adapter alone if it starts from a folder that stays.
    """
    if adapter.save is not None:
        return adapter.save
    if adapter.kind == "none" or not options.enable:
        return "whole"
    try:
        complete, _ = complete_steps(Path(dump_folder, options.folder))
        if complete:
            return "alone" if KEY in read_state(complete[0])["trainer"] else "whole"
    except (OSError, ValueError, CheckpointError):
        return "whole"  # loading reports the error
    changes_the_model = adapter.relora.every is not None or not options.initial_load_model_only
    path = options.initial_load_path
    return "alone" if path is not None and not changes_the_model and _stays(Path(path)) else "whole"


def _stays(path: Path) -> bool:
    """Return True if the path itself holds weights. Of a folder of checkpoints the newest is taken, which another may
    be by the time of a resume, and retention deletes it.
    """
    try:
        return find_weights(path)[1] == path
    except (OSError, CheckpointError):
        return False


def size(path: str) -> int:
    """Bytes that `reference` reads."""
    kind, place = find_weights(Path(path))
    files = [place / MANIFEST] if kind == "ours" else [place] if place.is_file() else _files_of(place, kind)
    return sum(file.stat().st_size for file in files if file.exists())


def refuse_another(saved: dict[str, Any], here: dict[str, str]) -> None:
    """CheckpointError unless the trainer's state `saved` is of the same base."""
    given = saved.get(KEY)
    if not isinstance(given, dict):
        raise CheckpointError(
            'it holds a whole model, the job an adapter alone: write adapter.save = "whole", or start in another '
            "job.dump_folder"
        )
    if given.get("sha256") != here["sha256"]:
        raise CheckpointError(
            f"it holds an adapter to the model that was in {given.get('path')} (sha256 "
            f"{str(given.get('sha256'))[:12]}), but {here['path']} holds another (sha256 {here['sha256'][:12]}); give "
            f"the first as checkpoint.initial_load_path"
        )


def refuse_adapter_alone(folder: Path) -> None:
    """CheckpointError if a checkpoint of ours holds no model that another job could start from."""
    given = read_state(folder)["trainer"].get(KEY)
    if isinstance(given, dict) and read_manifest(folder).kind == "full":
        raise CheckpointError(
            f"{folder} holds an adapter alone, and its model is in {given.get('path')}: merge the two by `torchtitan "
            f'export {folder} --to NEW_FOLDER --merge` and start from that folder, or write adapter.save = "whole" in '
            "the first job"
        )


def _files_of(folder: Path, kind: Kind) -> list[Path]:
    if kind == "torchtitan":
        return [*folder.glob("*.distcp"), folder / METADATA]
    return [*folder.glob("*.safetensors"), folder / "config.json"]


def _of_files(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.name} {sha256_of(path)}\n".encode())
    return digest.hexdigest()
