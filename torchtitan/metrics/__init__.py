"""What a run says about itself: rates, memory and MFU, on the console, in metrics.jsonl and to trackers."""

from torchtitan.metrics.goodput import Goodput
from torchtitan.metrics.logger import MetricsLogger
from torchtitan.metrics.patience import PatientTracker

__all__ = ["Goodput", "MetricsLogger", "PatientTracker"]
