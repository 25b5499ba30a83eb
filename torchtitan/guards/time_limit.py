"""Save before a job's time limit ends, given by job.time_limit or by SLURM's allocation. Needs no torch."""

import time
from collections.abc import Callable

RESERVE_SHARE, LONGEST_RESERVE = 0.05, 60.0
"""Reserve for delays at the end: a fraction of the initial time, at most this many seconds."""


def seconds_of(text: str) -> float:
    """Parse a duration "[days-]hours:minutes:seconds", as SLURM writes it, to seconds."""
    days, _, clock = text.rpartition("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    return 86400.0 * int(days or 0) + 3600 * hours + 60 * minutes + seconds


class TimeLimit:
    """The remaining time of a job: `seconds` from now, or no limit if None. Measured on the monotonic clock, so changes
    of the wall clock do not matter.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.end = None if seconds is None else clock() + seconds
        self.reserve = 0.0 if seconds is None else min(RESERVE_SHARE * seconds, LONGEST_RESERVE)
        self._turn_began: float | None = None
        self._turns: list[float] = []
        """Duration of the first turn, which may compile, and the longest of the others."""

    def near(self, save_seconds: float) -> bool:
        """Return True if one more step and the save after it might not finish in time. Called before every step.
        Assumes twice the longest duration of each so far, since step and save times vary.
        """
        now = self.clock()
        if self._turn_began is not None:
            self._turns = [*self._turns[:1], max([now - self._turn_began, *self._turns[1:]])]
        self._turn_began = now
        if self.end is None:
            return False
        # the first turn is the only estimate until the second ends, and is then ignored: compilation does not recur
        longest_turn = self._turns[-1] if self._turns else 0.0
        return now + 2 * (longest_turn + save_seconds) + self.reserve >= self.end


def shortest(*limits: float | None) -> float | None:
    """Return the smallest limit that is set, or None."""
    return min((limit for limit in limits if limit is not None), default=None)
