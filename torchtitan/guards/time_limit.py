"""A job whose end is known saves ahead of it: by job.time_limit, or by what SLURM says of its allocation. No torch."""

import time
from collections.abc import Callable

RESERVE_SHARE, LONGEST_RESERVE = 0.05, 60.0
"""Of the time there was at the start, and in seconds: for what takes longer at the end than ever before."""


def seconds_of(text: str) -> float:
    """Of "[days-]hours:minutes:seconds", as SLURM writes it."""
    days, _, clock = text.rpartition("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    return 86400.0 * int(days or 0) + 3600 * hours + 60 * minutes + seconds


class TimeLimit:
    """`seconds` are left now; None: for ever. Counts on the monotonic clock, whatever happens to the wall's."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.end = None if seconds is None else clock() + seconds
        self.reserve = 0.0 if seconds is None else min(RESERVE_SHARE * seconds, LONGEST_RESERVE)
        self._turn_began: float | None = None
        self._turns: list[float] = []
        """The first, which may compile, and the longest of the others."""

    def near(self, save_seconds: float) -> bool:
        """Asked before every step: whether one more, as long as the longest yet, and the save after it, as long as
        the longest yet, might not end in time. Twice both, as no machine is even."""
        now = self.clock()
        if self._turn_began is not None:
            self._turns = [*self._turns[:1], max([now - self._turn_began, *self._turns[1:]])]
        self._turn_began = now
        if self.end is None:
            return False
        # nothing else is known before the second turn; after it the first, which does not come again, is no measure
        turn = self._turns[-1] if self._turns else 0.0
        return now + 2 * (turn + save_seconds) + self.reserve >= self.end


def shortest(*limits: float | None) -> float | None:
    """Of those that there are."""
    return min((limit for limit in limits if limit is not None), default=None)
