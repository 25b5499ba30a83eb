"""Plot a pipeline schedule: each rank's actions over time, with its idle share and peak activations."""

from pathlib import Path
from typing import Any

from torchtitan.metrics.plot import GREY, INK, STYLE
from torchtitan.parallelisms.pipeline.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD
from torchtitan.parallelisms.pipeline.simulator import Simulation, Span

NAMES = {
    FORWARD: "forward",
    INPUT_GRAD: "input gradient",
    WEIGHT_GRAD: "weight gradient",
    BACKWARD: "full backward",
}
COLORS = {FORWARD: "#1d4ed8", INPUT_GRAD: "#ea7317", WEIGHT_GRAD: "#0f8a7e", BACKWARD: "#a8204e"}
IDLE: dict[str, Any] = {"facecolor": "#f8fafc", "edgecolor": "#d5dbe3", "hatch": "////", "linewidth": 0}
WIDTH, HEAD, TALLEST = 14.0, 2.1, 16.0
"""Inches: the picture, what is above and below the rows, all rows at most."""
LARGEST_FONT, SMALLEST_FONT, DIGIT = 9.0, 4.5, 0.7
"""Points; and the width of a digit in units of the font's size."""


def draw_schedule(simulation: Simulation, path: Path, title: str, subtitle: str) -> None:
    """Draw a PNG or SVG, by the suffix of `path`. Raises OSError if it cannot be written."""
    import matplotlib
    from matplotlib.figure import Figure

    ranks = len(simulation.spans)
    height = min(0.72, TALLEST / ranks)
    with matplotlib.rc_context(STYLE | {"hatch.linewidth": 0.7, "svg.hashsalt": "schedule", "axes.grid": False}):
        figure = Figure(figsize=(WIDTH, HEAD + height * ranks), dpi=160)
        above, below = 1.05 / figure.get_figheight(), 0.95 / figure.get_figheight()
        axes = figure.add_axes((0.055, below, 0.82, 1 - above - below))
        axes.set_xlim(0, float(simulation.makespan))
        axes.set_ylim(ranks, 0)
        _heading(figure, title, subtitle)
        for rank, spans in enumerate(simulation.spans):
            axes.broken_barh([axes.get_xlim()], (rank + 0.1, 0.8), **IDLE)
            _draw_row(axes, rank, spans, _points_per_unit(figure, axes), height * 72)
        _label_ranks(axes, simulation)
        _legend(figure, simulation)
        dated: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix.lower() == ".svg" else {}
        figure.savefig(path, facecolor="white", **dated)


def _draw_row(axes: Any, rank: int, spans: list[Span], points_per_unit: float, height: float) -> None:
    """Draw the actions of one rank. `height`: of a row, in points."""
    stages = sorted({span.action.stage for span in spans})
    digits = len(str(max(span.action.microbatch for span in spans)))
    alike: dict[tuple[str, int, float, float], list[Span]] = {}
    for span in spans:
        alike.setdefault((span.action.kind, stages.index(span.action.stage), *_band(span)), []).append(span)
    for (kind, chunk, top, tall), cells in alike.items():
        color, ink = shade(kind, chunk, len(stages))
        width = float(cells[0].end - cells[0].start) * points_per_unit
        ranges = [(float(span.start), float(span.end - span.start)) for span in cells]
        axes.broken_barh(ranges, (rank + top, tall), facecolor=color, edgecolor="white", linewidth=min(0.9, width / 12))
        size = min(LARGEST_FONT, width / (DIGIT * digits + 0.2), 0.75 * height * tall)
        if size < SMALLEST_FONT:
            continue
        for span in cells:
            middle, place = float(span.start + span.end) / 2, {"ha": "center", "va": "center_baseline"}
            axes.text(middle, rank + top + tall / 2, str(span.action.microbatch), color=ink, fontsize=size, **place)


def _band(span: Span) -> tuple[float, float]:
    """Return top and height within the row. Of two overlapping actions, the forward gets the upper half."""
    if not span.overlapped:
        return 0.1, 0.8
    return (0.1, 0.4) if span.action.kind == FORWARD else (0.5, 0.4)


def shade(kind: str, chunk: int, stages_per_rank: int) -> tuple[tuple[float, float, float], str]:
    """Return the color of an action of a rank's stage number `chunk`, paler for later stages, and the text color."""
    from matplotlib.colors import to_rgb

    white = 0.55 * chunk / max(1, stages_per_rank - 1)
    red, green, blue = (part + (1 - part) * white for part in to_rgb(COLORS[kind]))
    return (red, green, blue), INK if white > 0.4 else "white"


def _points_per_unit(figure: Any, axes: Any) -> float:
    return axes.get_position().width * figure.get_figwidth() * 72 / axes.get_xlim()[1]


def _heading(figure: Any, title: str, subtitle: str) -> None:
    inch = 1 / figure.get_figheight()
    figure.text(0.055, 1 - 0.42 * inch, title, fontsize=17, fontweight="bold", va="baseline")
    figure.text(0.055, 1 - 0.71 * inch, subtitle, fontsize=11, color=GREY, va="baseline")


def _label_ranks(axes: Any, simulation: Simulation) -> None:
    ranks = len(simulation.spans)
    sparse = range(0, ranks, max(1, ranks // 32))
    axes.set_yticks([rank + 0.5 for rank in sparse], [f"rank {rank}" for rank in sparse], color=INK)
    axes.spines["bottom"].set_visible(False)
    axes.axvline(float(simulation.makespan), color=INK, linewidth=1.6, clip_on=False)
    axes.annotate("time", (0, 0), (0, -8), xycoords="axes fraction", textcoords="offset points", color=GREY, va="top")
    axes.set_xticks([0, float(simulation.makespan)], ["", f"{float(simulation.makespan):g}"])
    columns = (("idle", simulation.bubbles, 0.045), ("peak\nactivations", simulation.peak_activations, 0.11))
    for head, values, x in columns:
        axes.text(1 + x, 1, head, transform=axes.transAxes, ha="center", va="bottom", color=GREY, linespacing=1.1)
        for rank in sparse:
            value = float(values[rank])
            text = f"{value / float(simulation.makespan):.1%}" if head == "idle" else f"{value:.3g}"
            place = {"transform": axes.get_yaxis_transform(), "ha": "center", "va": "center"}
            axes.text(1 + x, rank + 0.5, text, fontweight="bold", **place)


def _legend(figure: Any, simulation: Simulation) -> None:
    """Add a legend for the kinds of actions in the schedule."""
    from matplotlib.patches import Patch

    spans = [span for row in simulation.spans for span in row]
    stages_per_rank = max(len({span.action.stage for span in row}) for row in simulation.spans)
    used = {span.action.kind for span in spans}
    patches = [Patch(facecolor=COLORS[kind], label=NAMES[kind]) for kind in NAMES if kind in used]
    patches.append(Patch(**IDLE, label="idle"))
    if stages_per_rank > 1:
        label = (
            "second stage of the rank"
            if stages_per_rank == 2
            else f"stages 1 to {stages_per_rank} of the rank: dark to pale"
        )
        patches.append(Patch(facecolor=shade(FORWARD, stages_per_rank - 1, stages_per_rank)[0], label=label))
    if any(span.overlapped for span in spans):
        patches.append(Patch(facecolor="none", label="halves of a row: both at the same time"))
    options = {"frameon": False, "ncols": len(patches), "handlelength": 1.4, "handleheight": 1.1, "columnspacing": 1.8}
    figure.legend(handles=patches, loc="lower left", bbox_to_anchor=(0.048, 0.02), labelcolor=INK, **options)
