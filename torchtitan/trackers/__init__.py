"""Where a run's metrics go beside metrics.jsonl. No torch, and no tracker's package before a run opens it.

A new tracker is one file with a subclass of `Tracker`, one line here, and an extra in pyproject.toml of the same name.
All get the tags that torchtitan's users have on their dashboards. What a bare tag means is torchtitan's:
throughput(tps) is per device, and tflops and mfu(%) count attention in full, masked or not. mfu_causal(%) and
mfu_full(%) cannot be confused.
"""

from torchtitan.registration import Registry
from torchtitan.trackers.aim import Aim
from torchtitan.trackers.interface import Tracker
from torchtitan.trackers.mlflow import MLflow
from torchtitan.trackers.tensorboard import TensorBoard
from torchtitan.trackers.wandb import WeightsAndBiases

TRACKERS: Registry[type[Tracker]] = Registry(
    "torchtitan.trackers",
    {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow, "aim": Aim},
    type,
)
