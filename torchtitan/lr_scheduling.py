"""The learning-rate schedule on torch's LambdaLR.

Its state is the step only, because the shape belongs to the job: a run resumed with another peak or length continues on
the new job's schedule. The last rate is saved too, to report how far it jumps at a resume.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torchtitan.lr_schedules import LRSchedule


class LRSchedulers:
    """One schedule for several optimizers. The rate of a parameter group is its peak.

    `lr` is the job's rate, for ranks without optimizers, such as pipeline ranks with frozen layers only.
    """

    def __init__(self, optimizers: Sequence[Optimizer], schedule: LRSchedule, lr: float = 0.0) -> None:
        self.schedule, self.lr, self._step = schedule, lr, 0
        self._rate_once: float | None = None
        self.rate_before: float | None = None
        """The rate that the next step would have had in the resumed job; None if the run was not resumed."""
        self._schedulers = [LambdaLR(optimizer, self._multiplier) for optimizer in optimizers]
        for optimizer in optimizers:
            optimizer._opt_called = True  # torch warns otherwise if the first step is skipped, which is no mistake here

    def _multiplier(self, step: int) -> float:
        return self.schedule.multiplier(step)

    @property
    def last_lr(self) -> float:
        """Learning rate of the first parameter group in the next optimizer step."""
        if not self._schedulers:
            return self.lr * self.schedule.multiplier(self._step) if self._rate_once is None else self._rate_once
        return float(self._schedulers[0].optimizer.param_groups[0]["lr"])

    def use_once(self, lr: float) -> None:
        """Use another rate than the job's in the next optimizer step; parameter groups keep their ratios to that, so
        that all pipeline ranks agree, whichever group is their first.
        """
        self._rate_once = lr
        for scheduler in self._schedulers:
            for group, peak in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
                group["lr"] = lr * (peak / self.lr) if self.lr else lr

    def step(self) -> None:
        """Advance by one step. Call it after the optimizers' step."""
        self._step += 1
        self._rate_once = None
        for scheduler in self._schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, float]:
        return {"step": self._step, "lr": self.last_lr}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the saved step and set the rate of every parameter group.

        Call it after loading the optimizers' state, which contains the rates of the saved job.
        """
        multiplier = self.schedule.multiplier(state["step"])
        self._step, self.rate_before = state["step"], state.get("lr")  # None in checkpoints of earlier versions
        for scheduler in self._schedulers:
            scheduler.last_epoch = state["step"]
            for group, peak in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
                group["lr"] = peak * multiplier


def build_lr_schedulers(optimizers: Sequence[Optimizer], schedule: LRSchedule, lr: float = 0.0) -> LRSchedulers:
    """Create the schedulers, and set the rates of step 0."""
    return LRSchedulers(optimizers, schedule, lr)
