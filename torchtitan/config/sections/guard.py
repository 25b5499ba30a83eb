"""What a run does about a bad step, and how often it looks whether its ranks still agree."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtitan.config.sections.kinds import STRICT, NonNegative, Positive


@dataclass(config=STRICT, kw_only=True)
class Guard:
    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """After a loss or gradient that is NaN or infinite: stop with the last good step saved; leave the step's update
    out; or go back to the newest checkpoint and do its steps again, once, as an error of the machine does not come
    again. With anything but stop the host waits for the device in every step."""
    spike: Literal["off", "stop", "skip", "rollback"] = "off"
    """The same after a loss or gradient norm far above those before it."""
    spike_window: Annotated[int, Field(ge=4)] = 128
    """Steps before a step that its loss and norm are compared with; from half as many on."""
    spike_sigmas: Annotated[float, Field(gt=0)] = 6.0
    """So many standard deviations above their mean is a spike (at least so many times 1 % of the mean)."""
    loss_rise: Annotated[float, Field(gt=0)] | None = None
    """Stop, saved, once the mean loss of a window lies this far above the lowest such mean. Unset: never."""
    patience: Positive = 5
    """So many bad steps in a row, or ways back to one checkpoint, end the run."""
    replica_check_interval: NonNegative = 100
    """Every so many steps, and before every save, compare what several ranks must hold alike; 0: never."""
