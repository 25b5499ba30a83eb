"""Layout of a checkpoint on disk, and how checkpoints are found and validated. Needs no torch, and executes nothing
that it reads.

A checkpoint is bad (`CheckpointError`) only for what its files are or hold. Where the machine cannot read them, all
functions here raise `MachineError`, which says nothing of the checkpoint.

checkpoint/step-00000500/      published by one rename, never written again
    __0_0.distcp ...           tensors, by torch.distributed.checkpoint, up to four files per rank
    .metadata                  index of the tensors in these files
    state.json                 everything that is not a tensor
    rank_0.json ...            large state that only the same rank needs
    manifest.json              written last: size and checksum of all other files; required for a checkpoint
checkpoint/.tmp-NAME-NONCE/    being written, or left over from a crash
checkpoint/.aside-NAME-NONCE/  was in the way of a save: kept for the user to inspect, never read
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from torchtitan.checkpoint.hashed_files import hash_files
from torchtitan.core.errors import JobError
from torchtitan.core.files import FileError, read_file
from torchtitan.core.machine_errors import RIGHTS, MachineError, retried
from torchtitan.core.progress_bar import progress_bar

FORMAT = 1
MANIFEST, STATE, METADATA = "manifest.json", "state.json", ".metadata"
MODEL, OPTIMIZER, ADAPTER_STATE, CALLBACK = "model.", "optimizer.", "kept.", "callback."
"""Prefixes of tensor names. ADAPTER_STATE is followed by the number of its rank, CALLBACK by the callback's name."""

SEPARATE_STATE = ("rng",)
"""Parts of a rank's state in a separate file; older checkpoints have them in state.json, which all ranks read."""

_STEP = re.compile(r"step-([0-9]{8,})")
_FILE = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
_STRICT = ConfigDict(extra="forbid", strict=True)
LARGEST_TEXT = 1 << 30
"""Largest manifest or state in bytes; the state of 100,000 ranks is half of it."""


class CheckpointError(JobError):
    """A checkpoint cannot be written or read. The message names the folder, file or tensor, and the remedy."""


class CannotSave(CheckpointError):
    """The checkpoint folder cannot be written (exit code 7, also before the first step)."""


class NotFinite(CheckpointError):
    """Weights or moments are NaN or infinite."""


class NothingLoadable(CheckpointError):
    """There are checkpoints but none can be used: the run must not silently restart from scratch (exit code 3)."""


@dataclass(config=_STRICT, frozen=True)
class FileEntry:
    size: int
    sha256: str


@dataclass(config=_STRICT, frozen=True)
class TensorEntry:
    dtype: str
    shape: list[int]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


@dataclass(config=_STRICT, frozen=True)
class Manifest:
    format: int
    kind: Literal["full", "model"]
    """full: resumable; model: an export of the weights alone."""
    step: int
    world_size: int
    versions: dict[str, str]
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]


@dataclass(frozen=True)
class RefusedCheckpoint:
    folder: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.folder.name}: {self.reason}"


_MANIFEST = TypeAdapter(Manifest)


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a folder name written by `step_name`; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def step_folders(root: Path) -> list[tuple[int, Path]]:
    """Return all folders under `root` with a step's name, newest first, complete or not."""
    if (status := _status_of(root, follow_links=True)) is None or not stat.S_ISDIR(status.st_mode):
        return []
    names = retried(lambda: os.listdir(root), root)
    return sorted(((step, root / name) for name in names if (step := step_of(name)) is not None), reverse=True)


def complete_steps(root: Path) -> tuple[list[Path], list[RefusedCheckpoint]]:
    """Return the step folders, newest first, that are complete by manifest and file sizes, and the refused ones."""
    complete, refused = [], []
    for step, folder in step_folders(root):
        try:
            if check_complete(folder).step != step:
                raise CheckpointError("its manifest belongs to another step")
            complete.append(folder)
        except CheckpointError as error:
            refused.append(RefusedCheckpoint(folder, str(error)))
    return complete, refused


def newest_complete(root: Path) -> tuple[Path | None, list[RefusedCheckpoint]]:
    """Return the newest complete checkpoint, from which a run resumes, and the incomplete folders with reasons."""
    complete, refused = complete_steps(root)
    return (complete[0] if complete else None), refused


def check_complete(folder: Path) -> Manifest:
    """Return the manifest of a folder if all its files exist with the listed sizes. Raises `CheckpointError`."""
    if (status := _status_of(folder)) is None or not stat.S_ISDIR(status.st_mode):
        raise CheckpointError("it is not a folder of its own (a file or a symbolic link)")
    manifest = read_manifest(folder)
    check_sizes(folder, manifest, manifest.files)
    return manifest


def check_sizes(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Refuse files that are missing, are links or differ in size from the manifest. Raises `CheckpointError`."""
    for name in names:
        if (status := _status_of(folder / name)) is None:
            raise CheckpointError(f"{name} cannot be read (it is missing)")
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{name} is not a regular file")
        if status.st_size != manifest.files[name].size:
            raise CheckpointError(f"{name} has {status.st_size} bytes instead of {manifest.files[name].size}")


def damaged_files(folder: Path, manifest: Manifest, names: Collection[str], bar: bool = False) -> list[str]:
    """Return the files that differ in content from what was written. `bar` shows a progress bar where a user waits."""
    size = sum(manifest.files[name].size for name in names)
    with progress_bar(f"checking {folder.name}", size, shown=bar) as progress:
        digests = hash_files([folder / name for name in names], progress.update)
    return [name for name, digest in zip(names, digests, strict=True) if digest != manifest.files[name].sha256]


def resolve(path: Path) -> Path:
    """Return the path itself if it is a checkpoint or export, or the newest complete step in a folder of checkpoints.

    Raises `NothingLoadable`, with the reasons, if there is neither.
    """
    if _status_of(path / MANIFEST) is not None:
        return path
    newest, refused = newest_complete(path)
    if newest is None:
        reasons = "; ".join(map(str, refused)) or ("no step-* folders in it" if path.is_dir() else "no such folder")
        raise NothingLoadable(
            f"{path}: no complete checkpoint ({reasons}); give a step-* folder, a folder that holds some, or an export"
        )
    return newest


def manifest_text(manifest: Manifest) -> str:
    body = asdict(manifest)
    return dump_json({**body, "sha256": _body_digest(body)})


def read_manifest(folder: Path) -> Manifest:
    """Parse and validate `manifest.json`. Raises `CheckpointError`."""
    path = folder / MANIFEST
    if _status_of(path) is None:
        raise CheckpointError(f"it has no {MANIFEST}, so it was never finished")
    body = read_json(path)
    if body.get("format") != FORMAT:
        raise CheckpointError(f"{MANIFEST}: format {body.get('format')!r} is unknown (known: {FORMAT})")
    if body.pop("sha256", None) != _body_digest(body):
        raise CheckpointError(f"{MANIFEST} is damaged: its own checksum does not match")
    try:
        manifest = _MANIFEST.validate_json(json.dumps(body))
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(f"{MANIFEST}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    for name in manifest.files:
        if not _FILE.fullmatch(name) or name in (".", "..", MANIFEST):
            raise CheckpointError(f"{MANIFEST}: {name!r} is not a plain file name")
    if not {STATE, METADATA} <= manifest.files.keys():
        raise CheckpointError(f"{MANIFEST} does not list {STATE} and {METADATA}")
    return manifest


def read_state(folder: Path) -> dict[str, Any]:
    """Read `state.json`: step, trainer (the trainer's state), ranks (a list), optimizer (values), versions."""
    state = read_json(folder / STATE)
    for key, kind in {"trainer": dict, "ranks": list, "optimizer": dict}.items():
        if not isinstance(state.get(key), kind):
            raise CheckpointError(f"{folder / STATE}: {key} is not the {kind.__name__} that belongs there")
    return state


def rank_state_name(rank: int) -> str:
    return f"rank_{rank}.json"


def read_rank_state(folder: Path, manifest: Manifest, rank: int) -> dict[str, Any]:
    """Read the separate state file of one rank; {} if it has none."""
    return read_json(folder / rank_state_name(rank)) if rank_state_name(rank) in manifest.files else {}


def dump_json(value: Any) -> str:
    """Return JSON text. NaN and infinities, which JSON lacks, raise `ValueError`."""
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; duplicate keys and NaN or infinities are refused. Raises `CheckpointError`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            raise ValueError("a key occurs twice")
        return table

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(read_bytes(path), object_pairs_hook=unique, parse_constant=refuse)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} is not a JSON object")
    return value


def read_bytes(path: Path, most: int = LARGEST_TEXT) -> bytes:
    """Return the content of a regular file (no link or device) of at most `most` bytes. Raises `CheckpointError`."""
    try:
        return read_file(path, most, follow_links=False)
    except FileError as error:
        if error.error_number in RIGHTS:
            raise MachineError(f"{path}: this user may not read it ({error.reason}); change its permissions") from None
        raise CheckpointError(f"{path.name} {error.reason}") from None


def _status_of(path: Path, follow_links: bool = False) -> os.stat_result | None:
    """Return the status of a path; None if nothing is there. `Path.exists` would say the same after any error."""
    try:
        return retried(lambda: os.stat(path, follow_symlinks=follow_links), path)
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return None


def _body_digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
