"""metrics.jsonl: one JSON object a logged step, and one a validation, in the order of the run."""

import json
import math
import os
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class JsonLines:
    """Appends records to a file, each flushed at once. A run that resumes at a step drops what a run before it wrote
    after that step; a run that starts anew keeps an older file beside as metrics.previous.jsonl."""

    def __init__(self, path: Path, resume_step: int | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if not resume_step:
                path.replace(path.with_name(f"{path.stem}.previous{path.suffix}"))
            else:
                _keep_until(path, resume_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """JSON has no NaN and no infinity: they become null."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_records(path: Path) -> list[Record]:
    """The records of a metrics.jsonl. What is no record, like a last line torn by a crash, is left out."""
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def _keep_until(path: Path, step: int) -> None:
    """Rewrite the file whole, so that a crash in between leaves either the old or the new one."""
    kept = [record for record in read_records(path) if record["step"] <= step]
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
