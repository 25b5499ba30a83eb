"""What a checkpoint that holds an adapter alone says of the model that it belongs to: where it was, and its content's
digest. Needs no torch.
"""

import hashlib
from pathlib import Path
from typing import Any, Literal

from torchtitan.checkpoint.kinds import Kind, find_weights
from torchtitan.checkpoint.layout import (
    MANIFEST,
    METADATA,
    CheckpointError,
    complete_steps,
    read_manifest,
    read_state,
    sha256_of,
)

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
