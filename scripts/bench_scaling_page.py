"""Turn the results of bench_scaling.py into the tables and the picture of docs/benchmarks.md."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from bench_timing import ROOT
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from torchtitan.metrics.plot import HELD_OUT, LOSS, SPEED, STYLE

PAGE, PICTURE = ROOT / "docs/benchmarks.md", ROOT / "docs/scaling.png"
BEGIN, END = "<!-- scaling -->", "<!-- /scaling -->"
Row = dict[str, Any]
Rows = list[Row]
Cell = Callable[[Row], str]
Columns = dict[str, Cell]
PHASES = ("check", "launch", "torch", "package", "join", "build", "first step", "later steps")
SHADES = ("#9ca3af", "#6b7280", "#1d4ed8", "#a5c0f3", "#0f766e", "#d9480f", "#6d28d9")
"""Of phases up to the first step."""


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw all results into one figure."""
    rows = {name: part["rows"] for name, part in results.items()}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 10.5), dpi=110, layout="constrained")
        panels = figure.subplots(3, 3)
        for column, key in enumerate(("seq_len", "layers", "vocabulary")):
            draw_steps(panels[0][column], panels[1][column], key, rows[key])
        draw_steps(panels[0][0], panels[1][0], "seq_len", rows["documents"], HELD_OUT, "document_mask")
        draw_saves(panels[2][0], rows["saves"])
        draw_generation(panels[2][1], rows["generate"])
        draw_start(panels[2][2], rows["start"])
        figure.savefig(path, metadata={"Software": None})


def draw_steps(speed: Any, memory: Any, key: str, rows: Rows, color: str = LOSS, name: str = "measured") -> None:
    """Draw time and memory of steps by one size, with their bounds as dashed lines."""
    sizes = [row[key] for row in rows]
    seconds, flops = ([row[quantity] / row["tokens"] for row in rows] for quantity in ("seconds", "gflop"))
    speed.plot(sizes, [1e6 * value for value in seconds], "o-", color=color, label=name)
    like_first = [1e6 * seconds[0] * value / flops[0] for value in flops]
    speed.plot(sizes, like_first, "--", color=color, label="as the operations grow")
    memory.plot(sizes, [row["gib"] for row in rows], "o-", color=color, label=name)
    memory.plot(sizes, [row["estimated"] for row in rows], "--", color=color, label="torchtitan estimate")
    for axes, quantity in ((speed, "CPU microseconds a token"), (memory, "GiB at most")):
        axes.set_title(f"{quantity}, by {key}", loc="left", fontsize=10)
        axes.set_ylim(bottom=0, auto=True)  # leave room for further curves
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.legend(frameon=False, fontsize=8)


def draw_saves(axes: Any, rows: Rows) -> None:
    """Draw the speed of saves and loads next to plain writes and reads."""
    sizes = [row["megabytes"] for row in rows]
    for key, plain, color in (("save", "plain_write", LOSS), ("load", "plain_read", SPEED)):
        axes.plot(sizes, [row[key] for row in rows], "o-", color=color, label=key)
        axes.plot(sizes, [row[plain] for row in rows], "--", color=color, label=plain.replace("_", " "))
    axes.set_title("MB/s of saves and loads, by MB", loc="left", fontsize=10)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def draw_generation(axes: Any, rows: Rows) -> None:
    """Draw the speed of generation and its bounds by length of the prompt."""
    prompts = [row["prompt"] for row in rows]
    for key, color in (("read", LOSS), ("written", HELD_OUT)):
        axes.plot(prompts, [row[key] for row in rows], "o-", color=color, label=f"{key}, tokens/s")
        axes.plot(prompts, [row[f"{key}_bound"] for row in rows], "--", color=color, label=f"bound ({key})")
    axes.set_yscale("log")
    axes.set_title("generate, by tokens of the prompt", loc="left", fontsize=10)
    axes.legend(frameon=False)


def draw_start(axes: Any, rows: Rows) -> None:
    """Draw the phases of starts as stacked bars."""
    names, offsets = [f"{row['millions']} M, {row['ranks']} rank(s)" for row in rows], [0.0] * len(rows)
    for number, phase in enumerate(PHASES[:-1]):
        seconds = [row[phase] for row in rows]
        axes.barh(names, seconds, left=offsets, color=SHADES[number], label=phase)
        offsets = [a + b for a, b in zip(offsets, seconds, strict=True)]
    axes.set_title("seconds of a start, by phase", loc="left", fontsize=10)
    axes.set_ylim(len(rows) + 0.8, -0.6)  # the first on top, room for the legend below
    axes.legend(frameon=False, ncols=4, loc="lower left", fontsize=8)


def ranged(key: str, form: str) -> Cell:
    """Return a cell with median, minimum and maximum."""

    def cell(row: Row) -> str:
        low, middle, high = (form.format(row[name]) for name in (f"{key}_low", key, f"{key}_high"))
        return f"{middle} ({low} .. {high})"

    return cell


def plain(key: str, form: str = "{:,}") -> Cell:
    """Return a cell with one formatted value."""
    return lambda row: form.format(row[key])


def share(key: str, bound: str) -> Cell:
    """Return a cell with a value as a fraction of its bound."""
    return lambda row: f"{row[key] / row[bound]:.2f}"


def steps_by(key: str) -> Columns:
    """Return the columns of a table of steps by one size."""
    return {
        key: plain(key),
        "tokens/s": lambda row: f"{row['tokens'] / row['seconds']:,.0f}",
        "CPU seconds a step": ranged("seconds", "{:.2f}"),
        "GFLOP": plain("gflop", "{:,.0f}"),
        "share of matmul speed": ranged("share", "{:.2f}"),
        "GiB": plain("gib", "{:.2f}"),
        "predicted GiB": plain("estimated", "{:.2f}"),
    }


def stall(row: Row) -> str:
    """Return the time for which an asynchronous save blocks training, also as a fraction of a synchronous save."""
    of_a_save = row["stall"] * row["save"] / row["megabytes"]
    return f"{ranged('stall', '{:.3f}')(row)}, {of_a_save:.2f} of a synchronous one"


TABLES: dict[str, Columns] = {
    "seq_len": steps_by("seq_len"),
    "documents": steps_by("seq_len"),
    "layers": steps_by("layers"),
    "vocabulary": steps_by("vocabulary"),
    "saves": {
        "state": plain("megabytes", "{:,.0f} MB"),
        "save, MB/s": ranged("save", "{:,.0f}"),
        "plain write": plain("plain_write", "{:,.0f}"),
        "load, MB/s": ranged("load", "{:,.0f}"),
        "plain read": plain("plain_read", "{:,.0f}"),
        "the loop waits for an asynchronous save": stall,
    },
    "data": {
        "": plain("what", "{}"),
        "tokens/s": ranged("speed", "{:,.0f}"),
        "bound": lambda row: f"{row['bound']:,.0f} {row['by']}",
        "share": share("speed", "bound"),
    },
    "generate": {
        "prompt": plain("prompt"),
        "read, tokens/s": ranged("read", "{:,.0f}"),
        "of plain products": share("read", "read_bound"),
        "written, tokens/s": ranged("written", "{:,.1f}"),
        "of products with a vector": share("written", "written_bound"),
    },
    "start": {
        "million parameters": plain("millions", "{}"),
        "ranks": plain("ranks", "{}"),
        **{phase: plain(phase, "{:.2f}") for phase in PHASES[:-1]},
        "together": ranged("whole", "{:.1f}"),
        "second step": plain(PHASES[-1], "{:.2f}"),
    },
}
"""Of each table the columns: their heads, and what stands below for what was measured."""


def shown(name: str, result: dict[str, Any]) -> str:
    """Return the Markdown table of a result."""
    columns = TABLES[name]
    rows = [[cell(row) for cell in columns.values()] for row in result["rows"]]
    heads, *lines = (f"| {' | '.join(cells)} |" for cells in [list(columns), *rows])
    return "\n".join([f"`{name}`, {result['when']}:", "", heads, "---".join("|" * heads.count("|")), *lines])


def write_page(results: dict[str, Any]) -> None:
    """Write all tables into docs/benchmarks.md."""
    head, _, after = PAGE.read_text().partition(BEGIN)
    tables = "\n\n".join(shown(name, results[name]) for name in TABLES)
    PAGE.write_text(f"{head}{BEGIN}\n{tables}\n{END}{after.partition(END)[2]}")
