"""Fit the factors of the planner's formula to measured steps. Imports no torch."""

import math
from collections.abc import Callable, Mapping, Sequence

from torchtitan.core.hardware import ASSUMED, Hardware
from torchtitan.planner.step_time import UNPUBLISHED_SPREAD
from torchtitan.planner.time_parts import Calibration

PUBLISHED_ROWS = {"h100-96-500w": 22, "h100-80": 9, "a100-80": 3}
"""Published rows by hardware."""
PUBLISHED = {
    "products": 1.203,
    "attention": 1.212,
    "memory": 0.883,
    "tp": 0.841,
    "async_tp": 0.937,
    "ring": 1.918,
    "ep": 0.295,
    "float8": 1.227,
    "h100-96-500w": 1.331,
    "a100-80": 0.910,
    "h100-80": 0.882,
}
"""Factors fitted on published runs (tests/fixtures/published_runs.toml) by scripts/compare_published.py. The hardware's
own factors tell how its computation differs from the others'."""
PUBLISHED_SPREAD = 0.25
"""Relative error of a step's time like those of the published rows."""
SIGMAS = {"products": 0.7, "attention": 0.7, "ep": 0.7, "ring": 1.0, "float8": 0.4, "messages": 1.0}
HARDWARE_SIGMA = 0.3
"""Standard deviations of the logarithms of factors before anything is measured: of names, and of hardware."""
SIGMA = 0.5
"""Standard deviation of the logarithm of a factor before anything is measured."""
NOISE = 0.05
"""Standard deviation of the logarithm of a step's time around the formula."""
ITERATIONS = 4
STEP = 0.02
"""Of numerical derivatives, in the logarithm of a factor."""
Factors = dict[str, float]
Predicted = Callable[[Mapping[str, float]], float]
"""Seconds of a measured step by the formula with these factors."""


def fit_factors(
    measured: Sequence[tuple[Predicted, float]], names: Sequence[str], sigmas: Mapping[str, float] | None = None
) -> Factors:
    """Return the factors that explain measured seconds best, and stay near 1 where nothing is measured.

    It maximizes the posterior of a normal prior on the logarithms, by Gauss-Newton. `sigmas`: of some factors.
    """
    logs = dict.fromkeys(names, 0.0)
    for _ in range(ITERATIONS):
        normal = [[0.0] * len(names) for _ in names]
        right = [0.0] * len(names)
        for index, name in enumerate(names):
            weight = (NOISE / (sigmas or {}).get(name, SIGMA)) ** 2
            normal[index][index] += weight
            right[index] -= weight * logs[name]
        for predict, seconds in measured:
            predicted = math.log(predict(_exp(logs)))
            slopes = [(math.log(predict(_exp(logs | {name: logs[name] + STEP}))) - predicted) / STEP for name in names]
            for i, slope in enumerate(slopes):
                right[i] += slope * (math.log(seconds) - predicted)
                for j, other in enumerate(slopes):
                    normal[i][j] += slope * other
        for name, change in zip(names, _solved(normal, right), strict=True):
            logs[name] += change
    return _exp(logs)


def _exp(logs: Mapping[str, float]) -> Factors:
    return {name: math.exp(value) for name, value in logs.items()}


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a positive definite system by elimination."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i, row in enumerate(rows):
        for below in rows[i + 1 :]:
            factor = below[i] / row[i]
            below[:] = [value - factor * pivot for value, pivot in zip(below, row, strict=True)]
    solution = [0.0] * len(rows)
    for i in reversed(range(len(rows))):
        subtracted = sum(value * factor for value, factor in zip(rows[i][i + 1 : -1], solution[i + 1 :], strict=True))
        solution[i] = (rows[i][-1] - subtracted) / rows[i][i]
    return solution


def usual_calibration(hardware: Hardware) -> Calibration:
    """Return the calibration without measured runs of this job.

    Published factors of computation are of assumed curves, and those of messages of GPUs, which compute meanwhile.
    """
    rows = sum(PUBLISHED_ROWS.values())
    curves = {"products": hardware.products, "attention": hardware.attention, "memory": hardware.memory_bound}
    measured = {name for name, curve in curves.items() if curve.evidence != ASSUMED}
    factors = {name: factor for name, factor in PUBLISHED.items() if name not in measured and not hardware.cores}
    if of_this := PUBLISHED_ROWS.get(hardware.name, 0):
        evidence = f"fitted on {of_this} published row{'s' * (of_this > 1)} of this GPU, {rows} in all"
        return Calibration(factors, PUBLISHED_SPREAD, evidence, is_published=True)
    return Calibration(
        factors, UNPUBLISHED_SPREAD, f"assumed: no published row is of this hardware; {rows} are of others"
    )
