"""The optimizer and its learning rate."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtitan.config.sections.field_types import STRICT, Fraction, InEpochs, NameIn, NonNegative, PartOfRun, Positive


@dataclass(config=STRICT, kw_only=True)
class Optimizer:
    """The optimizer and its learning rate."""

    name: Annotated[str, NameIn("torchtitan.optimizers:OPTIMIZERS")] = "AdamW"
    """Optimizer."""
    lr: Annotated[float, Field(gt=0)] = 8e-4
    """Peak learning rate."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment (Adam, AdamW)."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment (Adam, AdamW)."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator (Adam, AdamW)."""
    options: dict[str, int | float | bool | str | list[str]] = field(default_factory=dict)
    """What else the optimizer reads, e.g. {momentum = 0.9} for SGD; `torchtitan list optimizers` shows all."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled in AdamW, added to the gradient in Adam and SGD (as in torch)."""
    decay_norms_and_biases: bool = True
    """Whether weight decay also acts on one-dimensional parameters (norm weights, biases)."""
    implementation: Literal["for-loop", "foreach", "fused"] | None = None
    """What runs the update. Unset: the fastest that the optimizer has (fused in torch's)."""
    early_step_in_backward: bool = False
    """Step each parameter as soon as its gradient is ready, then free the gradient. Saves memory; excludes clipping
    (set training.max_norm = 0) and gradient accumulation."""


@dataclass(config=STRICT, kw_only=True)
class LRScheduler:
    """The shape of the learning rate over the run."""

    warmup_steps: NonNegative | PartOfRun | InEpochs | None = None
    """Steps of warmup, a share of the total such as 0.03, "epoch" or "N/epoch". Unset: 10 % of the total, at least 2.
    """
    warmup_type: Literal["linear", "quadratic", "cosine"] = "linear"
    """Shape of the warmup: of its part q that is done, q, its square, or half a cosine."""
    total_steps: Positive | None = None
    """Length of the schedule. Unset: training.steps. The rate stays at its floor after it."""
    t_max: Positive | None = None
    """Length of the schedule in units of t_max_unit, instead of total_steps."""
    t_max_unit: Literal["epoch", "step", "token"] = "epoch"
    """What t_max counts. Whatever it is, the rate changes with every step."""
    decay_ratio: Fraction | None = None
    """Share of the total spent decaying, at its end; what lies between warmup and decay stays at the peak
    (warmup-stable-decay). Unset: decay starts right after warmup."""
    decay_type: Annotated[
        str, NameIn("torchtitan.lr_schedules:DECAYS", ("constant", "relora_cosine", "relora_cyclical"))
    ] = "linear"
    """Shape of the decay. docs/low_rank.md describes relora_cosine and relora_cyclical."""
    num_cycles: Positive = 1
    """Cycles of cosine_restarts."""
    min_lr_factor: Fraction = 0.1
    """The floor, as a fraction of optimizer.lr, reached exactly at the last step."""
    cycle_length: Positive | None = None
    """Steps of a cycle of relora_cosine and relora_cyclical. Unset: adapter.relora.reset_every or every."""
    restart_warmup_steps: NonNegative | None = None
    """Steps in which relora_cosine comes back to its curve after each cut."""
    adjust_step: NonNegative = 0
    """Moves the cuts of relora_cosine that many steps ahead, the first one too."""
