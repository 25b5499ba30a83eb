"""Find initial weights, identify the base model of an adapter, and tell what a job takes from them. Needs no torch.

Determines the format of the weights at a path (native, of PyTorch's torchtitan or Hugging Face's) and how far they were
trained, as recorded in their folder. For a checkpoint with only an adapter, records the path and digest of its base
model. A run that resumes tokenizes by the rules with which it began.
"""

import hashlib
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torchtitan.checkpoint.hashed_files import sha256_of
from torchtitan.checkpoint.layout import (
    MANIFEST,
    METADATA,
    CheckpointError,
    NothingLoadable,
    complete_steps,
    newest_complete,
    read_json,
    read_manifest,
    read_state,
    resolve,
    step_folders,
    step_of,
)
from torchtitan.config.changes import DEFAULTS, saved_value
from torchtitan.config.sections.field_types import Precision
from torchtitan.core.files import TOKENIZATION_VERSION
from torchtitan.models.hf.config import INDEX, unreadable_weights
from torchtitan.models.hf.config_keys import ROUNDED

Kind = Literal["native", "torchtitan", "hf"]
THEIR_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
ALLOWED = "a checkpoint, a folder of them, an export, a folder of Hugging Face or a .safetensors file"


def find_weights(path: Path) -> tuple[Kind, Path]:
    """Return the format of the weights at a path, and the file or folder with the weights. In a folder of checkpoints
    or a run's folder, this is the newest complete checkpoint.

    Raises `NothingLoadable` if there are none.
    """
    if path.is_file():
        if path.suffix != ".safetensors" and (other := unreadable_weights(path)):
            raise NothingLoadable(f"{path}: {other}")
        if path.suffix != ".safetensors":
            raise NothingLoadable(f"{path}: a file of another kind; give {ALLOWED}")
        return "hf", path
    if (path / MANIFEST).exists():
        return "native", path
    if (path / METADATA).is_file():
        return "torchtitan", path
    for folder in (path, path / "checkpoint"):
        if step_folders(folder):
            return "native", resolve(folder)
        if steps := _steps_of_torchtitan(folder):
            return "torchtitan", steps[-1]
    # checked last, because preference training stores reference log-probabilities in such a file
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").is_file():
        return "hf", path
    if other := unreadable_weights(path):
        raise NothingLoadable(f"{path}: {other}")
    fault = "not a regular file" if path.exists() else "no such file or folder"
    problem = "no weights in it" if path.is_dir() else fault
    raise NothingLoadable(f"{path}: {problem}; give {ALLOWED}")


def _steps_of_torchtitan(folder: Path) -> list[Path]:
    """Return the step folders of PyTorch's torchtitan, oldest first: `step-4`, without leading zeros. Only those with
    metadata, which are written last, are complete.
    """
    folders = {int(match[1]): path for path in folder.glob("step-*") if (match := THEIR_STEP.fullmatch(path.name))}
    return [folders[step] for step in sorted(folders) if (folders[step] / METADATA).is_file()]


def rounding_of(place: Path) -> Any:
    """Return the options of [qat] that the weights of a folder are rounded with; None if they are not."""
    try:
        metadata = read_json(place / INDEX).get("metadata")
    except (OSError, CheckpointError):
        return None
    return metadata.get(ROUNDED) if isinstance(metadata, dict) else None


SCHEDULE_START = "schedule_start"
"""Key in the trainer's state: the step at which the learning rate schedule began."""

TRAINING_STATE = "training_state.json"
"""Written next to the weights by ReLoRA's scripts: {update_step, tokens_seen, ...}."""


class Counters(NamedTuple):
    step: int
    tokens: int


def counters_of(kind: Kind, place: Path) -> Counters | None:
    """Return step and tokens of weights from `find_weights`; None if they are not recorded, e.g. for an export."""
    try:
        if kind == "native":
            record, names = read_state(place)["trainer"], ("step", "tokens")
        else:
            folder = place if place.is_dir() else place.parent
            record, names = read_json(folder / TRAINING_STATE), ("update_step", "tokens_seen")
    except (OSError, CheckpointError):
        return None
    step, tokens = (record.get(name, 0) for name in names)
    return Counters(step, tokens) if type(step) is int and type(tokens) is int and step > 0 else None


def schedule_start(dump_folder: str, options: Any) -> int:
    """Return the step at which the learning rate schedule of a run begins or began, from its section [checkpoint]. 0 if
    nothing can be read, which loading and the rules report.
    """
    try:
        complete, _ = complete_steps(Path(dump_folder, options.folder)) if options.enable else ([], [])
        if complete:
            return int(read_state(complete[0])["trainer"].get(SCHEDULE_START, 0))
        if not options.initial_load_counters or options.initial_load_path is None:
            return 0
        counters = counters_of(*find_weights(Path(options.initial_load_path)))
        return 0 if counters is None else counters.step
    except (OSError, ValueError, TypeError, CheckpointError):
        return 0


KEY = "base"
"""Key in the trainer's state."""


def describe_base(path: str) -> dict[str, str]:
    """Return path and digest of a base model: a checkpoint of this project, the newest in a folder of them, or weights
    of another format, which are read completely.
    """
    kind, place = find_weights(Path(path))
    if kind == "native":
        digest = sha256_of(place / MANIFEST)  # it lists the digests of all other files
    else:
        digest = _digest_of([place] if place.is_file() else _files_of(place, kind))
    return {"path": str(Path(path).resolve()), "sha256": digest}


def adapter_save(adapter: Any, options: Any, dump_folder: str) -> Literal["whole", "alone"]:
    """Return the value of adapter.save for a job with these sections [adapter] and [checkpoint]. If it is unset, a run
    with checkpoints keeps their form, and a new run saves the adapter alone if it starts from weights that stay in
    place.
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


def frozen_dtype(training: Any, adapter: Any, options: Any, dump_folder: str) -> Precision | None:
    """Return training.frozen_dtype of a job with these sections [training], [adapter] and [checkpoint]. If it is unset,
    a run with checkpoints keeps the type that it began with.

    None if no weights are frozen, or if all are in bfloat16 anyway.
    """
    if training.dtype == "bfloat16" or (adapter.kind == "none" and not training.unfrozen):
        return None
    if training.frozen_dtype is not None:
        return training.frozen_dtype
    key, checkpoints = "training.frozen_dtype", Path(dump_folder, options.folder)
    for folder in complete_steps(checkpoints)[0] if options.enable else []:
        if options.load_step not in (-1, step_of(folder.name)):
            continue
        try:
            job = read_state(folder)["trainer"].get("job")
        except (OSError, ValueError, CheckpointError):
            continue  # loading takes the next one too
        return "bfloat16" if saved_value(job, key, DEFAULTS[key]) == "bfloat16" else "float32"
    return "float32" if adapter.relora.every is not None else training.mixed_precision_param


def _stays(path: Path) -> bool:
    """Return True if the path itself holds weights. In a folder of checkpoints the newest would be used, which may be
    another one by the time of a resume, and retention deletes it.
    """
    try:
        return find_weights(path)[1] == path
    except (OSError, CheckpointError):
        return False


def base_bytes(path: str) -> int:
    """Return the number of bytes that `describe_base` reads."""
    kind, place = find_weights(Path(path))
    files = [place / MANIFEST] if kind == "native" else [place] if place.is_file() else _files_of(place, kind)
    return sum(file.stat().st_size for file in files if file.exists())


def refuse_other_base(saved: dict[str, Any], job: dict[str, str]) -> None:
    """Raise `CheckpointError` unless the trainer's state `saved` belongs to the same base model."""
    base = saved.get(KEY)
    if not isinstance(base, dict):
        raise CheckpointError(
            'it holds a whole model, the job an adapter alone: write adapter.save = "whole", or start in another '
            "job.dump_folder"
        )
    if base.get("sha256") != job["sha256"]:
        raise CheckpointError(
            f"it holds an adapter to the model that was in {base.get('path')} (sha256 "
            f"{str(base.get('sha256'))[:12]}), but {job['path']} holds another (sha256 {job['sha256'][:12]}); give "
            f"the first as checkpoint.initial_load_path"
        )


def refuse_adapter_alone(folder: Path) -> None:
    """Raise `CheckpointError` if a checkpoint of this project holds no full model that another job could start from."""
    base = read_state(folder)["trainer"].get(KEY)
    if isinstance(base, dict) and read_manifest(folder).kind == "full":
        raise CheckpointError(
            f"{folder} holds an adapter alone, and its model is in {base.get('path')}: merge the two by `torchtitan "
            f'export {folder} --to NEW_FOLDER --merge` and start from that folder, or write adapter.save = "whole" in '
            "the first job"
        )


def _files_of(folder: Path, kind: Kind) -> list[Path]:
    if kind == "torchtitan":
        return [*folder.glob("*.distcp"), folder / METADATA]
    return [*folder.glob("*.safetensors"), folder / "config.json"]


def _digest_of(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.name} {sha256_of(path)}\n".encode())
    return digest.hexdigest()


VERSION_WITHOUT_RECORD = 2
"""Version of runs whose job does not record it."""


def tokenization_version(data: Any, options: Any, run: Any) -> int:
    """Return data.tokenization_version of a job with these sections [data], [checkpoint] and [job]. If it is unset,
    that of the run's newest checkpoint; a new run has none.

    A checkpoint that cannot be read is reported when it is loaded."""
    is_new = not options.enable or run.clean_start == "always"
    if data.tokenization_version is not None or is_new:
        return data.tokenization_version or TOKENIZATION_VERSION
    try:
        newest, _ = newest_complete(Path(run.dump_folder, options.folder))
        job = None if newest is None else read_state(newest)["trainer"].get("job", {})
    except (OSError, ValueError, KeyError):  # CheckpointError, or an invalid folder name
        return TOKENIZATION_VERSION
    return (
        TOKENIZATION_VERSION if job is None else job.get("data", {}).get("tokenization_version", VERSION_WITHOUT_RECORD)
    )
