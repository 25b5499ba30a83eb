"""Learning-rate schedules for adapters with periodic restarts (ReLoRA, arXiv:2307.05695). No torch.

Both curves start at 0, with c / w in the warmup, unlike those of shapes.py. Notation: c is the 0-based step, N the
total number of steps, w the warmup, q the length of a cycle, r the warmup after a restart, m the floor.
"""

from math import cos, pi
from typing import NamedTuple

JAGGED, CYCLICAL = "relora_cosine", "relora_cyclical"


class Ramps(NamedTuple):
    """Factors around restarts for a schedule without any, as in Axolotl (February 2024)."""

    every: int
    warmup: int
    anneal: int = 1

    def scale(self, c: int) -> float:
        """Return 1, except for a ramp up from 0.001 after each restart and, with anneal > 1, a ramp down before it."""
        since, share = c % self.every, 1.0
        if c < self.every - self.warmup:
            return 1.0
        if since < self.warmup:
            share = since / self.warmup
        elif since > self.every - self.anneal:
            share = (self.every - since) / self.anneal
        return share * 0.999 + 0.001


def jagged(c: int, total: int, warmup: int, cycle: int, rewarmup: int, floor: float, adjust: int = 0) -> float:
    """Return one cosine over the run that drops to 0 at every multiple of `cycle` and rises back linearly.

    The rise takes `rewarmup` steps. `adjust` shifts the drops, so that a run that continues from a step that is no
    multiple of `cycle` has them where the first run had.
    """
    if c < warmup:
        return c / max(1, warmup)
    step = c + adjust
    restarts, since = divmod(step, cycle)
    if since < rewarmup and step >= cycle:
        return since / max(1, rewarmup) * _cosine(restarts * cycle + rewarmup, total, warmup, floor)
    return _cosine(step, total, warmup, floor)


def cyclical(c: int, warmup: int, cycle: int, floor: float) -> float:
    """Return a cosine from peak to floor in each cycle, after a warmup of each cycle.

    The first two steps of later cycles have a rate of 1e-7 of the peak.
    """
    since = c % cycle
    if since < warmup:
        return 1e-7 if c >= cycle and since < 2 else since / max(1, warmup)
    return _cosine(since, cycle, warmup, floor)


def _cosine(step: int, total: int, warmup: int, floor: float) -> float:
    return floor + (1 - floor) * (1 + cos(pi * (step - warmup) / max(1, total - warmup))) / 2
