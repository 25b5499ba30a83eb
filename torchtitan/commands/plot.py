"""`torchtitan plot FOLDER [--to run.html]`: plot a run's loss from its metrics.jsonl.

The plot is drawn in the terminal, and with --to also written to a self-contained page or a picture. Needs no torch.
"""

import html
import shutil
import tempfile
from pathlib import Path

from torchtitan.commands.command_lines import parse_command
from torchtitan.core.errors import JobError
from torchtitan.launcher.run_folder import describe_run_end
from torchtitan.metrics.curves import read_run, smoothed, smoothed_over
from torchtitan.metrics.json_lines import METRICS, Record, is_finite
from torchtitan.metrics.plot import FORMATS, check_format, draw_training_curve

PAGE = ".html"
ROWS, LABEL = 16, 9
"""Of the terminal: how high the drawing is, and how wide what stands before it."""
RAW, SMOOTHED, HELD_OUT = ".", "o", "v"
Points = list[tuple[int, float]]


def main(argv: list[str]) -> int:
    options, _ = parse_command("plot", argv)
    if options.to is not None:
        check_format(options.to, "--to", (PAGE, *FORMATS))
    path = options.folder / METRICS if options.folder.is_dir() else options.folder
    records = read_run(path, ("loss",))
    print(text_plot(*points_of(records), shutil.get_terminal_size().columns - 1))
    if end := describe_run_end(path.parent, records):
        print(f"{'end':>{LABEL - 1}} {end}")
    if options.to is not None:
        try:
            write(path, options.to, title=str(options.folder))
        except OSError as error:
            raise JobError(f"{options.to}: cannot be written ({error.strerror}); give another name") from None
        print(f"drawn into {options.to}")
    return 0


def points_of(records: list[Record]) -> tuple[Points, Points]:
    """Return the finite training and validation losses with their steps."""
    losses, held_out = (
        [(record["step"], record[key]) for record in records if is_finite(record.get(key))]
        for key in ("loss", "validation_loss")
    )
    return losses, held_out


def text_plot(losses: Points, held_out: Points, width: int) -> str:
    """Return the text plot, `width` characters wide."""
    columns = max(width - LABEL, 20)
    values = [value for _, value in [*losses, *held_out]]
    low, high, first, last = min(values), max(values), losses[0][0], losses[-1][0]
    grid = [[" "] * columns for _ in range(ROWS)]
    steps, smooth = [step for step, _ in losses], smoothed([loss for _, loss in losses])
    for mark, points in ((RAW, losses), (SMOOTHED, zip(steps, smooth, strict=True)), (HELD_OUT, held_out)):
        for step, value in points:
            column = round((min(max(step, first), last) - first) / max(last - first, 1) * (columns - 1))
            row = round((high - value) / (high - low) * (ROWS - 1)) if high > low else ROWS // 2
            grid[row][column] = mark
    labels = {0: high, ROWS // 2: high - (high - low) * (ROWS // 2) / (ROWS - 1), ROWS - 1: low}
    rows = [f"{_number(labels[i]):>{LABEL - 2}} |" if i in labels else " " * (LABEL - 1) + "|" for i in range(ROWS)]
    rows = [(label + "".join(row)).rstrip() for label, row in zip(rows, grid, strict=True)]
    meaning = f"{RAW} loss of a logged step   {SMOOTHED} smoothed, {smoothed_over(len(losses))} of them at a time"
    meaning += f"   {HELD_OUT} validation" * bool(held_out)
    ends = f"{first:<{columns // 2},}{last:>{columns - columns // 2},}"
    return "\n".join([*rows, " " * LABEL + ends, f"{'step':>{LABEL - 1}} {meaning}"])


def _number(value: float) -> str:
    """Format a number to fit an axis label."""
    text = f"{value:.3f}"
    return text if len(text) <= LABEL - 2 else f"{value:.2g}"


def write(metrics: Path, target: Path, title: str) -> None:
    """Write the plot as a page or a picture. Raises OSError if it cannot be written."""
    if target.suffix.lower() != PAGE:
        draw_training_curve(metrics, target, title)
        return
    with tempfile.TemporaryDirectory(prefix="torchtitan-") as folder:
        picture = Path(folder, "picture.svg")
        draw_training_curve(metrics, picture, title)
        svg = picture.read_text(encoding="utf-8")
    head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
    style = "<style>body { margin: 2em } svg { max-width: 100%; height: auto }</style>"
    target.write_text(f"{head}\n{style}\n{svg[svg.index('<svg') :]}</html>\n", encoding="utf-8")
