"""What a run says about itself: rates, memory and MFU, on the console, in metrics.jsonl, TensorBoard and W&B."""

from torchtitan.metrics.logger import MetricsLogger
from torchtitan.metrics.patience import PatientTracker
from torchtitan.metrics.tracking import TensorBoard, TrackingError, WeightsAndBiases

__all__ = ["MetricsLogger", "PatientTracker", "TensorBoard", "TrackingError", "WeightsAndBiases"]
