"""metrics.jsonl: one JSON object a logged step, and one a validation, in the order of the run."""

import itertools
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

from torchtitan.core.files import open_file

logger = logging.getLogger(__name__)

Record = dict[str, Any]
LONGEST_LINE = 2**20
"""Bytes; what is longer is no record, and is not held in memory."""


class JsonLines:
    """Appends records to a file, each flushed at once. None is ever lost: a run that resumes at a step moves what a run
    before it wrote after that step to metrics.redone.jsonl; a run that starts anew keeps an older file beside as
    metrics.previous.jsonl, the next one as metrics.previous-2.jsonl."""

    def __init__(self, path: Path, resume_step: int | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if not resume_step:
                path.rename(_unused(path))
            else:
                _keep_until(path, resume_step)
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""

    def write(self, record: Record) -> None:
        """JSON has no NaN and no infinity: they become null. What cannot be written (a full disk) is kept and written
        with the next record that can; the run does not end for it."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        waiting = self._unwritten.count(b"\n")
        self._unwritten += json.dumps(finite, allow_nan=False).encode() + b"\n"
        error = self._write_what_waits()
        if error is not None and not waiting:
            logger.warning("%s cannot be written (%s); the run goes on, and rows are kept until they can be", *error)
        elif error is None and waiting:
            logger.info("%s is written again, %d rows that waited too", self._file.name, waiting)

    def _write_what_waits(self) -> tuple[str, str] | None:
        try:
            while self._unwritten:  # a disk that gets full takes a part
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            return self._file.name, error.strerror or str(error)
        return None

    def close(self) -> None:
        if self._write_what_waits():
            logger.warning("%d rows of %s are lost", self._unwritten.count(b"\n"), self._file.name)
        self._file.close()


def read_records(path: Path) -> list[Record]:
    """The records of a metrics.jsonl. What is no record, like a last line torn by a crash, is left out."""
    records = []
    with open_file(path) as file:
        while line := file.readline(LONGEST_LINE):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    return records


def _unused(path: Path) -> Path:
    """A name beside it that nothing has yet."""
    numbers = (f"-{number}" if number > 1 else "" for number in itertools.count(1))
    names = (path.with_name(f"{path.stem}.previous{number}{path.suffix}") for number in numbers)
    return next(name for name in names if not os.path.lexists(name))


def _keep_until(path: Path, step: int) -> None:
    """Rewrite the file whole, so that a crash in between leaves either the old or the new one."""
    records = read_records(path)
    kept = [record for record in records if record["step"] <= step]
    if len(kept) < len(records):
        redone = path.with_name(f"{path.stem}.redone{path.suffix}")
        if redone.is_symlink():  # ours are files; where a link leads is another's
            redone.unlink()
        _append(redone, [record for record in records if record["step"] > step])
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # of a crash, or somebody's link
    _append(temporary, kept)
    temporary.replace(path)


def _append(path: Path, records: list[Record]) -> None:
    """For good: what is moved from one file to another is on the disk before it leaves the first."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
        file.flush()
        os.fsync(file.fileno())
