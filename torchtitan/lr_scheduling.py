"""The learning-rate schedule on torch's LambdaLR. Its state is the step: the shape belongs to the job, so a run resumed
with another peak or length goes on by the new job's schedule. The rate is kept beside it, to tell how far it jumps."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torchtitan.lr_shapes import LRSchedule


class LRSchedulers:
    """One schedule over several optimizers. A parameter group's own rate is its peak."""

    def __init__(self, optimizers: Sequence[Optimizer], schedule: LRSchedule) -> None:
        self.schedule = schedule
        self.rate_before: float | None = None
        """What the next step would have taken in the job that was resumed; None of a run that was not."""
        self._schedulers = [LambdaLR(optimizer, self._multiplier) for optimizer in optimizers]

    def _multiplier(self, step: int) -> float:
        return self.schedule.multiplier(step)

    @property
    def last_lr(self) -> float:
        """Of the first parameter group: what the next optimizer step takes."""
        return float(self._schedulers[0].optimizer.param_groups[0]["lr"])

    def step(self) -> None:
        """After the optimizers' step."""
        for scheduler in self._schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, float]:
        return {"step": self._schedulers[0].last_epoch, "lr": self.last_lr}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the saved step, and set every parameter group's rate; call it after the optimizers' state is loaded,
        which brings the rates of the saved job."""
        multiplier = self.schedule.multiplier(state["step"])
        self.rate_before = state.get("lr")  # checkpoints of earlier versions have none
        for scheduler in self._schedulers:
            scheduler.last_epoch = state["step"]
            for group, peak in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
                group["lr"] = peak * multiplier


def build_lr_schedulers(optimizers: Sequence[Optimizer], schedule: LRSchedule) -> LRSchedulers:
    """Sets the rates of step 0 at once."""
    return LRSchedulers(optimizers, schedule)
