"""Account a run's time by cause over all of its starts, and advise how often a run like it should save."""

import math
import time
from collections.abc import Callable, Mapping

CAUSES = {
    "train": "training",
    "data": "waiting for data",
    "save": "saving",
    "validation": "validation",
    "compile": "the first step",
    "start": "starting",
    "restart": "restarts",
    "redone": "steps that were lost",
    "end": "ending",
}
"""Cause -> its description. compile: the first step of a start, including any compilation; start: the time before it;
restart: the same after a failure, from when the failure was noticed; redone: training since the checkpoint, which has
to be repeated; end: the wait for the last save, exports and the plot."""
CAUSE_OF = {
    "first": "compile",
    "data": "data",
    "train": "train",
    "validate": "validation",
    "save": "save",
    "script": "data",
    "export": "end",
    "end": "end",
}
"""A rank's phase (process/heartbeat.py) -> the cause that its time counts for."""
GPU_HOURS_PER_FAILURE = 50_000.0
"""From the Llama 3 paper: 419 unplanned interruptions of 16,384 GPUs in 54 days, one per 50,700 GPU hours."""

MARGIN = 1.1
"""A rank is slow in some steps if it takes more than this many times the median of its peers."""
LONGEST_SAVE_SECONDS = 3600.0
"""A first file that is later by more than this was not written by the save."""
SHORTEST_ADVISED_SECONDS = 3600.0
"""Minimum length of a run for advice on the checkpoint interval."""


def best_save_interval(between: float, blocked: float) -> float:
    """Return the seconds between saves that minimise lost time: sqrt(2 * between * blocked) (Young 1974, Daly 2006).

    `between`: mean seconds between failures. `blocked`: seconds for which a save blocks the run.
    """
    return math.sqrt(2 * between * blocked)


class Goodput:
    """A stopwatch that attributes all time to one cause at a time.

    `failed_at`: when the previous start failed, on the same clock; None if it did not fail.
    """

    def __init__(
        self,
        failed_at: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._clock, self._wall = clock, wall
        self.loaded_at: float | None = None
        """Wall-clock time at which the loaded state was recorded; None if unknown."""
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        self.failures = self.saves = 0
        self._cause = "start" if failed_at is None else "restart"
        self._since = clock() if failed_at is None else failed_at

    def enter(self, cause: str) -> None:
        """Attribute time to `cause` from now on."""
        now = self._clock()
        self.seconds[self._cause] += now - self._since
        self._cause, self._since = cause, now

    def state_dict(self) -> dict[str, float]:
        """Return the seconds and counts until now, JSON-able."""
        self.enter(self._cause)
        return self.seconds | {"failures": self.failures, "saves": self.saves, "at": self._wall()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the times of earlier starts from `state_dict`.

        While this start begins, they are added to the time that it has spent. Later, after a rollback, they replace it:
        all time since the checkpoint counts as redone, except for the save itself.
        """
        self.enter(self._cause)
        self.loaded_at = state.get("at")
        saved = {cause: state.get(cause, 0.0) for cause in CAUSES}
        if self._cause in ("start", "restart"):
            self.failures, self.saves = int(state.get("failures", 0)), int(state.get("saves", 0))
            self.seconds = {cause: spent + saved[cause] for cause, spent in self.seconds.items()}
        else:
            saved["save"] = self.seconds[
                "save"
            ]  # includes the checkpoint's own save, which its state could not contain yet
            since = sum(self.seconds.values()) - sum(saved.values())
            self.seconds = saved
            self.failed(since)

    def saved(self, first_file: float, published: float) -> None:
        """Count the save of the loaded checkpoint: its first file is of `first_file`, and it was `published` at this
        time of the wall clock.

        Its state was recorded before that save, so it cannot contain the save's time. A copied folder is of the time of
        its copy."""
        if self.loaded_at is not None:
            is_copied = first_file - self.loaded_at > LONGEST_SAVE_SECONDS
            self.seconds["save"] += max(0.0, published - (first_file if is_copied else self.loaded_at))
            self.saves += 1

    def failed(self, redone_seconds: float) -> None:
        """Count a failure after which this many seconds of training have to be repeated."""
        self.failures += 1
        self.seconds["redone"] += redone_seconds

    def row(self) -> dict[str, float]:
        """Return the fraction of time spent training and the seconds by cause, for metrics.jsonl."""
        total = self.state_dict() and sum(self.seconds.values())
        by_cause = {f"{cause}_seconds": round(spent, 3) for cause, spent in self.seconds.items()}
        return {"goodput": round(self.seconds["train"] / total, 4) if total else 0.0} | by_cause

    def summary(self) -> str:
        """Return the shares of all time, largest first, like "94.0 % training, 4.2 % saving"."""
        total = self.state_dict() and sum(self.seconds.values())
        shares = {CAUSES[cause]: 100 * spent / total for cause, spent in self.seconds.items()} if total else {}
        largest = sorted(shares.items(), key=lambda item: -item[1])
        return ", ".join(f"{share:.1f} % {name}" for name, share in largest if share >= 0.05)

    def best_interval(self, world_size: int) -> float | None:
        """Return the seconds between saves that minimise lost time; None before the first save or in the first hour.

        The time between failures is this run's own, or, without a failure, GPU_HOURS_PER_FAILURE divided by the number
        of devices.
        """
        total = self.state_dict() and sum(self.seconds.values())
        if not self.saves or total < SHORTEST_ADVISED_SECONDS:
            return None
        between = total / self.failures if self.failures else 3600 * GPU_HOURS_PER_FAILURE / world_size
        return best_save_interval(between, self.seconds["save"] / self.saves)
