"""Create, publish and delete checkpoint folders. No other code renames or deletes any. Needs no torch.

A folder is written under a temporary name and published by one rename, so the final name always refers to a complete
folder. Deletion works in reverse: rename first, then delete, so that a half-deleted folder has no final name either.
Only real folders with a full name that this project assigns are ever touched.
"""

import logging
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.checkpoint import layout
from torchtitan.checkpoint.layout import CheckpointError, NothingLoadable

logger = logging.getLogger(__name__)

PRIVATE = 0o700
_NONCE = r"[0-9a-f]{16}"


def create_temporary(target: Path) -> Path:
    """Create a new folder next to `target` to write its content in."""
    target.parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    temporary = _sibling(target, "tmp")
    temporary.mkdir(mode=PRIVATE)
    return temporary


@dataclass(frozen=True)
class CheckpointRoot:
    """The folder of a run's checkpoints, identified by a marker file that the run has left in it.

    Without the marker, an unmounted disk would leave an empty folder of the same name, which would silently accept
    saves.
    """

    root: Path
    nonce: str

    @property
    def marker(self) -> Path:
        return self.root / ".place"

    @classmethod
    def claim(cls, root: Path) -> "CheckpointRoot":
        """Create the folder if needed, and mark it."""
        root.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        place = cls(root, secrets.token_hex(8))
        replace_file(place.marker, place.nonce)
        return place

    def check(self) -> None:
        """Raise `CannotSave` if this is another folder by now, or a folder of another host."""
        try:
            marker_text = layout.read_bytes(self.marker, most=100).decode(errors="replace")
        except layout.CheckpointError as error:
            marker_text = str(error)
        if marker_text != self.nonce:
            raise layout.CannotSave(
                f"{self.root} is not the folder that this run began with: its marker {self.marker.name} is not there "
                "or another's. Is the disk still mounted, the same on all hosts, and no other run using it? Nothing "
                "was written; bring it back and start again"
            )

    def try_writing(self, rank: int) -> None:
        """Write and delete a small file, to detect errors before the first step. Raises `OSError`."""
        probe = self.root / f".probe-{rank}-{self.nonce}"
        try:
            with probe.open("xb") as file:
                file.write(bytes(1 << 12))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)


def remove_leftovers(target: Path) -> None:
    """Delete leftovers of crashed saves of this target; for a step folder, of all steps."""
    name = r"step-[0-9]{8,}" if layout.step_of(target.name) is not None else re.escape(target.name)
    pattern = re.compile(rf"\.tmp-{name}-{_NONCE}")
    if target.parent.is_dir():
        for path in target.parent.iterdir():
            if pattern.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                logger.info("removing %s, left by a save that did not finish", path)
                try:
                    delete(path)
                except OSError as error:
                    logger.warning("%s cannot be removed: %s", path, error)


def write_file(path: Path, text: str) -> None:
    """Write a new file durably: after a power failure it is complete under its name or does not exist."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def replace_file(path: Path, text: str) -> None:
    """Replace a file's text atomically; on an OSError the old one stays. A link at `path` is not followed."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # left by a crash
    with temporary.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def publish(temporary: Path, target: Path) -> None:
    """Rename a finished folder to its final name, durably."""
    sync_folder(temporary)
    temporary.rename(target)
    sync_folder(target.parent)


@contextmanager
def replace_folder(target: Path, write: bool) -> Iterator[Path]:
    """Yield a temporary folder that replaces `target` atomically when the block ends.

    Until then, and after an error, the old folder stays unchanged. Without `write` (on other ranks) nothing is done.
    Raises `OSError`.
    """
    if not write:
        yield target
        return
    remove_leftovers(target)
    temporary = _sibling(target, "tmp")
    try:
        yield temporary
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if os.path.lexists(target):
            if target.is_symlink() or not target.is_dir():
                raise NotADirectoryError(f"{target} is not a folder of its own: move it away")
            foreign = [path.name for path in target.iterdir() if not _is_of_export(path, temporary)]
            old_folder = move_aside(target)
            try:
                publish(temporary, target)
            except OSError:
                old_folder.rename(target)
                raise
            if foreign:
                logger.warning("%s also held %s: what was there is now %s", target, foreign[0], old_folder.name)
            else:
                shutil.rmtree(old_folder)
        else:
            publish(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _is_of_export(path: Path, newer: Path) -> bool:
    """Return True if a file of an older export is one that the newer replaces, or a shard of weights."""
    return path.is_file() and (path.suffix == ".safetensors" or (newer / path.name).exists())


def move_aside(folder: Path) -> Path:
    """Rename a folder that is in the way of a save, without deleting anything."""
    aside = _sibling(folder, "aside")
    folder.rename(aside)
    return aside


def delete(folder: Path) -> None:
    """Delete a temporary folder of this project."""
    assert folder.name.startswith(".tmp-"), folder
    shutil.rmtree(folder)  # refuses a symbolic link, and does not follow those inside


def unpublish(folder: Path) -> None:
    """Delete a step folder of this project. It loses its name first, so that it is never seen half deleted."""
    assert layout.step_of(folder.name) is not None, folder
    unpublished = _sibling(folder, "tmp")
    folder.rename(unpublished)
    sync_folder(folder.parent)
    delete(unpublished)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable (a no-op on systems that cannot open folders, such as Windows)."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sibling(path: Path, prefix: str) -> Path:
    return path.with_name(f".{prefix}-{path.name}-{secrets.token_hex(8)}")


MEASURED = "measured"
"""Key in the trainer's state: finite metrics of the validation at this very step, by their names in metrics.jsonl."""
LOSS = "validation_loss"


@dataclass(frozen=True)
class Metric:
    """A metric's name, and whether its highest value is the best."""

    name: str
    highest: bool

    @classmethod
    def of(cls, name: str, mode: str | None) -> "Metric":
        """Return the metric for a `mode`: "min", "max", or None for the lowest loss or the highest other value."""
        return cls(name, highest=not name.endswith("loss") if mode is None else mode == "max")

    def is_better(self, value: float, than: float | None, by: float = 0.0) -> bool:
        """Return True if `value` is better than `than` by more than `by`. A non-finite value never is."""
        if not math.isfinite(value):
            return False
        return than is None or (value - than if self.highest else than - value) > by


class Best(NamedTuple):
    folder: Path
    value: float


def best_of(complete: Iterable[Path], metric: Metric) -> Best | None:
    """Return the oldest checkpoint with the best value; None if none has a readable value."""
    best: Best | None = None
    for folder in sorted(complete):
        value = _measured(folder).get(metric.name)
        if isinstance(value, float) and metric.is_better(value, best and best.value):
            best = Best(folder, value)
    return best


def _measured(folder: Path) -> dict[str, Any]:
    try:
        measured = layout.read_state(folder)["trainer"].get(MEASURED)
    except CheckpointError:
        return {}
    return measured if isinstance(measured, dict) else {}


def metric_of(trainer: Mapping[str, Any]) -> Metric | None:
    """Return the metric that selects the best checkpoint in the job of this trainer state, or None."""
    job = trainer.get("job")
    options = job.get("checkpoint") if isinstance(job, dict) else None
    name = options.get("best_metric") if isinstance(options, dict) else None
    return Metric.of(name, options.get("best_mode")) if isinstance(name, str) else None


def best_in(root: Path, metric: Metric | None = None) -> Best:
    """Return the best checkpoint in a folder, by `metric` or by the metric of its newest checkpoint's job. Raises
    `NothingLoadable` if there is none.
    """
    complete, _ = layout.complete_steps(root)
    if metric is None and complete:
        metric = metric_of(layout.read_state(complete[0])["trainer"])
    if metric is None:
        raise NothingLoadable(f"{root}: its job has no checkpoint.best_metric, which tells the best; name a step")
    best = best_of(complete, metric)
    if best is None:
        raise NothingLoadable(f"{root}: no checkpoint in it has a {metric.name}, which tells the best; name a step")
    return best
