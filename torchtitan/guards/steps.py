"""What becomes of a step whose loss or gradient is bad, judged before its update by what all ranks know alike.

A loss or gradient norm that is not finite, or that lies far above those before it (a spike: more than some standard
deviations above the mean of a window, as in OLMo-core's optimizers that skip steps), makes the step bad. Then the run
stops, or leaves the step's update out, or goes back to its newest checkpoint and does the steps again, as an error of
the machine does not come a second time; what comes again is left out. So does a loss that stays above a threshold for
several steps, each of which counts once. Needs no torch.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Policy = Literal["off", "stop", "skip", "rollback"]

WORDS = {"loss": "loss", "norm": "gradient norm"}
SMALLEST_DEVIATION = 0.01
"""Of the mean: a window of nearly equal values would call any other one a spike."""


class BadStep(ArithmeticError):
    """The run stops for what a step has computed."""


class NonFiniteError(BadStep):
    """Loss, gradient, weights or moments are NaN or infinite. No checkpoint is written after it."""


class RollBack(Exception):
    """Raised on all ranks, before a step's update: the run goes back."""


@dataclass(frozen=True)
class Verdict:
    action: Literal["go on", "skip", "roll back", "stop"]
    why: str = ""


class StepGuard:
    """Of one run. Every rank has one, asks it the same and gets the same answer.

    `loss_rise`: stop once the mean loss of a window lies this far above the lowest such mean; None: never.
    `loss_threshold`: the `loss_patience`-th step in a row whose loss lies above it falls under `loss_policy`, and so
    does each after it until one does not; None: never.
    `patience`: the run also stops at so many bad steps in a row, and at so many ways back to one checkpoint.
    """

    name = "guard"
    """Of its state in a checkpoint."""

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
        self.seen: dict[str, deque[float]] = {"loss": deque(maxlen=spike_window), "norm": deque(maxlen=spike_window)}
        self.loss_threshold, self.loss_patience, self.loss_policy = loss_threshold, loss_patience, loss_policy
        self.above = 0
        """Steps in a row whose loss was above the threshold."""
        self.lowest: float | None = None
        """Mean loss of a window."""
        self.skipped = self.in_a_row = 0
        # what a way back does not take back:
        self.rolled_back = 0
        self.again: set[int] = set()
        """Steps that the run has gone back for: bad once more, they are left out."""
        self.target, self.tries = -1, 0
        """The checkpoint of the last way back, and how many have led there."""

    @property
    def looks(self) -> bool:
        """Whether it wants to see each step's loss and norm, for which the host waits."""
        thresholds = (self.loss_rise, self.loss_threshold)
        return self.non_finite != "stop" or self.spike != "off" or thresholds != (None, None)

    def judge(
        self,
        step: int,
        loss: float,
        norm: float | None,
        can_skip: bool = True,
        can_go_back: Callable[[], bool] = lambda: True,
    ) -> Verdict:
        """Of the step that would be the `step`-th of the run. `norm` is the gradient's, None where it is not known;
        `can_skip`: nothing of the update has been made; `can_go_back`: whether there is a checkpoint, which is asked
        only for a step for which the run would go back.
        """
        policy, why = self._fault(loss, norm)
        if not why:
            return self._go_on(loss, norm)
        self.in_a_row += 1
        if policy == "stop":
            return Verdict("stop", why)
        if self.in_a_row >= self.patience:
            return Verdict("stop", f"{why}: bad step {self.in_a_row} in a row (guard.patience)")
        if policy == "rollback" and step not in self.again and can_go_back():
            if self.tries >= self.patience:
                return Verdict("stop", f"{why}: {self.tries} times back to step {self.target} (guard.patience)")
            self.again.add(step)
            return Verdict("roll back", why)
        if not can_skip:
            return Verdict("stop", f"{why}, and its update has been made in backward")
        self.skipped += 1
        return Verdict("skip", why)

    def counts(self) -> dict[str, float]:
        """For the log; nothing as long as nothing is looked at."""
        return {"steps_skipped": self.skipped, "rolled_back": self.rolled_back} if self.looks else {}

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; empty as long as nothing is looked at."""
        if not self.looks:
            return {}
        return {
            "seen": {name: list(values) for name, values in self.seen.items()},
            "lowest": self.lowest,
            "above": self.above,
            "skipped": self.skipped,
            "in_a_row": self.in_a_row,
            "rolled_back": self.rolled_back,
            "again": sorted(self.again),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave; empty where a checkpoint has nothing of it."""
        for name, values in self.seen.items():
            values.clear()
            values.extend(state.get("seen", {}).get(name, ()))
        self.lowest, self.above = state.get("lowest"), state.get("above", 0)
        self.skipped, self.in_a_row = state.get("skipped", 0), state.get("in_a_row", 0)
        # of a way back within this run more is known here than there
        self.rolled_back = max(self.rolled_back, state.get("rolled_back", 0))
        self.again |= set(state.get("again", ()))

    def went_back_to(self, target: int) -> None:
        """The run is at the state of step `target` again."""
        self.rolled_back += 1
        self.tries = self.tries + 1 if target == self.target else 1
        self.target = target

    def _fault(self, loss: float, norm: float | None) -> tuple[Policy, str]:
        """The policy that the step falls under, and what is wrong with it; "" if nothing is."""
        self.above = 0 if self.loss_threshold is None or loss <= self.loss_threshold else self.above + 1
        values = {"loss": loss} | ({} if norm is None else {"norm": norm})
        for name, value in values.items():
            if not math.isfinite(value):
                return self.non_finite, f"the {WORDS[name]} is {value}"
        if self.spike != "off":
            for name, value in values.items():
                # half a window is enough to know what is usual
                if len(before := self.seen[name]) >= max(2, self.size // 2):
                    mean = statistics.fmean(before)
                    spread = math.sqrt(statistics.fmean((one - mean) ** 2 for one in before))
                    deviation = max(spread, SMALLEST_DEVIATION * abs(mean))
                    if value > mean + self.spike_sigmas * deviation:
                        usual = f"{mean:.4g} +- {deviation:.2g} of the {len(before)} steps before"
                        return self.spike, f"the {WORDS[name]} is {value:.4g}, against {usual}"
        if self.above >= self.loss_patience:
            for_long = f"for {self.above} step{'s' * (self.above > 1)} (guard.loss_threshold)"
            return self.loss_policy, f"the loss is {loss:.4g}, above {self.loss_threshold:g} {for_long}"
        return "off", ""

    def _go_on(self, loss: float, norm: float | None) -> Verdict:
        self.in_a_row = 0
        self.seen["loss"].append(loss)
        if norm is not None:
            self.seen["norm"].append(norm)
        if self.loss_rise is not None and len(self.seen["loss"]) == self.size:
            mean = statistics.fmean(self.seen["loss"])
            self.lowest = mean if self.lowest is None else min(self.lowest, mean)
            if mean > self.lowest + self.loss_rise:
                told = f"the mean loss of the last {self.size} steps is {mean:.4g}, and was {self.lowest:.4g} before"
                return Verdict("stop", f"{told} (guard.loss_rise)")
        return Verdict("go on")
