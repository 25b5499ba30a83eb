"""The learning-rate schedule on torch's LambdaLR. Its state is the step: the shape belongs to the job, so a run resumed
with another peak or length goes on by the new job's schedule. The rate is kept beside it, to tell how far it jumps."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torchtitan.lr_shapes import LRSchedule


class LRSchedulers:
    """One schedule over several optimizers. A parameter group's own rate is its peak; `lr` is the job's, for a rank
    that has none, such as that of a pipeline whose layers are all frozen.
    """

    def __init__(self, optimizers: Sequence[Optimizer], schedule: LRSchedule, lr: float = 0.0) -> None:
        self.schedule, self.lr, self._step = schedule, lr, 0
        self.rate_before: float | None = None
        """What the next step would have taken in the job that was resumed; None of a run that was not."""
        self._schedulers = [LambdaLR(optimizer, self._multiplier) for optimizer in optimizers]

    def _multiplier(self, step: int) -> float:
        return self.schedule.multiplier(step)

    @property
    def last_lr(self) -> float:
        """Of the first parameter group: what the next optimizer step takes."""
        if not self._schedulers:
            return self.lr * self.schedule.multiplier(self._step)
        return float(self._schedulers[0].optimizer.param_groups[0]["lr"])

    def step(self) -> None:
        """After the optimizers' step."""
        self._step += 1
        for scheduler in self._schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, float]:
        return {"step": self._step, "lr": self.last_lr}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the saved step, and set every parameter group's rate; call it after the optimizers' state is loaded,
        which brings the rates of the saved job."""
        multiplier = self.schedule.multiplier(state["step"])
        self._step, self.rate_before = state["step"], state.get("lr")  # of earlier versions' checkpoints None
        for scheduler in self._schedulers:
            scheduler.last_epoch = state["step"]
            for group, peak in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
                group["lr"] = peak * multiplier


def build_lr_schedulers(optimizers: Sequence[Optimizer], schedule: LRSchedule, lr: float = 0.0) -> LRSchedulers:
    """Sets the rates of step 0 at once."""
    return LRSchedulers(optimizers, schedule, lr)
