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
    """Constant added to the denominator (Adam, AdamW)."""
    options: dict[str, int | float | bool | str | list[str]] = field(default_factory=dict)
    """Further options of the optimizer, e.g. {momentum = 0.9} for SGD; `torchtitan list optimizers` lists them."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Weight decay: decoupled in AdamW, added to the gradient in Adam and SGD (as in torch)."""
    decay_norms_and_biases: bool = True
    """Apply weight decay to one-dimensional parameters too (norm weights, biases)."""
    implementation: Literal["for-loop", "foreach", "fused"] | None = None
    """Implementation of the update. Unset: the fastest that the optimizer has (fused for torch's)."""
    early_step_in_backward: bool = False
    """Step each parameter as soon as its gradient is ready, then free the gradient. Saves memory; excludes clipping
    (set training.max_norm = 0) and gradient accumulation."""


@dataclass(config=STRICT, kw_only=True)
class LRScheduler:
    """The shape of the learning rate over the run."""

    warmup_steps: NonNegative | PartOfRun | InEpochs | None = None
    """Length of the warmup: steps, a fraction of the total such as 0.03, "epoch" or "N/epoch". Unset: 10 % of the
    total, at least 2."""
    warmup_type: Literal["linear", "quadratic", "cosine"] = "linear"
    """Shape of the warmup as a function of its completed fraction: linear, its square, or half a cosine."""
    total_steps: Positive | None = None
    """Length of the schedule in steps, after which the rate stays at its floor. Unset: training.steps."""
    t_max: Positive | None = None
    """Length of the schedule in units of t_max_unit, instead of total_steps."""
    t_max_unit: Literal["epoch", "step", "token"] = "epoch"
    """Unit of t_max. The rate changes with every step in any case."""
    decay_ratio: Fraction | None = None
    """Fraction of the total spent decaying, at its end; between warmup and decay the rate stays at its peak
    (warmup-stable-decay). Unset: decay starts right after warmup."""
    decay_type: Annotated[
        str, NameIn("torchtitan.lr_schedules:DECAYS", ("constant", "relora_cosine", "relora_cyclical"))
    ] = "linear"
    """Shape of the decay. docs/low_rank.md describes relora_cosine and relora_cyclical."""
    num_cycles: Positive = 1
    """Cycles of cosine_restarts."""
    min_lr_factor: Fraction = 0.1
    """Final learning rate as a fraction of optimizer.lr, reached at the last step."""
    cycle_length: Positive | None = None
    """Steps of a cycle of relora_cosine and relora_cyclical. Unset: adapter.relora.reset_every, or
    adapter.relora.every."""
    restart_warmup_steps: NonNegative | None = None
    """Steps over which relora_cosine returns to its curve after each restart."""
    adjust_step: NonNegative = 0
    """Number of steps to move all restarts of relora_cosine forward, including the first."""
