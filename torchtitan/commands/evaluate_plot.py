"""The picture of an evaluation: the loss by the place of a token in its document, a line for each size of a cache."""

from pathlib import Path
from typing import Any

from torchtitan.plot import HELD_OUT, INK, LOSS, RATE, SPEED, STYLE

COLORS = (LOSS, HELD_OUT, RATE, SPEED)


def draw(found: dict[str, Any], path: Path) -> None:
    """OSError where it cannot be written."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE | {"svg.hashsalt": "evaluation"}):
        figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        axes.set_title("loss by place in the document", loc="left", fontweight="bold")
        names = list(found["runs"][0]["by_position"])
        for number, run in enumerate(found["runs"]):
            losses = [run["by_position"][name]["loss"] for name in names]
            label = f"{run['cache_size']:,} entries" if "cache_size" in run else f"loss {run['loss']:.4f}"
            axes.plot(names, losses, marker="o", color=COLORS[number % len(COLORS)], linewidth=1.8, label=label)
        axes.set_xlabel("tokens ahead in the document")
        axes.set_ylabel("nats per token")
        axes.legend(frameon=False, labelcolor=INK)
        dated: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix.lower() == ".svg" else {}
        figure.savefig(path, facecolor="white", **dated)
