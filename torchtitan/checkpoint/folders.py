"""Making, publishing and deleting checkpoint folders: the only code that renames or deletes any. Needs no torch.

A folder is written under a temporary name and published by one rename, so whoever sees the final name sees all of it.
Deleting goes the other way: rename first, then delete, so that a half-deleted folder has no final name either.
Only real folders whose full name this project gives out are ever touched.
"""

import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torchtitan.checkpoint import layout

logger = logging.getLogger(__name__)

PRIVATE = 0o700
_NONCE = r"[0-9a-f]{16}"


def create_temporary(target: Path) -> Path:
    """A fresh folder beside `target` to write it in."""
    target.parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    temporary = _beside(target, "tmp")
    temporary.mkdir(mode=PRIVATE)
    return temporary


@dataclass(frozen=True)
class Place:
    """The folder of the checkpoints as it was at the start, known again by the marker that the run has left in it.

    A disk that is unmounted leaves an empty folder of the same name, which would take saves without a word.
    """

    root: Path
    nonce: str

    @property
    def marker(self) -> Path:
        return self.root / ".place"

    @classmethod
    def claim(cls, root: Path) -> "Place":
        """Make the folder if need be, and mark it."""
        root.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        place = cls(root, secrets.token_hex(8))
        replace_file(place.marker, place.nonce)
        return place

    def check(self) -> None:
        """Raises `CannotSave` where this is another folder by now, or another host's."""
        try:
            found = layout.read_bytes(self.marker, most=100).decode(errors="replace")
        except layout.CheckpointError as error:
            found = str(error)
        if found != self.nonce:
            raise layout.CannotSave(
                f"{self.root} is not the folder that this run began with: its marker {self.marker.name} is not there "
                "or another's. Is the disk still mounted, the same on all hosts, and no other run using it? Nothing "
                "was written; bring it back and start again"
            )

    def try_writing(self, rank: int) -> None:
        """A few bytes, before the first step is paid for. Raises `OSError`."""
        probe = self.root / f".probe-{rank}-{self.nonce}"
        try:
            with probe.open("xb") as file:
                file.write(bytes(1 << 12))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)


def remove_leftovers(target: Path) -> None:
    """Delete what crashed saves of this target left: for a step folder, those of all steps."""
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
    """Write a new file so that it survives a power cut under its name in full or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def replace_file(path: Path, text: str) -> None:
    """Write a file whole under its name, or leave what was there; a link in its place is replaced, not followed."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # of a crash
    with temporary.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def publish(temporary: Path, target: Path) -> None:
    """Give a finished folder its final name, for good."""
    sync_folder(temporary)
    temporary.rename(target)
    sync_folder(target.parent)


@contextmanager
def published(target: Path, write: bool) -> Iterator[Path]:
    """Where to write a folder that takes the place of `target`, whole, when the block ends; until then, and if it ends
    badly, what was there stays as it is. Without `write` (another rank's) nothing is done. Raises `OSError`.
    """
    if not write:
        yield target
        return
    remove_leftovers(target)
    temporary = _beside(target, "tmp")
    try:
        yield temporary
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if os.path.lexists(target):
            if target.is_symlink() or not target.is_dir():
                raise NotADirectoryError(f"{target} is not a folder of its own: move it away")
            foreign = [path.name for path in target.iterdir() if not _is_of_export(path, temporary)]
            before = move_aside(target)
            try:
                publish(temporary, target)
            except OSError:
                before.rename(target)
                raise
            if foreign:
                logger.warning("%s also held %s: what was there is now %s", target, foreign[0], before.name)
            else:
                shutil.rmtree(before)
        else:
            publish(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _is_of_export(path: Path, newer: Path) -> bool:
    """Whether a file of an older export is one that the newer replaces, or a shard of weights."""
    return path.is_file() and (path.suffix == ".safetensors" or (newer / path.name).exists())


def move_aside(folder: Path) -> Path:
    """Free a name that a save needs without deleting anything."""
    aside = _beside(folder, "aside")
    folder.rename(aside)
    return aside


def delete(folder: Path) -> None:
    """Delete a temporary folder of ours."""
    assert folder.name.startswith(".tmp-"), folder
    shutil.rmtree(folder)  # refuses a symbolic link, and does not follow those inside


def unpublish(folder: Path) -> None:
    """Delete a step folder of ours: its name first, so that no half of it is ever seen."""
    assert layout.step_of(folder.name) is not None, folder
    unpublished = _beside(folder, "tmp")
    folder.rename(unpublished)
    sync_folder(folder.parent)
    delete(unpublished)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable (a no-op where folders cannot be opened, as on Windows)."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(path: Path, mark: str) -> Path:
    return path.with_name(f".{mark}-{path.name}-{secrets.token_hex(8)}")
