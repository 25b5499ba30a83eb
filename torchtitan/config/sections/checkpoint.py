"""Checkpoints, exports and initial weights."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtitan.config.sections.field_types import STRICT, Cadence, NonNegative, Place


@dataclass(config=STRICT, kw_only=True)
class Checkpoint:
    """Saving, resuming, initial weights and exports."""

    enable: bool = False
    """Save checkpoints, and resume from the newest complete one in the folder. If off, a run can still start from
    initial_load_path."""
    folder: str = "checkpoint"
    """Folder of the checkpoints, inside job.dump_folder."""
    interval: Cadence = 500
    """Distance between saves: steps, a fraction of the run such as 0.1, "epoch" or "N/epoch"; or seconds."""
    interval_type: Literal["steps", "seconds"] = "steps"
    """Unit of interval. The last step is always saved."""
    initial_load_path: Place | None = None
    """Weights to start from if the folder holds no checkpoint: a checkpoint or a folder of them, an export, a
    checkpoint of torchtitan, a Hugging Face folder, or a safetensors file. The format is detected."""
    initial_load_model_only: bool = True
    """Load only the weights from initial_load_path; false also loads optimizer, schedule and data position."""
    initial_load_counters: bool = False
    """Also continue the step and token counts and the data position of initial_load_path, with a new optimizer and
    schedule. training.steps then includes the steps of the earlier run."""
    initial_load_in_hf: bool = False
    """Require initial_load_path to be in Hugging Face format."""
    last_save_model_only: bool = False
    """Also write the weights alone after the last step, in addition to the full checkpoint."""
    last_save_in_hf: bool = False
    """Write those weights as Hugging Face safetensors."""
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Type of the weights written by last_save_model_only."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write in the background; training only waits for the copy of the live tensors."""
    keep_latest_k: NonNegative = 10
    """Number of checkpoints to keep, at least 2; 0 keeps all."""
    best_metric: str | None = None
    """Also keep the best checkpoint by this validation metric, named as in metrics.jsonl, e.g. "validation_loss".
    Requires interval to be a multiple of validation.freq."""
    best_mode: Literal["min", "max"] | None = None
    """Direction of best_metric: the lowest value is the best, or the highest. Unset: the lowest loss, the highest of
    any other metric."""
    export_best: bool = False
    """Export the weights of the best checkpoint at the end instead of the last step's."""
    load_step: Annotated[int, Field(ge=-1)] = -1
    """Resume from this step instead of the newest one (-1)."""
    exclude_from_loading: list[Literal["optimizer", "lr_scheduler", "dataloader", "rng"]] = field(default_factory=list)
    """Parts that start from scratch when a full checkpoint is loaded."""
    allow_config_change: list[str] = field(default_factory=list)
    """Options that may differ from the checkpoint's job although they change the loss curve, e.g. ["optimizer.lr"]. A
    resume refuses all others by name."""
    enable_first_step_checkpoint: bool = False
    """Also save after the first step, to test that saving works."""
    load_only: bool = False
    """Load, but never save."""
    verify: bool = True
    """Read every checkpoint back from disk before it is published, and verify two of the remaining ones before older
    ones are deleted."""
    on_save_error: Literal["continue", "stop"] = "continue"
    """Reaction to a save that fails twice: log it and continue, or stop. A failure of the last save always stops the
    run."""
