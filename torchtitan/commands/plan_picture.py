"""The picture of `torchtitan plan`: time against memory of the plans, and duration against price by number of GPUs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.metrics.plot import GREY, HELD_OUT, INK, LOSS, RATE, RAW, STYLE
from torchtitan.planner.answer import Cost, gpus_text, pareto_front
from torchtitan.planner.search import Candidate, Result

LABEL: dict[str, Any] = {
    "zorder": 5,
    "bbox": {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1},
}
"""Style of a text that may lie over lines, but below points."""
Alternatives = Sequence[tuple[str, Candidate | None]]


def draw_plans(
    path: Path, result: Result, memory: float, job: Candidate | str, alternatives: Alternatives, cost: Cost
) -> None:
    """Draw a PNG or SVG. `memory`: bytes of a GPU. `job`: the job's own plan, or why there is none.

    Raises OSError if the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    widths = [3, 2] if alternatives else [1]
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": "plan"}):
        figure = Figure(figsize=(12, 5.6), dpi=150, layout="constrained")
        by_memory, *by_price = figure.subplots(1, 1 + bool(alternatives), squeeze=False, width_ratios=widths)[0]
        _draw_memory(by_memory, result, memory, None if isinstance(job, str) else job)
        if by_price:
            _draw_price(by_price[0], result.best[0], alternatives, cost)
        figure.savefig(path, facecolor="white")


def _gib(candidate: Candidate) -> float:
    return (candidate.memory.low + candidate.memory.high) / 2**31


def _draw_memory(axes: Any, result: Result, memory: float, job: Candidate | None) -> None:
    """Plot each plan with the interval of its memory, the Pareto front, and the memory of a GPU."""
    axes.set_title("step time and memory of the fastest plans", loc="left", fontweight="bold", color=INK)
    for candidate in result.judged:
        ends = [candidate.memory.low / 2**30, candidate.memory.high / 2**30]
        axes.plot([candidate.time.seconds] * 2, ends, color=RAW, linewidth=2)
        axes.plot(candidate.time.seconds, _gib(candidate), "o", color=LOSS, markersize=5, zorder=6)
    front = pareto_front(result.judged)
    axes.plot([one.time.seconds for one in front], [_gib(one) for one in front], color=LOSS, label="Pareto front")
    numbers = {candidate.plan: number for number, candidate in enumerate(result.best, start=1)}
    for candidate in front:
        place = {"xytext": (8, 4), "textcoords": "offset points"} | LABEL
        number = numbers.get(candidate.plan)
        label = f"{number}" if number else f"{candidate.plan}, {candidate.plan.recompute_text}"
        axes.annotate(label, (candidate.time.seconds, _gib(candidate)), color=INK, fontsize=8, **place)
    listed = [f"{numbers[one.plan]}: {one.plan}, {one.plan.recompute_text}" for one in front if one.plan in numbers]
    axes.text(0.02, 0.02, "\n".join(listed), transform=axes.transAxes, color=INK, fontsize=8, **LABEL)
    if job is not None:
        axes.plot(job.time.seconds, _gib(job), "D", color=HELD_OUT, markersize=7, zorder=7, label="the job's own plan")
    axes.axhline(memory / 2**30, color=GREY, linewidth=1, linestyle="--", label="memory of a GPU")
    axes.set_ylim(0, memory / 2**30 * 1.2)
    axes.margins(x=0.1)
    axes.set_xlabel("seconds of a step")
    axes.set_ylabel("GiB reserved, low to high")
    axes.legend(loc="upper right", labelcolor=INK, ncols=3, fontsize=8, framealpha=0.9, edgecolor="none")


def _draw_price(axes: Any, best: Candidate, alternatives: Alternatives, cost: Cost) -> None:
    """Plot the best plan for each number of GPUs: duration and GPU-hours, or their price."""
    by_gpus = {best.plan.gpus: best}
    by_gpus |= {other.plan.gpus: other for _, other in alternatives if other and other.plan.gpus != best.plan.gpus}
    candidates = [by_gpus[gpus] for gpus in sorted(by_gpus)]
    prices = [cost.money(candidate) or cost.gpu_hours(candidate) for candidate in candidates]
    hours = [cost.hours(candidate) for candidate in candidates]
    days = max(hours) >= 48
    durations = [value / 24 if days else value for value in hours]
    axes.set_title("duration and price by number of GPUs", loc="left", fontweight="bold", color=INK)
    axes.plot(durations, prices, "o-", color=RATE, markersize=6)
    for candidate, x, y in zip(candidates, durations, prices, strict=True):
        place = {"xytext": (0, 10), "textcoords": "offset points", "ha": "center"}
        axes.annotate(gpus_text(candidate.plan.gpus), (x, y), color=INK, **place)
    axes.set_ylim(0, max(prices) * 1.25)
    axes.margins(x=0.25)
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.set_xlabel("days" if days else "hours")
    axes.set_ylabel("GPU-hours" if cost.price is None else f"price at {cost.price:g} a GPU-hour")
