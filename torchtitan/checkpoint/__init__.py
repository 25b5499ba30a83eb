"""Checkpoints: a save is published completely or not at all, and a run resumes from the newest complete one. Loading
never executes code from a checkpoint.

Finding and validating checkpoints needs no torch, and neither does importing this package: the modules that need it are
imported on first use.
"""

from importlib import import_module
from typing import Any

from torchtitan.checkpoint.layout import (
    CannotSave,
    CheckpointError,
    NothingLoadable,
    RefusedCheckpoint,
    newest_complete,
    read_state,
    resolve,
)

__all__ = [
    "CannotSave",
    "CheckpointError",
    "Checkpointer",
    "NothingLoadable",
    "RandomState",
    "RefusedCheckpoint",
    "TrainerHooks",
    "load_model_for_inference",
    "load_weights",
    "newest_complete",
    "read_state",
    "resolve",
    "rng_state",
    "set_rng_state",
]

_WITH_TORCH = {
    "Checkpointer": "checkpointer",
    "TrainerHooks": "saving",
    "load_model_for_inference": "loading",
    "load_weights": "loading",
    "RandomState": "random_state",
    "rng_state": "random_state",
    "set_rng_state": "random_state",
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
