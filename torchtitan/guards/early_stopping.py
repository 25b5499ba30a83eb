"""What the validations of a run have found: numbers that the checkpoint of their step keeps, by which the best one is
told, and whether there is more to learn. Needs no torch.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

from torchtitan.checkpoint.best_metric import MEASURED, Metric

logger = logging.getLogger(__name__)

EARLY_STOP = "early_stop"
"""In the trainer's state."""


class Findings:
    """Of one run. Every rank has them and notes the same. With `patience` the run has learned enough after so many
    validations in a row none of which was better than the best before it; better is by more than `min_delta`.
    """

    def __init__(self, metric: Metric, patience: int | None = None, min_delta: float = 0.0) -> None:
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.step = -1
        self.measured: dict[str, float] = {}
        """At that step, by the names in metrics.jsonl."""
        self.best: float | None = None
        self.in_vain = 0
        """Validations since the best one."""

    def note(self, step: int, measured: Mapping[str, float]) -> None:
        """After a validation at the state after `step`."""
        self.step, self.measured = step, {name: value for name, value in measured.items() if math.isfinite(value)}
        value = measured.get(self.metric.name, math.nan)
        if self.metric.is_better(value, self.best, self.min_delta):
            self.best, self.in_vain = value, 0
        else:
            self.in_vain += 1

    def lack(self, step: int) -> bool:
        """Whether a run that goes on behind this step has to see to its validation, which a stop has left out."""
        return self.patience is not None and self.step != step

    @property
    def enough(self) -> str:
        """Why the run ends, in words; nothing as long as it goes on."""
        if self.patience is None or self.in_vain < self.patience:
            return ""
        best = "never finite" if self.best is None else f"not better than {self.best:.4g}"
        more = f" by more than {self.min_delta:g}" if self.min_delta else ""
        times = f"{self.in_vain} validation{'s' * (self.in_vain > 1)}"
        return f"{self.metric.name} was {best}{more} in {times} (early_stop.patience)"

    def state_dict(self, step: int) -> dict[str, Any]:
        """JSON-able, at the state after `step`."""
        found: dict[str, Any] = {MEASURED: self.measured} if self.measured and self.step == step else {}
        counted = {EARLY_STOP: {"best": self.best, "in_vain": self.in_vain, "step": self.step} | self._looked_at}
        return found if self.patience is None else found | counted

    def load_state_dict(self, step: int, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave, among others; a checkpoint may have nothing of it. What was counted by another metric
        says nothing of this one: it is counted anew, from the validation at this step on where there was one.
        """
        counted = state.get(EARLY_STOP, {})
        self.step, self.measured = (step if MEASURED in state else counted.get("step", -1)), state.get(MEASURED, {})
        self.best, self.in_vain = None, 0
        if self._looked_at.items() <= counted.items():
            self.best, self.in_vain = counted["best"], counted["in_vain"]
            return
        if self.patience is not None and self.measured:
            self.note(step, self.measured)
        if self.patience is not None and counted:
            logger.info("early_stop: the checkpoint has counted by another metric, so %s begins anew", self.metric.name)

    @property
    def _looked_at(self) -> dict[str, Any]:
        return {"metric": self.metric.name, "highest": self.metric.highest}
