"""Trackers, which get a run's metrics in addition to metrics.jsonl.

Imports no torch, and a tracker's package only when a run opens it.

A new tracker is one file with a subclass of `Tracker`, one line here, and an extra in pyproject.toml of the same name.
All trackers get the tags of PyTorch's torchtitan, with the meaning that they have there: throughput(tps) is per device,
and tflops and mfu(%) count attention in full, masked or not. The tags mfu_causal(%) and mfu_full(%) are unambiguous.
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


def entries_of(tracker_names: Iterable[str] = ()) -> set[str]:
    """Return the names that our trackers, and the ones in `tracker_names`, create at the top of a job's folder."""
    kinds = [TRACKERS[name] for name in {*TRACKERS.data, *tracker_names} if name in TRACKERS]
    return {entry for kind in kinds for entry in (ID_FILE.format(kind.package), *kind.entries)}
