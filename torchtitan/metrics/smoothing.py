"""The moving average of a run's loss."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from torchtitan.metrics.json_lines import Record, is_finite

UNIT_BITS = 100
EXTREME, MEAN = "is_extreme", "mean_loss"
"""Keys of retained records, if records were left out: true if it is retained for an extreme value only, so that it does
not count for averages; mean of the finite losses of its group."""


def smoothed_over(count: int) -> int:
    """Return the width of the smoothing window for `count` points, an odd number."""
    return 1 + 2 * min(max(count // 30, 2), (count - 1) // 2)


def smoothed(values: list[float]) -> list[float]:
    """Return the moving average over a 15th of the points, at least five if there are that many.

    Towards the beginning, where the loss falls fast, the window narrows to stay centred. At the end it keeps its width,
    because otherwise the line would end in the last step's own value. Values that are not finite are ignored.
    The sums of windows are differences of running sums, in integers so that no spike of the loss rounds them.
    """
    half = smoothed_over(len(values)) // 2
    units = [_in_units(value) if math.isfinite(value) else None for value in values]
    sums = list(itertools.accumulate((unit or 0 for unit in units), initial=0))
    counts = list(itertools.accumulate((unit is not None for unit in units), initial=0))
    means = []
    for i in range(len(values)):
        reach = min(half, i)
        first = min(i - reach, max(0, len(values) - 1 - 2 * half))
        end = min(i + reach + 1, len(values))
        count = counts[end] - counts[first]
        means.append((sums[end] - sums[first]) / (count << UNIT_BITS) if count else math.nan)
    return means


def _in_units(value: float) -> int:
    """Return a value as a whole number of 2^-UNIT_BITS."""
    numerator, denominator = value.as_integer_ratio()
    return (numerator << UNIT_BITS) // denominator


def smoothed_losses(rows: Sequence[Record]) -> list[float]:
    """Return the smoothed loss at each row. Of thinned rows, it is that of the means of their groups."""
    losses: list[float] = []
    group_of: list[int] = []
    for row in rows:
        if EXTREME not in row or not losses:
            loss: Any = row.get(MEAN, row.get("loss"))
            losses.append(loss if is_finite(loss) else math.nan)
        group_of.append(len(losses) - 1)
    smooth = smoothed(losses)
    return [smooth[group] for group in group_of]
