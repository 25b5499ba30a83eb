"""What a checkpoint that holds an adapter alone says of the model that it belongs to: where it was, and its content's
digest. Needs no torch.
"""

import hashlib
from pathlib import Path
from typing import Any

from torchtitan.checkpoint.kinds import Kind, find_weights
from torchtitan.checkpoint.layout import MANIFEST, METADATA, CheckpointError, sha256_of

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


def _files_of(folder: Path, kind: Kind) -> list[Path]:
    if kind == "torchtitan":
        return [*folder.glob("*.distcp"), folder / METADATA]
    return [*folder.glob("*.safetensors"), folder / "config.json"]


def _of_files(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.name} {sha256_of(path)}\n".encode())
    return digest.hexdigest()
