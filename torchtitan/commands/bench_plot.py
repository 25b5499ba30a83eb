"""The picture of a sweep: a bar for each combination's speed and memory; those that failed say so."""

from pathlib import Path
from typing import Any

from torchtitan.plot import GREY, HELD_OUT, INK, LOSS, SPEED, STYLE

BAR = 0.32
"""Inches, of a row."""


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """`rows` as `torchtitan bench` writes them. OSError where it cannot be written."""
    import matplotlib
    from matplotlib.figure import Figure

    names = [", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in row["options"].items()) for row in rows]
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": "bench"}):
        figure = Figure(figsize=(11, 1.4 + BAR * len(rows)), dpi=150, layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        panels = (
            ("tokens_per_second", "tokens per second", SPEED, ",.0f"),
            ("memory_gib", "GiB of the first rank", LOSS, ".2f"),
        )
        for panel, (key, title, color, form) in zip(axes, panels, strict=True):
            panel.barh(range(len(rows)), [row.get(key, 0) for row in rows], color=color, height=0.7)
            panel.set_title(title, loc="left", fontweight="bold")
            panel.grid(visible=False, axis="y")
            for place, row in enumerate(rows):
                told, ink = (format(row[key], form), INK) if key in row else (row["result"], HELD_OUT)
                panel.annotate(
                    told, (row.get(key, 0), place), (4, 0), textcoords="offset points", va="center", color=ink
                )
            panel.margins(x=0.18)
        axes[0].set_yticks(range(len(rows)), [name or "the job" for name in names], color=GREY)
        axes[0].invert_yaxis()
        dated: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix.lower() == ".svg" else {}
        figure.savefig(path, facecolor="white", **dated)
