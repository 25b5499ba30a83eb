"""Find the best checkpoint by a validation metric. Each checkpoint stores its own metrics, so no separate record is
needed. Needs no torch, and executes nothing that it reads.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.checkpoint import layout
from torchtitan.checkpoint.layout import CheckpointError, NothingLoadable

MEASURED = "measured"
"""Key in the trainer's state: finite metrics of the validation at this very step, by their names in metrics.jsonl."""
LOSS = "validation_loss"


@dataclass(frozen=True)
class Metric:
    """A metric's name, and whether its highest value is the best."""

    name: str
    highest: bool

    @classmethod
    def of(cls, name: str, mode: str | None) -> "Metric":
        """Return the metric for a `mode`: "min", "max", or None for the lowest loss or the highest other value."""
        return cls(name, highest=not name.endswith("loss") if mode is None else mode == "max")

    def is_better(self, value: float, than: float | None, by: float = 0.0) -> bool:
        """Return True if `value` is better than `than` by more than `by`. A non-finite value never is."""
        if not math.isfinite(value):
            return False
        return than is None or (value - than if self.highest else than - value) > by


class Best(NamedTuple):
    folder: Path
    value: float


def best_of(complete: Iterable[Path], metric: Metric) -> Best | None:
    """Return the oldest checkpoint with the best value; None if none has a readable value."""
    best: Best | None = None
    for folder in sorted(complete):
        value = _measured(folder).get(metric.name)
        if isinstance(value, float) and metric.is_better(value, best and best.value):
            best = Best(folder, value)
    return best


def _measured(folder: Path) -> dict[str, Any]:
    try:
        measured = layout.read_state(folder)["trainer"].get(MEASURED)
    except CheckpointError:
        return {}
    return measured if isinstance(measured, dict) else {}


def metric_of(trainer: Mapping[str, Any]) -> Metric | None:
    """Return the metric that selects the best checkpoint in the job of this trainer state, or None."""
    job = trainer.get("job")
    options = job.get("checkpoint") if isinstance(job, dict) else None
    name = options.get("best_metric") if isinstance(options, dict) else None
    return Metric.of(name, options.get("best_mode")) if isinstance(name, str) else None


def best_in(root: Path, metric: Metric | None = None) -> Best:
    """Return the best checkpoint in a folder, by `metric` or by the metric of its newest checkpoint's job. Raises
    `NothingLoadable` if there is none.
    """
    complete, _ = layout.complete_steps(root)
    if metric is None and complete:
        metric = metric_of(layout.read_state(complete[0])["trainer"])
    if metric is None:
        raise NothingLoadable(f"{root}: its job has no checkpoint.best_metric, which tells the best; name a step")
    best = best_of(complete, metric)
    if best is None:
        raise NothingLoadable(f"{root}: no checkpoint in it has a {metric.name}, which tells the best; name a step")
    return best
