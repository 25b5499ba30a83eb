"""The learning rate of runs whose adapters begin anew every so often (ReLoRA, arXiv:2307.05695). Imports no torch.

Both curves begin at 0, c / w in the warmup, unlike the others of lr_shapes.py. Letters: c the 0-based step, N steps in
all, w of warmup, q of a cycle, r of the warmup behind a restart, m the floor.
"""

from math import cos, pi
from typing import NamedTuple

JAGGED, CYCLICAL = "relora_cosine", "relora_cyclical"


class Ramps(NamedTuple):
    """On a curve that knows nothing of restarts, as Axolotl has them (February 2024): what it is multiplied with."""

    every: int
    warmup: int
    anneal: int = 1

    def scale(self, c: int) -> float:
        """1, but from a thousandth up behind each restart and, with anneal > 1, down ahead of it."""
        since, share = c % self.every, 1.0
        if c < self.every - self.warmup:
            return 1.0
        if since < self.warmup:
            share = since / self.warmup
        elif since > self.every - self.anneal:
            share = (self.every - since) / self.anneal
        return share * 0.999 + 0.001


def jagged(c: int, total: int, warmup: int, cycle: int, again: int, floor: float, adjust: int = 0) -> float:
    """One cosine over the whole run, cut to 0 at every multiple of `cycle`, from where a straight line over `again`
    steps meets it again. `adjust` moves the cuts: a run that goes on from a step that is no multiple has them where
    the first one had.
    """
    if c < warmup:
        return c / max(1, warmup)
    place = c + adjust
    restarts, since = divmod(place, cycle)
    if since < again and place >= cycle:
        return since / max(1, again) * _cosine(restarts * cycle + again, total, warmup, floor)
    return _cosine(place, total, warmup, floor)


def cyclical(c: int, warmup: int, cycle: int, floor: float) -> float:
    """A cosine from peak to floor in each cycle, behind a warmup of its own; the first two steps of later cycles hardly
    move a weight.
    """
    since = c % cycle
    if since < warmup:
        return 1e-7 if c >= cycle and since < 2 else since / max(1, warmup)
    return _cosine(since, cycle, warmup, floor)


def _cosine(step: int, total: int, warmup: int, floor: float) -> float:
    return floor + (1 - floor) * (1 + cos(pi * (step - warmup) / max(1, total - warmup))) / 2
