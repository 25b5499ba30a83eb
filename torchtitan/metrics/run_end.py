"""The end of a run: the last record of its metrics.jsonl, an event `end` with its cause, exit code, reason and time.

The process whose exit code is the run's writes it: the launcher, or rank 0 under torchrun. A rank under the launcher
only passes its reason on: one that fails may be started again, and one that is killed cannot write. Needs no torch.
"""

import errno
import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from torchtitan.core.errors import JobError
from torchtitan.core.files import open_file
from torchtitan.core.machine_errors import MachineError
from torchtitan.metrics.json_lines import END, METRICS, Record
from torchtitan.process import exit as exit_codes
from torchtitan.process.exit import OUT_OF_TIME, STOPPED

CAUSES = {
    0: "finished",
    exit_codes.CRASHED: "crashed",
    exit_codes.REFUSED: "refused",
    exit_codes.NOT_LOADED: "not loaded",
    exit_codes.NON_FINITE: "bad step",
    exit_codes.CRASH_LOOP: "restarts given up",
    exit_codes.HUNG: "hung",
    exit_codes.NOT_SAVED: "not saved",
    exit_codes.OUT_OF_MEMORY: "out of memory",
    exit_codes.DIFFERING: "ranks differ",
    exit_codes.NOT_EXPORTED: "not exported",
    OUT_OF_TIME: "time limit",
}
"""Exit code -> cause. A signal's code is "stopped" if the run handles the signal, else "killed"."""
_UNREADABLE = (OSError, JobError, MachineError)
PEER_GONE = "another rank is gone"
"""Reason of a rank that only follows another one."""
EARLY_STOP, NOTHING_LEFT, DATA = "early stop", "nothing left to train", "data"
"""Causes that a rank knows better than its exit code tells: 0, 0, and 2."""
LONGEST_REASON = 2000
LONGEST_TAIL = 2**20
"""Bytes at the end of a metrics.jsonl in which its newest record is looked for."""


@dataclass(frozen=True)
class RunEnd:
    """The end of a run. `step`: the last completed one, None if it is not known."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")
    code: int
    cause: str = ""
    reason: str = ""
    step: int | None = None

    def to_record(self, step: int) -> Record:
        """Return the event; `step` is used if the end has none."""
        return {
            "step": step if self.step is None else self.step,
            "event": END,
            "cause": self.cause or cause_of(self.code),
            "reason": self.reason[:LONGEST_REASON],
            "exit_code": self.code,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }

    def pass_on(self, path: str) -> None:
        """Pass the end of a rank on to its launcher, in memory that both share. A failure has no consequence."""
        with suppress(OSError):
            Path(path).write_text(json.dumps(asdict(self)))


def read_end(text: str) -> RunEnd | None:
    """Return the end that a rank has passed on; None if it has not."""
    try:
        end = TypeAdapter(RunEnd).validate_json(text)
    except ValidationError:
        return None
    return replace(end, reason=end.reason[:LONGEST_REASON])  # machines send it to each other


def cause_of(code: int) -> str:
    if code in CAUSES:
        return CAUSES[code]
    return "stopped" if code in STOPPED else "killed" if code > 128 else CAUSES[exit_codes.CRASHED]


def record_end(folder: Path, end: RunEnd) -> str:
    """Append the end to the metrics.jsonl of a run's folder. Return why that failed, or "": it never raises, so that it
    hides no other failure.
    """
    path = folder / METRICS
    try:
        records = _tail(path)
        line = json.dumps(end.to_record(records[-1]["step"] if records else 0)).encode() + b"\n"
        with path.open("ab+", buffering=0) as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = b"\n" * (file.read(1) != b"\n") + line  # a crash has cut the last line off
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
    except _UNREADABLE as error:
        return f"the end of the run could not be written to {path} ({getattr(error, 'strerror', None) or error})"
    return ""


def _tail(path: Path) -> list[Record]:
    """Return the records at the end of a metrics.jsonl; none if there is no such file."""
    records = []
    with suppress(FileNotFoundError), open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LONGEST_TAIL))
        for line in file.read(LONGEST_TAIL).splitlines():
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict) and type(record.get("step")) is int:
                    records.append(record)
    return records


def end_of(records: Sequence[Record]) -> Record | None:
    """Return the event of how the last start of a run ended; None if it trains, was killed with its launcher, or was
    made by an earlier version."""
    return records[-1] if records and records[-1].get("event") == END else None


def without_ends(records: Sequence[Record]) -> list[Record]:
    """Return the records that say what a run did, without those that say how its starts ended."""
    return [record for record in records if record.get("event") != END]


def describe_end(record: Record) -> str:
    """Describe an event as in "stopped by SIGTERM after step 12 (exit code 143), 2026-11-28 13:05 UTC"."""
    code, step = record.get("exit_code"), record["step"]
    cause = str(record.get("cause"))
    if cause in ("stopped", "killed") and isinstance(code, int):
        with suppress(ValueError):
            cause += f" by {signal.Signals(code - 128).name}"
    text = f"{cause} after step {step} (exit code {code})"
    with suppress(ValueError, TypeError):
        time = datetime.fromisoformat(str(record.get("time"))).astimezone(timezone.utc)
        text += f", {time:%Y-%m-%d %H:%M} UTC"
    reason = str(record.get("reason") or "")
    text += f": {reason}" * bool(reason)
    return "".join(character if character.isprintable() else " " for character in text)


def describe_last_end(folder: Path, left_lock: bool) -> str:
    """Describe how the last start in a run's folder ended, for the next one; "" if there was none or it is not known.

    `left_lock`: it has left its lock, so it was killed together with its launcher.
    """
    try:
        records = _tail(folder / METRICS)
    except _UNREADABLE:
        return ""
    if left_lock:
        reached = f" after step {records[-1]['step']}" if records else ""
        return f"the last run in this folder left no end: it was killed{reached}, or its machine failed"
    end = end_of(records)
    return f"the last run in this folder: {describe_end(end)}" if end else ""
