"""Heartbeats: each rank writes its phase, step and the time into memory that it shares with its launcher.

A write takes a microsecond, never blocks and works while the launcher is busy or gone, so every phase is recorded. The
launcher reads whether a rank has anything to save and which rank is slowest. Needs no torch.
"""

import mmap
import os
import struct
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from torchtitan.core.bounded import Count, Seconds

T = TypeVar("T")

Phase = Literal["start", "load", "first", "data", "train", "validate", "save", "script", "export", "end"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""Phases of a run, in order. start: no heartbeat yet (imports, process group, model); first: the first step and the
first validation, which may compile; data: waiting for data; script: in a user's script, between two calls of its
engine, with `step` completed; export: training is complete and saved, and the result is
written for other programs; end: all results are saved.
"""
TRAINED = ("export", "end")
"""Phases after all training."""
WITHOUT_STATE = ("start", "load")
"""Phases in which there is no state to save."""
_ROW = struct.Struct("=qqd")
_ROW_BYTES = 64
MAX_SHARED_BYTES = 1 << 26
"""Longest text that is read from a file that processes share."""


@dataclass(frozen=True)
class Activity:
    phase: Phase
    step: Count
    since: Seconds
    """Start of the phase on the machine's monotonic clock; 0 without a heartbeat."""

    def __str__(self) -> str:
        return {"start": "in its start", "load": "loading"}.get(self.phase, f"in step {self.step} ({self.phase})")


class Progress:
    """One rank's row of the shared memory. Without a `path`, the memory is private and unread."""

    def __init__(self, path: str | None = None, row: int = 0) -> None:
        self._memory: Any = bytearray(_ROW_BYTES * (row + 1))
        if path is not None:
            with open(path, "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), 0)
        self._offset = _ROW_BYTES * row

    def enter(self, phase: str, step: int = 0) -> None:
        _ROW.pack_into(self._memory, self._offset, PHASES.index(phase), step, time.monotonic())

    @property
    def activity(self) -> Activity:
        """Return the phase, step and time written last."""
        return _read(self._memory, self._offset)

    def track(self, items: Iterable[T], phase: str, step: int) -> Iterator[T]:
        """Yield the items, and enter the phase again before each one."""
        for item in items:
            self.enter(phase, step)
            yield item


class ProgressTable:
    """The rows of all ranks of this machine, as the launcher reads them."""

    def __init__(self, file: "SharedFile", rows: int) -> None:
        os.ftruncate(file.descriptor, _ROW_BYTES * rows)
        self._memory = mmap.mmap(file.descriptor, 0)

    def __getitem__(self, row: int) -> Activity:
        return _read(self._memory, _ROW_BYTES * row)


def _read(memory: Any, offset: int) -> Activity:
    phase, step, since = _ROW.unpack_from(memory, offset)
    if not (0 <= phase < len(PHASES) and 0 <= step < 1 << 53 and 0 <= since < 1e12):  # a rank has damaged its memory
        return Activity("start", 0, 0.0)
    return Activity(PHASES[phase], step, since)


class SharedFile:
    """An empty file that the processes of a run open by `path`.

    On Linux it is memory that vanishes with the last process, even if all are killed; elsewhere a temporary file.
    """

    def __init__(self, name: str) -> None:
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create(name)
            self.path = f"/proc/self/fd/{self.descriptor}"  # for child processes, which inherit the descriptor
        else:
            self.folder = tempfile.TemporaryDirectory(prefix="torchtitan-")
            self.path = str(Path(self.folder.name, name))
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    def read(self) -> str:
        """Return the text, of a long one the first MAX_SHARED_BYTES."""
        size = os.fstat(self.descriptor).st_size
        return os.pread(self.descriptor, min(size, MAX_SHARED_BYTES), 0).decode(errors="replace")

    def close(self) -> None:
        os.close(self.descriptor)
        if self.folder is not None:
            self.folder.cleanup()
