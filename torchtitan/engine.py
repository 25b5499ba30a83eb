"""The Python API: drive a job step by step, with losses, batches and callbacks of your own (docs/python.md)."""

from torchtitan.core import distributions

distributions.require_one()  # before modules of which PyTorch's torchtitan may have overwritten some

from torchtitan.core.callbacks import Callback
from torchtitan.losses.log_probs import LossError, LossFunction, LossInputs
from torchtitan.training.callbacks import CallbackError
from torchtitan.training.caller_batches import EngineError
from torchtitan.training.engine import Engine, StepLoss
from torchtitan.training.sampling import Sample
from torchtitan.training.step import StepData, StepResult

__all__ = [
    "Callback",
    "CallbackError",
    "Engine",
    "EngineError",
    "LossError",
    "LossFunction",
    "LossInputs",
    "Sample",
    "StepData",
    "StepLoss",
    "StepResult",
]
