"""Where a run's metrics go beside metrics.jsonl. No torch, and no tracker's package before a run opens it.

A new tracker is one file with a subclass of `Tracker`, one line here, and an extra in pyproject.toml of the same name.
All get the tags that torchtitan's users have on their dashboards. What a bare tag means is torchtitan's:
throughput(tps) is per device, and tflops and mfu(%) count attention in full, masked or not. mfu_causal(%) and
mfu_full(%) cannot be confused.
"""

from collections.abc import Iterable

from torchtitan.core.registry import Registry
from torchtitan.metrics.trackers.aim import Aim
from torchtitan.metrics.trackers.interface import ID_FILE, Tracker
from torchtitan.metrics.trackers.mlflow import MLflow
from torchtitan.metrics.trackers.tensorboard import TensorBoard
from torchtitan.metrics.trackers.wandb import WeightsAndBiases

TRACKERS: Registry[type[Tracker]] = Registry(
    "torchtitan.trackers",
    {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow, "aim": Aim},
    type,
)


def left_by(named: Iterable[str] = ()) -> set[str]:
    """What our trackers, and those of these names, put at the top of a job's folder."""
    kinds = [TRACKERS[name] for name in {*TRACKERS.data, *named} if name in TRACKERS]
    return {left for kind in kinds for left in (ID_FILE.format(kind.package), *kind.leaves)}
