"""Plot a run's metrics.jsonl: loss, learning rate and speed over the same steps."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.metrics.curves import EXTREME, read_thinned, smoothed_losses, smoothed_over
from torchtitan.metrics.json_lines import END, Record, is_finite
from torchtitan.metrics.run_end import end_of

FORMATS = (".svg", ".png")
COLORS = 64
"""Of a PNG: lines and their soft edges have no more."""
INK, GREY, RULE, STOP = "#1f2937", "#6b7280", "#e5e7eb", "#b91c1c"
RAW, LOSS, HELD_OUT, RATE, SPEED = "#a5c0f3", "#1d4ed8", "#d9480f", "#0f766e", "#6d28d9"
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


def check_format(path: Path, option: str = "--plot", formats: tuple[str, ...] = FORMATS) -> None:
    """Raise JobError unless the file name ends in one of `formats`."""
    if path.suffix.lower() not in formats:
        raise JobError(f"{option}: given {str(path)!r}; allowed: names with {' or '.join(formats)}; rename it")


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure in the format of the file name, a PNG with few colors, which takes a quarter of the bytes.

    Raises OSError.
    """
    if path.suffix.lower() != ".png":
        figure.savefig(path, facecolor="white")
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image  # matplotlib needs it, too

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba())
    picture.convert("RGB").quantize(COLORS).save(path, optimize=True)


def draw_training_curve(metrics_path: Path, path: Path, title: str) -> bool:
    """Draw the figure in the format of the file name.

    Return False, and write nothing, if the run has not logged a step yet.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    records = read_thinned(metrics_path, ("loss", "lr", "tokens_per_second"))
    steps = [record for record in records if "loss" in record]
    held_out = [record for record in records if is_finite(record.get("validation_loss"))]
    if not steps:
        return False
    with matplotlib.rc_context(STYLE):
        figure = Figure(
            figsize=(10, 7.2),
            dpi=150,
        )
        figure.set_layout_engine("constrained", hspace=0.06, h_pad=0.08, w_pad=0.12)
        loss, rate, speed = figure.subplots(3, 1, sharex=True, height_ratios=[5, 1.4, 1.4])
        if (end := end_of(records)) and end.get("exit_code"):
            title += f": {end.get('cause')} after step {end['step']}"
        loss.set_title(title, loc="left", pad=26, fontsize=14, fontweight="bold", parse_math=False)
        _draw_loss(loss, steps, held_out)
        _draw_rate(rate, steps)
        _draw_speed(speed, steps)
        for axes in (loss, rate, speed):
            for record in records:
                if record.get("event") in ("restart", "rollback"):
                    axes.axvline(record["step"], color=GREY, linewidth=0.8, linestyle=":")
                elif record.get("event") == END and record.get("exit_code"):
                    axes.axvline(record["step"], color=STOP, linewidth=1.2)
        speed.set_xlabel("step")
        speed.xaxis.set_major_locator(MaxNLocator(integer=True))
        speed.xaxis.set_major_formatter("{x:,.0f}")
        speed.set_xlim(0, steps[-1]["step"])
        save_picture(figure, path)
    return True


def draw_losses(runs: Sequence[tuple[str, Path]], path: Path) -> bool:
    """Draw the smoothed losses of several runs into one figure, and below it their validation losses, if there are any.

    `runs`: (label, metrics.jsonl). Return False, and write nothing, if none of them has logged a step yet.
    """
    import matplotlib
    from matplotlib.figure import Figure

    curves = [(label, read_thinned(metrics, ("loss",))) for label, metrics in runs]
    curves = [(label, records) for label, records in curves if any("loss" in record for record in records)]
    if not curves:
        return False
    keys = {"loss": "loss, nats per token, smoothed", "validation_loss": "validation loss"}
    shown = [key for key in keys if any(is_finite(record.get(key)) for _, records in curves for record in records)]
    colors = matplotlib.colormaps["viridis"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 1 + 4.2 * max(len(shown), 1)), dpi=150, layout="constrained")
        panels = figure.subplots(max(len(shown), 1), 1, sharex=True, squeeze=False)[:, 0]
        for panel, key in zip(panels, shown, strict=False):
            for number, (label, records) in enumerate(curves):
                rows = [record for record in records if key in record]
                x, y = _column(rows, key)
                if key == "loss":
                    y = smoothed_losses(rows)
                color = colors(number / max(len(curves) - 1, 1) * 0.9)
                panel.plot(x, y, color=color, linewidth=1.8, marker="" if key == "loss" else "D", label=label)
            _panel_title(panel, keys[key])
        panels[-1].set_xlabel("step")
        panels[-1].xaxis.get_major_locator().set_params(integer=True)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", frameon=False, ncols=2)
        save_picture(figure, path)
    return True


def _draw_loss(axes: Any, steps: list[Record], held_out: list[Record]) -> None:
    x, y = _column(steps, "loss")
    axes.plot(x, y, color=RAW, linewidth=1, label="each logged step")
    line = smoothed_losses(steps)
    axes.plot(x, line, color=LOSS, linewidth=2.2, label=f"smoothed over {smoothed_over(len(y))}")
    notes = [(x[-1], line[-1], LOSS)]
    if held_out:
        at, values = _column(held_out, "validation_loss")
        points = {"marker": "D", "markersize": 5, "markeredgecolor": "white", "markeredgewidth": 0.8, "clip_on": False}
        axes.plot(at, values, color=HELD_OUT, linewidth=1.2, label="validation", **points)
        notes.append((at[-1], values[-1], HELD_OUT))
    # Shift the labels apart, the higher value up, because both lines may end at the same height.
    for (x_last, y_last, color), lift in zip(sorted(notes, key=lambda note: -note[1]), (7, -7), strict=False):
        _note(axes, x_last, y_last, f"{y_last:.3f}", color, lift if len(notes) == 2 else 0)
    axes.legend(loc="upper right", frameon=False, labelcolor=INK)
    _panel_title(axes, "loss, nats per token")


def _draw_rate(axes: Any, steps: list[Record]) -> None:
    x, y = _column(steps, "lr")
    axes.fill_between(x, y, color=RATE, alpha=0.12, linewidth=0)
    axes.plot(x, y, color=RATE, linewidth=1.6)
    _note(axes, x[-1], y[-1], f"{y[-1]:.1e}", RATE)
    peak = _top(y)
    axes.set_ylim(0, peak * 1.15)
    axes.set_yticks([0, peak], ["0", f"{peak:.1e}"])
    _panel_title(axes, "learning rate")


def _draw_speed(axes: Any, steps: list[Record]) -> None:
    """Plot the speed of unmarked windows as a line, and the speed of marked ones as dots."""
    steady = [record for record in steps if "marked" not in record]
    x, y = _column(steady or steps, "tokens_per_second")
    _, typical = _column([r for r in steady or steps if EXTREME not in r], "tokens_per_second")
    axes.plot(x, y, color=SPEED, linewidth=1.2)
    if steady:
        axes.plot(*_column([r for r in steps if "marked" in r], "tokens_per_second"), ".", color=SPEED, alpha=0.35)
    axes.set_ylim(0, _top(y) * 1.2)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="y", nbins=3)
    _panel_title(axes, f"tokens per second, median {statistics.median(typical):,.0f}")


def _column(records: list[Record], key: str) -> tuple[list[int], list[float]]:
    """Return the steps and their values; NaN, a gap in the plot, if a value is not finite."""
    values = [record[key] if is_finite(record.get(key)) else math.nan for record in records]
    return [record["step"] for record in records], values


def _top(values: list[float]) -> float:
    """Return the largest finite value; 1 if there is none or if it is 0."""
    return max((value for value in values if math.isfinite(value)), default=0.0) or 1.0


def _panel_title(axes: Any, text: str) -> None:
    axes.annotate(text, (0, 1), (0, 6), xycoords="axes fraction", textcoords="offset points", color=GREY)


def _note(axes: Any, x: float, y: float, text: str, color: str, lift: float = 0) -> None:
    """Mark the last point and write its value to the right of it, moved up by `lift` points."""
    if math.isfinite(y):
        axes.plot(x, y, "o", color=color, markersize=4.5, clip_on=False)
        place = {"xytext": (9, lift), "textcoords": "offset points", "annotation_clip": False}
        axes.annotate(text, (x, y), color=color, fontweight="bold", va="center", **place)
