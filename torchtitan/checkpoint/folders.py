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


def publish(temporary: Path, target: Path) -> None:
    """Give a finished folder its final name, for good."""
    sync_folder(temporary)
    temporary.rename(target)
    sync_folder(target.parent)


def move_aside(folder: Path) -> Path:
    """Free a name that a save needs without deleting anything."""
    aside = _beside(folder, "aside")
    folder.rename(aside)
    return aside


def delete(folder: Path) -> None:
    """Delete a temporary folder of ours."""
    assert folder.name.startswith(".tmp-"), folder
    shutil.rmtree(folder)  # refuses a symbolic link, and does not follow those inside


def retain(root: Path, keep: int, protected: set[Path | None]) -> None:
    """Delete complete step folders but the newest `keep` (at least 2; 0 keeps all) and the protected ones.

    Folders that are not complete, are links, or are not named by us are neither counted nor touched. Failing
    to delete is reported and no more: the new checkpoint is safe by now.
    """
    if keep == 0:
        return
    try:
        complete, _ = layout.complete_steps(root)
        for folder in complete[max(keep, 2) :]:
            if folder not in protected:
                unpublished = _beside(folder, "tmp")
                folder.rename(unpublished)
                sync_folder(root)
                delete(unpublished)
    except OSError as error:
        logger.warning("old checkpoints in %s cannot be deleted: %s", root, error)


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
