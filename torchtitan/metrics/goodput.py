"""Where a run's time goes, by cause, over all of its starts; and how often a run like it should save."""

import math
import time
from collections.abc import Callable, Mapping

CAUSES = {
    "train": "training",
    "data": "waiting for data",
    "save": "saving",
    "validation": "validation",
    "compile": "the first step",
    "start": "starting",
    "restart": "restarts",
    "redone": "steps that were lost",
    "end": "ending",
}
"""By name, what each is called. compile: the first step of a start, which compiles, if anything does; start: until that
step; restart: the same after a failure, from its being noticed; redone: what had been trained since the checkpoint;
end: the wait for the last save, exports, the picture."""
CAUSE_OF = {
    "first": "compile",
    "data": "data",
    "train": "train",
    "validate": "validation",
    "save": "save",
    "export": "end",
    "end": "end",
}
"""By the phase that a rank tells (process/heartbeat.py)."""
GPU_HOURS_PER_FAILURE = 50_000.0
"""Of the Llama 3 paper: 419 unplanned interruptions of 16,384 GPUs in 54 days are one in 50,700."""

SHORTEST_ADVISED_SECONDS = 3600.0
"""Length of a run from which on it is advised how often to save."""


class Goodput:
    """A stopwatch that always runs, for one cause at a time. `failed_at`: when the start before this one ended by a
    failure, if it did, on the same clock."""

    def __init__(
        self,
        failed_at: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._clock, self._wall = clock, wall
        self.loaded_at: float | None = None
        """When the state that was loaded had been that of its run, by the wall's clock; None if that is not known."""
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        self.failures = self.saves = 0
        self._cause = "start" if failed_at is None else "restart"
        self._since = clock() if failed_at is None else failed_at

    def enter(self, cause: str) -> None:
        """From now on time is `cause`'s."""
        now = self._clock()
        self.seconds[self._cause] += now - self._since
        self._cause, self._since = cause, now

    def state_dict(self) -> dict[str, float]:
        """As of now; JSON-able."""
        self.enter(self._cause)
        return self.seconds | {"failures": self.failures, "saves": self.saves, "at": self._wall()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Of the starts before, in front of what this one has spent already. In the middle of a run it goes back to
        where it had spent so much: all since then is spent again, but for the save.
        """
        self.enter(self._cause)
        self.loaded_at = state.get("at")
        saved = {cause: state.get(cause, 0.0) for cause in CAUSES}
        if self._cause in ("start", "restart"):
            self.failures, self.saves = int(state.get("failures", 0)), int(state.get("saves", 0))
            self.seconds = {cause: spent + saved[cause] for cause, spent in self.seconds.items()}
        else:
            saved["save"] = self.seconds["save"]  # that of the checkpoint itself, after its state was noted
            since = sum(self.seconds.values()) - sum(saved.values())
            self.seconds = saved
            self.failed(since)

    def saved(self, published: float) -> None:
        """Of the checkpoint whose state was loaded, when it was published, by the wall's clock: a state cannot say how
        long the save took that it was noted for."""
        if self.loaded_at is not None:
            self.seconds["save"] += max(0.0, published - self.loaded_at)
            self.saves += 1

    def failed(self, redone_seconds: float) -> None:
        """What had been trained for so long since the checkpoint is done again."""
        self.failures += 1
        self.seconds["redone"] += redone_seconds

    def row(self) -> dict[str, float]:
        """For metrics.jsonl: the share that trained, and the seconds by cause."""
        whole = self.state_dict() and sum(self.seconds.values())
        by_cause = {f"{cause}_seconds": round(spent, 3) for cause, spent in self.seconds.items()}
        return {"goodput": round(self.seconds["train"] / whole, 4) if whole else 0.0} | by_cause

    def summary(self) -> str:
        """Shares of all time, the largest first, like "94.0 % training, 4.2 % saving"."""
        whole = self.state_dict() and sum(self.seconds.values())
        shares = {CAUSES[cause]: 100 * spent / whole for cause, spent in self.seconds.items()} if whole else {}
        largest = sorted(shares.items(), key=lambda item: -item[1])
        return ", ".join(f"{share:.1f} % {name}" for name, share in largest if share >= 0.05)

    def best_interval(self, world_size: int) -> float | None:
        """Seconds between saves by which the least time is lost, by the rule of Young and Daly: the root of twice the
        time between failures and the time for which a save holds up the run. None before the first save, and for a run
        of less than an hour.

        Failures are this run's, or else as many as others have met on so many devices.
        """
        whole = self.state_dict() and sum(self.seconds.values())
        if not self.saves or whole < SHORTEST_ADVISED_SECONDS:
            return None
        between = whole / self.failures if self.failures else 3600 * GPU_HOURS_PER_FAILURE / world_size
        return math.sqrt(2 * between * self.seconds["save"] / self.saves)
