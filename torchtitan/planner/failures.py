"""The time that failures and saves cost, and how often a run should save. Imports no torch.

GPUs fail independently of each other, so n of them fail n times as often as one. A failure costs a restart and the work
since the last save, and both may fail again (Daly, "A higher order estimate of the optimum checkpoint interval for
restart dumps", 2006, equation 20).
"""

import math
from dataclasses import dataclass

from torchtitan.core.errors import JobError
from torchtitan.metrics.goodput import best_save_interval

WRITTEN_BANDWIDTH = 2e12 / 16384
"""Bytes/s that each GPU writes. The storage of Llama 3's 16,384 GPUs took 2 TB/s (arXiv:2407.21783, section 3.3.1)."""
COPIED_BANDWIDTH = 10e9
"""Bytes/s of a copy from a GPU to its host, which is all that blocks a run that saves in the background. Assumed."""
RESTART_SECONDS = 600.0
"""Assumed. 466 interruptions of Llama 3 took less than a tenth of 54 days, so less than 17 minutes each with lost work
(section 3.3.4)."""


def slowdown(between: float, interval: float, blocked: float, restart: float) -> float:
    """Return the expected duration of a run with failures and saves relative to one without, by Daly's formula.

    Arguments in seconds: `between` two failures, `interval` of work between two saves, `blocked` by a save.
    """
    return between * math.exp(restart / between) * math.expm1((interval + blocked) / between) / interval


@dataclass(frozen=True)
class Failures:
    """The rate of failures, and the time of a save and of a restart."""

    gpu_seconds: float
    """Mean time between two failures of a GPU."""
    state: float
    """Bytes of a checkpoint."""
    in_background: bool
    """True if a save blocks the run only while it copies the state to the host."""
    save_seconds: float | None = None
    """Time for which a save blocks the run, if it is known."""
    restart_seconds: float | None = None

    def between(self, gpus: int) -> float:
        """Return the mean seconds between two failures of a run."""
        return self.gpu_seconds / gpus

    def blocked(self, gpus: int) -> float:
        """Return the seconds for which a save blocks a run."""
        bandwidth = COPIED_BANDWIDTH if self.in_background else WRITTEN_BANDWIDTH
        return self.save_seconds or self.state / gpus / bandwidth

    @property
    def restart(self) -> float:
        return self.restart_seconds or RESTART_SECONDS

    def interval(self, gpus: int) -> float:
        """Return the seconds between two saves that lose the least time, at least those to write in the background."""
        least = self.state / gpus / WRITTEN_BANDWIDTH if self.in_background else 0.0
        return max(least, best_save_interval(self.between(gpus), self.blocked(gpus)))

    def slowdown(self, gpus: int) -> float:
        """Return the expected duration of a run relative to one without failures and saves."""
        return slowdown(self.between(gpus), self.interval(gpus), self.blocked(gpus), self.restart)

    def check(self, gpus: int) -> None:
        """Raise JobError if a run fails so often that it would hardly advance."""
        lost = self.restart + self.interval(gpus) + self.blocked(gpus)
        if self.between(gpus) < lost:
            hours = self.gpu_seconds / 3600
            between = f"{gpus:,} GPUs fail every {self.between(gpus):,.0f} s, a restart and a save take {lost:,.0f} s"
            raise JobError(f"--mtbf-hours: given {hours:g}; {between}; give the hours between failures of one GPU")
