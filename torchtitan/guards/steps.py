"""Decide how to handle a step with a bad loss or gradient, before its update, from values that all ranks share.

A step is bad if its loss or gradient norm is not finite or is a spike: more than some standard deviations above the
mean of a window of earlier steps, as in OLMo-core's optimizers that skip steps. The run then stops, skips the update,
or rolls back to its newest checkpoint and repeats the steps, because a hardware error does not recur. A step that is
bad again after a rollback is skipped. A loss above a threshold for several steps is handled in the same way, and each
such step counts once. Needs no torch.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan.core.errors import JobError

Policy = Literal["off", "stop", "skip", "rollback"]

VALUE_NAMES = {"loss": "loss", "norm": "gradient norm"}
SMALLEST_DEVIATION = 0.01
"""Smallest standard deviation, as a fraction of the mean.

Without it, a window of nearly equal values would make any other value a spike.
"""


WITHOUT_LABELS = (
    "all of them are padding, the first token of a document (training.document_mask), left out by the record (label = "
    "false, weight = 0), or not chosen by task.mask_share; look at the samples with `torchtitan preview`, and give "
    "records with text to learn"
)
"""What makes data that are there without effect, and what to do."""


class NothingToLearn(JobError):
    """The data have no token to train on or to validate with."""


class BadStep(ArithmeticError):
    """The run stops because of a bad step."""


class NonFiniteError(BadStep):
    """Loss, gradient, weights or moments are NaN or infinite. No checkpoint is written after it."""


class RollBack(Exception):
    """Raised on all ranks, before a step's update, to roll the run back to a checkpoint."""


@dataclass(frozen=True)
class Verdict:
    action: Literal["go on", "skip", "roll back", "stop"]
    reason: str = ""


class StepGuard:
    """Judges the steps of one run. Every rank has one, makes the same calls and gets the same verdicts.

    `loss_rise`: stop once the mean loss of a window is this far above the lowest such mean; None: never.
    `loss_threshold`: `loss_policy` applies from the `loss_patience`-th step in a row with a loss above it, until a step
    is below it; None: never. `patience`: the run also stops after this many bad steps in a row, or this many rollbacks
    to one checkpoint.
    """

    name = "guard"
    """Key of its state in a checkpoint."""

    def __init__(
        self,
        *,
        non_finite: Policy = "stop",
        spike: Policy = "off",
        spike_window: int = 128,
        spike_sigmas: float = 6.0,
        loss_rise: float | None = None,
        loss_threshold: float | None = None,
        loss_patience: int = 3,
        loss_policy: Policy = "stop",
        patience: int = 5,
    ) -> None:
        self.non_finite, self.spike, self.spike_sigmas = non_finite, spike, spike_sigmas
        self.loss_rise, self.patience, self.size = loss_rise, patience, spike_window
        self.window: dict[str, deque[float]] = {"loss": deque(maxlen=spike_window), "norm": deque(maxlen=spike_window)}
        self.loss_threshold, self.loss_patience, self.loss_policy = loss_threshold, loss_patience, loss_policy
        self.above = 0
        """Number of steps in a row with a loss above the threshold."""
        self.lowest: float | None = None
        """Lowest mean loss of a window."""
        self.skipped = self.in_a_row = 0
        # not reset by a rollback:
        self.rolled_back = 0
        self.rollback_steps: set[int] = set()
        """Steps that the run has rolled back for. A step that is bad again is skipped."""
        self.target, self.tries = -1, 0
        """The checkpoint of the last rollback, and the number of rollbacks to it in a row."""

    @property
    def is_active(self) -> bool:
        """True if the guard needs each step's loss and norm, which makes the host wait for the device."""
        thresholds = (self.loss_rise, self.loss_threshold)
        return self.non_finite != "stop" or self.spike != "off" or thresholds != (None, None)

    def judge(
        self,
        step: int,
        loss: float,
        norm: float | None,
        can_skip: bool = True,
        prepare_roll_back: Callable[[], bool] = lambda: True,
    ) -> Verdict:
        """Return the verdict on the `step`-th step of the run.

        `norm`: gradient norm, None if unknown. `can_skip`: no part of the update has been applied. `prepare_roll_back`:
        returns whether there is a checkpoint; called only if the run would roll back for this step.
        """
        policy, fault = self._fault(loss, norm)
        if not fault:
            return self._accept(loss, norm)
        self.in_a_row += 1
        if policy == "stop":
            return Verdict("stop", fault)
        if self.in_a_row >= self.patience:
            return Verdict("stop", f"{fault}: bad step {self.in_a_row} in a row (guard.patience)")
        if policy == "rollback" and step not in self.rollback_steps and prepare_roll_back():
            if self.tries >= self.patience:
                return Verdict("stop", f"{fault}: {self.tries} times back to step {self.target} (guard.patience)")
            self.rollback_steps.add(step)
            return Verdict("roll back", fault)
        if not can_skip:
            return Verdict("stop", f"{fault}, and its update has been made in backward")
        self.skipped += 1
        return Verdict("skip", fault)

    def counts(self) -> dict[str, float]:
        """Return counters for the log; empty if no step is judged."""
        return {"steps_skipped": self.skipped, "rolled_back": self.rolled_back} if self.is_active else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-able state; empty if no step is judged."""
        if not self.is_active:
            return {}
        return {
            "seen": {name: list(values) for name, values in self.window.items()},
            "lowest": self.lowest,
            "above": self.above,
            "skipped": self.skipped,
            "in_a_row": self.in_a_row,
            "rolled_back": self.rolled_back,
            "again": sorted(self.rollback_steps),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`; empty if a checkpoint has none."""
        for name, values in self.window.items():
            values.clear()
            values.extend(state.get("seen", {}).get(name, ()))
        self.lowest, self.above = state.get("lowest"), state.get("above", 0)
        self.skipped, self.in_a_row = state.get("skipped", 0), state.get("in_a_row", 0)
        # after a rollback in this run, the live counters are newer than the checkpoint's
        self.rolled_back = max(self.rolled_back, state.get("rolled_back", 0))
        self.rollback_steps |= set(state.get("again", ()))

    def on_rollback(self, target: int) -> None:
        """Count a rollback to the state of step `target`."""
        self.rolled_back += 1
        self.tries = self.tries + 1 if target == self.target else 1
        self.target = target

    def _fault(self, loss: float, norm: float | None) -> tuple[Policy, str]:
        """Return the policy that applies to the step and its fault, or "" if there is none."""
        self.above = 0 if self.loss_threshold is None or loss <= self.loss_threshold else self.above + 1
        values = {"loss": loss} | ({} if norm is None else {"norm": norm})
        for name, value in values.items():
            if not math.isfinite(value):
                return self.non_finite, f"the {VALUE_NAMES[name]} is {value}"
        if self.spike != "off":
            for name, value in values.items():
                # half a window is enough for mean and deviation
                if len(window := self.window[name]) >= max(2, self.size // 2):
                    mean = statistics.fmean(window)
                    std = math.sqrt(statistics.fmean((past_value - mean) ** 2 for past_value in window))
                    deviation = max(std, SMALLEST_DEVIATION * abs(mean))
                    if value > mean + self.spike_sigmas * deviation:
                        baseline = f"{mean:.4g} +- {deviation:.2g} of the {len(window)} steps before"
                        return self.spike, f"the {VALUE_NAMES[name]} is {value:.4g}, against {baseline}"
        if self.above >= self.loss_patience:
            duration = f"for {self.above} step{'s' * (self.above > 1)} (guard.loss_threshold)"
            return self.loss_policy, f"the loss is {loss:.4g}, above {self.loss_threshold:g} {duration}"
        return "off", ""

    def _accept(self, loss: float, norm: float | None) -> Verdict:
        self.in_a_row = 0
        self.window["loss"].append(loss)
        if norm is not None:
            self.window["norm"].append(norm)
        if self.loss_rise is not None and len(self.window["loss"]) == self.size:
            mean = statistics.fmean(self.window["loss"])
            self.lowest = mean if self.lowest is None else min(self.lowest, mean)
            if mean > self.lowest + self.loss_rise:
                message = f"the mean loss of the last {self.size} steps is {mean:.4g}, and was {self.lowest:.4g} before"
                return Verdict("stop", f"{message} (guard.loss_rise)")
        return Verdict("go on")
