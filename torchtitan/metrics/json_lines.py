"""metrics.jsonl: one JSON object per logged step, validation or event, in the order of the run."""

import itertools
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torchtitan.core.files import FileError, open_file

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
"""Name of the file in a run's folder."""
END = "end"
"""The event of how a start of the run ended (run_end.py)."""
Record = dict[str, Any]
LONGEST_LINE = 2**20
"""Longest line in bytes. A longer one is not a record, and is not held in memory."""


class JsonLinesWriter:
    """Appends records to a file, each flushed at once. No record is ever lost.

    A run that resumes at a step moves the records of later steps to metrics.redone.jsonl. A run that starts from
    scratch renames an older file to metrics.previous.jsonl, and the next one to metrics.previous-2.jsonl."""

    def __init__(self, path: Path, resume_step: int | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if resume_step:
                _keep_until(path, resume_step)
            elif not _holds_only_ends(path):  # of starts that have not come so far
                path.rename(_unused(path))
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""

    def write(self, record: Record) -> None:
        """Append a record, with null for NaN and infinity, which JSON lacks.

        If the write fails (a full disk), the run continues, and the record is written with the next one."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        waiting = self._unwritten.count(b"\n")
        self._unwritten += json.dumps(finite, allow_nan=False).encode() + b"\n"
        error = self._write_what_waits()
        if error is not None and not waiting:
            logger.warning("%s cannot be written (%s); the run continues, and rows are buffered until it can", *error)
        elif error is None and waiting:
            logger.info("%s is written again, %d rows that waited too", self._file.name, waiting)

    def _write_what_waits(self) -> tuple[str, str] | None:
        try:
            while self._unwritten:  # a disk that becomes full may accept a part
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            return self._file.name, error.strerror or str(error)
        return None

    def close(self) -> None:
        if self._write_what_waits():
            logger.warning("%d rows of %s are lost", self._unwritten.count(b"\n"), self._file.name)
        self._file.close()


def iterate_records(path: Path) -> Iterator[Record]:
    """Yield the records of a metrics.jsonl, without lines that are no records, such as one cut off by a crash."""
    with open_file(path) as file:
        while line := file.readline(LONGEST_LINE):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and type(record.get("step")) is int:
                yield record


def read_records(path: Path) -> list[Record]:
    """Return all records of a metrics.jsonl; of a long run they take gigabytes (curves.py reads any in little)."""
    return list(iterate_records(path))


def is_finite(value: object) -> bool:
    """Return True for a finite number, which can be drawn. A bool is not a number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def lost_losses(steps: list[Record]) -> list[Record]:
    """Return the first record of each stretch of logged steps without a finite loss."""
    finite = [True, *(is_finite(record.get("loss")) for record in steps)]
    return [record for record, before, now in zip(steps, finite, finite[1:], strict=False) if before and not now]


def _holds_only_ends(path: Path) -> bool:
    """Return True if every line is a whole record of how a start ended. A file of another program holds other ones."""
    try:
        with open_file(path) as file:
            return all(
                line.endswith(b"\n") and json.loads(line).get("event") == END
                for line in iter(lambda: file.readline(LONGEST_LINE), b"")
            )
    except (OSError, FileError, ValueError, AttributeError, RecursionError):
        return False


def _unused(path: Path) -> Path:
    """Return an unused path next to the file, for its previous version."""
    numbers = (f"-{number}" if number > 1 else "" for number in itertools.count(1))
    names = (path.with_name(f"{path.stem}.previous{number}{path.suffix}") for number in numbers)
    return next(name for name in names if not os.path.lexists(name))


def _keep_until(path: Path, step: int) -> None:
    """Move the records after `step` to the .redone file. A crash leaves the file in either its old or its new state."""
    redone = path.with_name(f"{path.stem}.redone{path.suffix}")
    if redone.is_symlink():  # this program writes no links: do not write to a foreign target
        redone.unlink()
    _append(redone, (record for record in iterate_records(path) if record["step"] > step))
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # left by a crash, or a foreign link
    _append(temporary, (record for record in iterate_records(path) if record["step"] <= step))
    temporary.replace(path)


def _append(path: Path, records: Iterable[Record]) -> None:
    """Append records and sync them to disk, so that moved records are safe before the other file drops them."""
    first = next(records := iter(records), None)
    if first is None and not path.name.endswith(".tmp"):
        return  # no file for nothing
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in itertools.chain([first] if first else [], records))
        file.flush()
        os.fsync(file.fileno())
