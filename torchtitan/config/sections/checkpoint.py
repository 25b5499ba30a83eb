"""What is saved, and what a run begins from."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtitan.config.sections.field_types import STRICT, Cadence, NonNegative, Place


@dataclass(config=STRICT, kw_only=True)
class Checkpoint:
    """Saving, resuming, initial weights and exports."""

    enable: bool = False
    """Save checkpoints, and resume from the newest complete one in the folder. Without it a run can still begin from
    initial_load_path."""
    folder: str = "checkpoint"
    """Folder of the checkpoints, inside job.dump_folder."""
    interval: Cadence = 500
    """Distance between saves: steps, a share of the run such as 0.1, "epoch" or "N/epoch"; or seconds."""
    interval_type: Literal["steps", "seconds"] = "steps"
    """Unit of interval. The last step is always saved."""
    initial_load_path: Place | None = None
    """Weights to start from when the folder holds no checkpoint of its own: a checkpoint, a folder of them, an export;
    a checkpoint of torchtitan; a folder of Hugging Face or one file of safetensors. Which it is, is found out."""
    initial_load_model_only: bool = True
    """Take only the weights from initial_load_path; false also takes optimizer, schedule and data position."""
    initial_load_counters: bool = False
    """Beside the weights of initial_load_path take how far they were trained: steps and tokens are counted on, the
    data go on where they were, while optimizer and schedule begin. training.steps then counts the steps of both."""
    initial_load_in_hf: bool = False
    """Insist that initial_load_path is Hugging Face's."""
    last_save_model_only: bool = False
    """Also write the weights alone after the last step (beside the full checkpoint, never instead of it)."""
    last_save_in_hf: bool = False
    """Write those weights as Hugging Face safetensors."""
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Type of the weights written by last_save_model_only."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write in the background; the loop waits only for the copy out of the live tensors."""
    keep_latest_k: NonNegative = 10
    """Keep this many checkpoints, at least 2; 0 keeps all."""
    best_metric: str | None = None
    """Also keep the best checkpoint by what its validation measured, under a name of metrics.jsonl, e.g.
    "validation_loss". Each save then falls on a validation: interval is a multiple of validation.freq."""
    best_mode: Literal["min", "max"] | None = None
    """Whether the lowest or the highest value of best_metric is the best. Unset: the lowest loss, the highest of
    anything else."""
    export_best: bool = False
    """At the end export the weights of the best checkpoint instead of the last step's."""
    load_step: Annotated[int, Field(ge=-1)] = -1
    """Resume from this step instead of the newest one (-1)."""
    exclude_from_loading: list[Literal["optimizer", "lr_scheduler", "dataloader", "rng"]] = field(default_factory=list)
    """Parts that keep their fresh state when a full checkpoint is loaded."""
    allow_config_change: list[str] = field(default_factory=list)
    """Options that may differ from the checkpoint's job although the curve is then another, e.g. ["optimizer.lr"].
    Without this a resume refuses them by name."""
    enable_first_step_checkpoint: bool = False
    """Also save after the first step, to see that saving works."""
    load_only: bool = False
    """Load, but never save."""
    verify: bool = True
    """Read every save back from the disk before it is published, and look at the content of two checkpoints that stay
    before older ones are deleted."""
    on_save_error: Literal["continue", "stop"] = "continue"
    """After a save that failed, also when tried again: go on and say so, or stop. The last save stops in any case."""
