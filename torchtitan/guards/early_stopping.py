"""Validation results of a run: metrics saved with checkpoints, the best value, and early stopping. Needs no torch."""

import logging
import math
from collections.abc import Mapping
from typing import Any

from torchtitan.checkpoint.best_metric import MEASURED, Metric

logger = logging.getLogger(__name__)

EARLY_STOP = "early_stop"
"""Key in the trainer's state."""


class Findings:
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
        self.in_vain = 0
        """Number of validations since the best one."""

    def note(self, step: int, measured: Mapping[str, float]) -> None:
        """Record the metrics of a validation at the state after `step`."""
        self.step, self.measured = step, {name: value for name, value in measured.items() if math.isfinite(value)}
        value = measured.get(self.metric.name, math.nan)
        if self.metric.is_better(value, self.best, self.min_delta):
            self.best, self.in_vain = value, 0
        else:
            self.in_vain += 1

    def lack(self, step: int) -> bool:
        """Return True if a run that resumes after this step still has to validate it, as a stop prevented it."""
        return self.patience is not None and self.step != step

    @property
    def enough(self) -> str:
        """The reason why the run stops early, or "" if it continues."""
        if self.patience is None or self.in_vain < self.patience:
            return ""
        best = "never finite" if self.best is None else f"not better than {self.best:.4g}"
        margin = f" by more than {self.min_delta:g}" if self.min_delta else ""
        count_text = f"{self.in_vain} validation{'s' * (self.in_vain > 1)}"
        return f"{self.metric.name} was {best}{margin} in {count_text} (early_stop.patience)"

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the JSON-able state at the state after `step`."""
        metrics: dict[str, Any] = {MEASURED: self.measured} if self.measured and self.step == step else {}
        early_stop = {EARLY_STOP: {"best": self.best, "in_vain": self.in_vain, "step": self.step} | self._looked_at}
        return metrics if self.patience is None else metrics | early_stop

    def load_state_dict(self, step: int, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`; a checkpoint may have none of it.

        Counts for another metric do not apply to this one: counting then starts again, from the validation at this step
        if there was one.
        """
        early_stop = state.get(EARLY_STOP, {})
        self.step, self.measured = (step if MEASURED in state else early_stop.get("step", -1)), state.get(MEASURED, {})
        self.best, self.in_vain = None, 0
        if self._looked_at.items() <= early_stop.items():
            self.best, self.in_vain = early_stop["best"], early_stop["in_vain"]
            return
        if self.patience is not None and self.measured:
            self.note(step, self.measured)
        if self.patience is not None and early_stop:
            logger.info("early_stop: the checkpoint has counted by another metric, so %s begins anew", self.metric.name)

    @property
    def _looked_at(self) -> dict[str, Any]:
        return {"metric": self.metric.name, "highest": self.metric.highest}
