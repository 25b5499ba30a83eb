"""Conditions that end a run early: no improvement in validation, and a time limit. Needs no torch.

The time limit is given by job.time_limit or by SLURM's allocation. The run saves before it is reached.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.checkpoint.folders import MEASURED, Metric

logger = logging.getLogger(__name__)

EARLY_STOP = "early_stop"
"""Key in the trainer's state."""


class ValidationResults:
    """The validation results of one run. Every rank has them and notes the same values.

    With `patience` the run stops after this many validations in a row without an improvement. An improvement is larger
    than `min_delta`.
    """

    def __init__(self, metric: Metric, patience: int | None = None, min_delta: float = 0.0) -> None:
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.step = -1
        self.measured: dict[str, float] = {}
        """Finite metrics of the validation at `step`, by their names in metrics.jsonl."""
        self.best: float | None = None
        self.since_best = 0
        """Number of validations since the best one."""
        self.requested_stop = ""
        """Why the program or a callback ends the run; "" if it does not."""

    def record(self, step: int, measured: Mapping[str, float]) -> None:
        """Record the metrics of a validation at the state after `step`."""
        self.step, self.measured = step, {name: value for name, value in measured.items() if math.isfinite(value)}
        value = measured.get(self.metric.name, math.nan)
        if self.metric.is_better(value, self.best, self.min_delta):
            self.best, self.since_best = value, 0
        else:
            self.since_best += 1

    def is_missing(self, step: int) -> bool:
        """Return True if a run that resumes after this step still has to validate it, as a stop prevented it."""
        return self.patience is not None and self.step != step

    @property
    def stop_reason(self) -> str:
        """The reason why the run stops early, or "" if it continues."""
        if self.patience is None or self.since_best < self.patience:
            return self.requested_stop
        best = "never finite" if self.best is None else f"not better than {self.best:.4g}"
        margin = f" by more than {self.min_delta:g}" if self.min_delta else ""
        count_text = f"{self.since_best} validation{'s' * (self.since_best > 1)}"
        return f"{self.metric.name} was {best}{margin} in {count_text} (early_stop.patience)"

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the JSON-able state at the state after `step`."""
        metrics: dict[str, Any] = {MEASURED: self.measured} if self.measured and self.step == step else {}
        early_stop = {
            EARLY_STOP: {"best": self.best, "in_vain": self.since_best, "step": self.step} | self._metric_fields
        }
        return metrics if self.patience is None else metrics | early_stop

    def load_state_dict(self, step: int, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`; a checkpoint may have none of it.

        Counts for another metric do not apply to this one: counting then starts again, from the validation at this step
        if there was one.
        """
        early_stop = state.get(EARLY_STOP, {})
        self.step, self.measured = (step if MEASURED in state else early_stop.get("step", -1)), state.get(MEASURED, {})
        self.best, self.since_best, self.requested_stop = None, 0, ""
        if self._metric_fields.items() <= early_stop.items():
            self.best, self.since_best = early_stop["best"], early_stop["in_vain"]
            return
        if self.patience is not None and self.measured:
            self.record(step, self.measured)
        if self.patience is not None and early_stop:
            logger.info("early_stop: the checkpoint has counted by another metric, so %s begins anew", self.metric.name)

    @property
    def _metric_fields(self) -> dict[str, Any]:
        return {"metric": self.metric.name, "highest": self.metric.highest}


RESERVE_SHARE, LONGEST_RESERVE = 0.05, 60.0
"""Reserve for delays at the end: a fraction of the initial time, at most this many seconds."""


def seconds_of(text: str) -> float:
    """Parse a duration "[days-]hours:minutes:seconds", as SLURM writes it, to seconds."""
    days, _, clock = text.rpartition("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    return 86400.0 * int(days or 0) + 3600 * hours + 60 * minutes + seconds


class TimeLimit:
    """The remaining time of a job: `seconds` from now, or no limit if None. Measured on the monotonic clock, so changes
    of the wall clock do not matter.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.end = None if seconds is None else clock() + seconds
        self.reserve = 0.0 if seconds is None else min(RESERVE_SHARE * seconds, LONGEST_RESERVE)
        self._step_started: float | None = None
        self._step_seconds: list[float] = []
        """Duration of the first turn, which may compile, and the longest of the others."""

    def is_near(self, save_seconds: float) -> bool:
        """Return True if one more step and the save after it might not finish in time. Called before every step.
        Assumes twice the longest duration of each so far, since step and save times vary.
        """
        now = self.clock()
        if self._step_started is not None:
            self._step_seconds = [*self._step_seconds[:1], max([now - self._step_started, *self._step_seconds[1:]])]
        self._step_started = now
        if self.end is None:
            return False
        # the first turn is the only estimate until the second ends, and is then ignored: compilation does not recur
        longest_turn = self._step_seconds[-1] if self._step_seconds else 0.0
        return now + 2 * (longest_turn + save_seconds) + self.reserve >= self.end


@dataclass
class Stops:
    """Requests to stop a run before it is done. `limit`: of its time."""

    limit: TimeLimit
    requested: bool = False
    """On this rank; signal handlers set it at any time."""
    agreed: bool = False
    """By all ranks."""
    out_of_time: bool = False

    def check_time(self, save_seconds: float) -> None:
        """Request a stop if the time ends. Only rank 0 calls it, before every step, see `TimeLimit.is_near`."""
        if not self.out_of_time and self.limit.is_near(save_seconds):
            logger.info("stopping after this step, before the time limit (job.time_limit or SLURM's) is reached")
            self.requested = self.out_of_time = True


def shortest(*limits: float | None) -> float | None:
    """Return the smallest limit that is set, or None."""
    return min((limit for limit in limits if limit is not None), default=None)
