"""What a run does about a bad step, how often it looks whether its ranks still agree, when it has learned enough."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtitan.config.sections.kinds import STRICT, NonNegative, Positive


@dataclass(config=STRICT, kw_only=True)
class Guard:
    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """After a loss or gradient that is NaN or infinite while the weights are finite: stop with the last good step
    saved; leave the step's update out; or go back to the newest checkpoint and do its steps again, once, as an error of
    the machine does not come again. With anything but stop the host waits for the device in every step. If the weights
    are not finite, the run goes back once for each step, and ends if it comes again."""
    spike: Literal["off", "stop", "skip", "rollback"] = "off"
    """The same after a loss or gradient norm far above those before it."""
    spike_window: Annotated[int, Field(ge=4)] = 128
    """Steps before a step that its loss and norm are compared with; from half as many on."""
    spike_sigmas: Annotated[float, Field(gt=0)] = 6.0
    """So many standard deviations above their mean is a spike (at least so many times 1 % of the mean)."""
    loss_rise: Annotated[float, Field(gt=0)] | None = None
    """Stop, saved, once the mean loss of a window lies this far above the lowest such mean. Unset: never."""
    loss_threshold: float | None = None
    """A loss that stays above this for loss_patience steps falls under loss_policy. Every step counts once, logged or
    not. Unset: never."""
    loss_patience: Positive = 3
    """So many steps in a row above loss_threshold."""
    loss_policy: Literal["stop", "skip", "rollback"] = "stop"
    """As non_finite, for the last of these steps, and for those after it until the loss is below again."""
    patience: Positive = 5
    """So many bad steps in a row, or ways back to one checkpoint, end the run."""
    replica_check_interval: NonNegative = 100
    """Every so many steps, and before every save, compare what several ranks must hold alike; 0: never."""
    shard_checksums: bool = False
    """Checksums of all weights and optimizer moments after each step, compared before the next update and before every
    save: a bit that flips in memory between steps is reported with its rank and tensor, and the run goes back to the
    newest checkpoint, once for each step. Costs two passes over them in every step."""


@dataclass(config=STRICT, kw_only=True)
class EarlyStop:
    patience: Positive | None = None
    """End the run after so many validations in a row none of which was better than the best before it. It ends as one
    that is done: the last step is saved and exported. Unset: never."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """Better is what is more than this better than the best so far."""
    metric: str | None = None
    """What is looked at, under its name in metrics.jsonl. Unset: checkpoint.best_metric, else validation_loss."""
