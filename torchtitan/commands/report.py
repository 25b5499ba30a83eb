"""`torchtitan report RUN [RUN ...] --to report.html`: draw runs over one another in one self-contained page.

Loss and validation, learning rate, gradient norm, tokens per second, memory, waits for data, and rows of events
(saves, restarts, rollbacks, skipped steps, slow ranks, losses that are not finite) share one axis: steps, tokens or
hours of training. The page answers to the mouse: values under the pointer, zoom, hidden runs, logarithmic scale. Below
it are the results, the options that differ between the runs, the resolved jobs, and the texts generated at validations.

The page has the script of plotly inside and fetches nothing, so it can be sent and kept. `--terminal`, or `torchtitan
plot`, draws the loss in the terminal instead. Needs no torch.
"""

import html
import json
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.commands.command_lines import parse_command
from torchtitan.config.changes import kind_of, saved_value
from torchtitan.config.job import as_dict
from torchtitan.config.manager import load, to_toml
from torchtitan.config.options import ConfigError, options, show
from torchtitan.core.errors import JobError
from torchtitan.core.files import FileError
from torchtitan.launcher.run_folder import JOB_FILE, describe_run_end
from torchtitan.metrics.curves import read_run, smoothed, smoothed_losses, smoothed_over
from torchtitan.metrics.json_lines import END, METRICS, Record, is_finite, iterate_records, lost_losses
from torchtitan.metrics.plot import FORMATS, check_format, draw_training_curve
from torchtitan.metrics.run_end import describe_end

PAGE, REPORT = ".html", Path("report.html")
ROWS, LABEL = 16, 9
"""Of the terminal: how high the drawing is, and how wide what stands before it."""
RAW, SMOOTHED, HELD_OUT = ".", "o", "v"
Points = list[tuple[int, float]]
GENERATED = "generated.jsonl"
MOST_POINTS = 4000
"""Points of a curve; of more, the extremes are drawn."""
MOST_TEXTS = 200
"""Generated texts of a run, the newest."""
COLORS = ("#1d4ed8", "#d9480f", "#0f766e", "#6d28d9", "#b91c1c", "#4d7c0f", "#be185d", "#0369a1")
PANELS = {
    "loss": "loss, nats per token; thin as logged, bold smoothed, dotted validation",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
    "memory_gib": "memory, GiB",
    "data_share": "waiting for data, %",
}
"""Field of a record -> title of its panel."""
HEIGHTS = (5.0, 1.4, 1.8, 1.8, 1.4, 1.4, 1.8)
DISTANCE = {"borderwidth": 5, "bordercolor": "white"}
"""Of the legend from the buttons below it."""
LOST = "loss not finite"
SYMBOLS = {
    "save": ("circle", "●"),
    "restart": ("x", "✖"),
    "rollback": ("triangle-left", "◀"),
    "skip": ("diamond", "◆"),
    "straggler": ("star", "★"),
    LOST: ("cross", "✚"),
    END: ("square", "■"),
}
"""Kind of event -> plotly's name of its symbol, and the symbol in the labels of the rows of events."""
STYLE = """
body { font-family: system-ui, sans-serif; color: #1f2937; margin: 2em; max-width: 1500px }
h1 { font-size: 1.4em } h2 { font-size: 1.2em }
table { border-collapse: collapse } td, th { text-align: left; padding: 0.2em 1.2em 0.2em 0; vertical-align: top }
td, th { min-width: 5em; overflow-wrap: anywhere } td:first-child { min-width: 12em }
th { color: #6b7280; font-weight: normal } pre { white-space: pre-wrap; background: #f9fafb; padding: 1em }
summary { cursor: pointer; padding: 0.3em 0 }
"""


@dataclass(frozen=True)
class RunData:
    """A run as a page shows it.

    `rows`: logged steps, with `hours` of training, `data_share` in percent, `tokens` and the `smoothed` loss, which is
    None where the loss is not finite. `account`: the seconds by cause that it logged last.
    `job`: its resolved job as TOML, or the reason for which it cannot be read.
    """

    label: str
    number: int
    """Position of the run on the page, from 0."""
    rows: list[Record]
    validations: list[Record]
    events: list[Record]
    account: Record
    job: str
    options: dict[str, Any] | None
    texts: list[Record]
    end: str
    """How its last start ended; "" if that is not known."""

    @property
    def color(self) -> str:
        return COLORS[self.number % len(COLORS)]


def main(argv: list[str]) -> int:
    arguments, _ = parse_command("report", argv)
    if arguments.terminal:
        if arguments.to is not None and len(arguments.runs) > 1:
            raise JobError("--to: allowed with --terminal for one run only; leave out --terminal for a page of all")
        for run in arguments.runs:
            draw_in_terminal(run, arguments.to)
        return 0
    target = arguments.to or REPORT
    check_format(target, "--to", (PAGE,))
    runs = [read(folder, number) for number, folder in enumerate(arguments.runs)]
    page = "".join(page_of(runs))
    try:
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise JobError(f"{target}: cannot be written ({error.strerror}); give another name") from None
    print(f"{len(runs)} run{'s' if len(runs) > 1 else ''} drawn into {target}")
    return 0


def read(folder: Path, number: int) -> RunData:
    """Read a run from its folder. Raises JobError if it has logged no step."""
    records = read_run(folder, tuple(PANELS), _Measures().add)
    rows = [record for record in records if "loss" in record]
    for row, mean in zip(rows, smoothed_losses(rows), strict=True):
        row["smoothed"] = mean if is_finite(row["loss"]) else None
    accounts = [record for record in records if record.get("event") == "goodput"]
    job, job_options = "", None
    try:
        config = load(["--job.config_file", str(folder / JOB_FILE)])
        job, job_options = to_toml(config), as_dict(config)
    except ConfigError as error:
        job = str(error)
    try:
        texts = list(deque(iterate_records(folder / GENERATED), MOST_TEXTS))
    except (OSError, FileError):
        texts = []
    return RunData(
        label=html.escape(str(folder)),
        number=number,
        rows=rows,
        validations=[record for record in records if is_finite(record.get("validation_loss"))],
        events=[record for record in records if event_of(record)],
        account=accounts[-1] if accounts else {},
        job=job,
        options=job_options,
        texts=texts,
        end=describe_run_end(folder, records),
    )


class _Measures:
    """Adds to the logged steps, in order, what depends on those before, and an event where a loss is lost."""

    def __init__(self) -> None:
        self.hours, self.last, self.is_lost = 0.0, 0, False

    def add(self, record: Record) -> Iterator[Record]:
        if "loss" not in record:
            yield record
            return
        seconds = record.get("step_seconds")
        self.hours += (record["step"] - self.last) * seconds / 3600 if is_finite(seconds) else 0.0
        self.last = record["step"]
        yield record | {"hours": self.hours, "data_share": data_share(record)}
        if not self.is_lost and not is_finite(record["loss"]):
            yield {"step": record["step"], "event": LOST}
        self.is_lost = not is_finite(record["loss"])


def data_share(record: Record) -> float | None:
    waited, total = record.get("data_seconds"), record.get("step_seconds")
    return 100 * waited / total if is_finite(waited) and is_finite(total) and total else None


def event_of(record: Record) -> str:
    """Return the kind of an event in SYMBOLS; "" for other records. Accounts of time are events if made at a save."""
    kind = "save" if record.get("saved") else str(record.get("event", ""))
    return kind if kind in SYMBOLS else ""


def thinned(rows: list[Record], key: str, most: int = MOST_POINTS) -> list[Record]:
    """Return at most `most` rows.

    All, or of each group of neighbours the first, the smallest and the largest value, and the first that is not finite.
    """
    if len(rows) <= most:
        return rows
    size = -(-4 * len(rows) // most)
    chosen = set()
    for start in range(0, len(rows), size):
        group = range(start, min(start + size, len(rows)))
        finite = [i for i in group if is_finite(rows[i].get(key))]
        chosen |= {start, *(pick(finite, key=lambda i: rows[i][key]) for pick in (min, max) if finite)}
        chosen.update([i for i in group if not is_finite(rows[i].get(key))][:1])
    return [rows[i] for i in sorted(chosen)]


# The figure


def figure_of(runs: Sequence[RunData]) -> Any:
    """Return the figure with all panels. Raises JobError without plotly."""
    try:
        from plotly import graph_objects
        from plotly.subplots import make_subplots
    except ImportError:
        remedy = "install it with: pip install 'torchtitan-toml[report]'"
        raise JobError(f"torchtitan report needs the package plotly; {remedy}") from None
    titles = [*PANELS.values(), "events"]
    figure = make_subplots(
        rows=len(titles),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.022,
        row_heights=list(HEIGHTS),
        subplot_titles=titles,
    )
    axes: dict[str, list[list[Any]]] = {"step": [], "tokens": [], "hours": []}
    for run in runs:
        for row, (points, traits) in curves(run, len(runs)):
            trace = graph_objects.Scatter(legendgroup=run.label, **traits)
            figure.add_trace(trace, row=row, col=1)
            for name, values in axes.items():
                values.append([point.get(name) for point in points])
    figure.update_layout(
        height=1200,
        template="plotly_white",
        hovermode="x unified",
        hoverlabel={"namelength": -1},
        legend={"orientation": "h", "yref": "container", "y": 1, "yanchor": "top", "x": 0} | DISTANCE,
        margin={"l": 70, "r": 40, "t": 95, "b": 50},
        modebar={"orientation": "v"},
        updatemenus=menus(axes),
    )
    figure.update_annotations(x=0, xanchor="left", font={"size": 12, "color": "#6b7280"})
    figure.update_xaxes(title_text="step", row=len(titles), col=1)
    labels = [f"{kind} {symbol}" for kind, (_, symbol) in SYMBOLS.items()]
    levels = list(range(len(labels)))
    figure.update_yaxes(tickvals=levels, ticktext=labels, range=[-0.6, len(labels) - 0.4], row=len(titles), col=1)
    return figure


def menus(axes: dict[str, list[list[Any]]]) -> list[dict[str, Any]]:
    """Return the buttons for the scale of loss and gradient norm, and for the axis that all panels share."""
    scaled = ("yaxis.type", "yaxis3.type")
    scales = [
        {"label": f"{name} scale", "method": "relayout", "args": [dict.fromkeys(scaled, name)]}
        for name in ("linear", "log")
    ]
    last = f"xaxis{len(PANELS) + 1}.title.text"
    shared = [
        {"label": f"by {name}", "method": "update", "args": [{"x": values}, {last: name}]}
        for name, values in axes.items()
    ]
    common = {"type": "buttons", "direction": "right", "y": 1.02, "yanchor": "bottom"}
    first, second = {"x": 0, "xanchor": "left"}, {"x": 1, "xanchor": "right"}
    return [common | first | {"buttons": shared}, common | second | {"buttons": scales}]


def curves(run: RunData, count: int) -> Iterator[tuple[int, tuple[list[Record], dict[str, Any]]]]:
    """Yield for each curve of a run its panel, counted from 1, its points and the options of its trace.

    `count`: runs of the page, which lie side by side in each row of events. A value that is not finite leaves a gap.
    """

    def trace(points: list[Record], values: Sequence[Any], **traits: Any) -> tuple[list[Record], dict[str, Any]]:
        texts = {"name": run.label, "showlegend": False, "mode": "lines"}
        return points, texts | {"x": [point["step"] for point in points], "y": values} | traits

    line = {"color": run.color, "width": 1.5}
    for row, key in enumerate(PANELS, 1):
        points, values = drawn(run.rows, key)
        if key != "loss":
            yield row, trace(points, values, line=line)
            continue
        yield row, trace(points, values, line=line | {"width": 1}, opacity=0.35, name=f"{run.label}, as logged")
        yield row, trace(*drawn(run.rows, "smoothed"), line=line | {"width": 2.2}, showlegend=True)
        if run.validations:
            held_out = with_axes(run.validations, run.rows)
            values = [point["validation_loss"] for point in held_out]
            marker = {"symbol": "diamond", "size": 7, "color": run.color, "line": {"color": "white", "width": 1}}
            yield (
                row,
                trace(
                    held_out,
                    values,
                    name=f"{run.label}, validation",
                    mode="lines+markers",
                    line=line | {"dash": "dot"},
                    marker=marker,
                ),
            )
    events = with_axes(run.events, run.rows)
    symbols = [SYMBOLS[event_of(event)][0] for event in events]
    shift = ((count - 1) / 2 - run.number) * 0.6 / count
    levels = [list(SYMBOLS).index(event_of(event)) + shift for event in events]
    texts = [html.escape(describe(event)) for event in events]
    marker = {"symbol": symbols, "size": 8, "color": run.color}
    template = "%{text}"
    yield (
        len(PANELS) + 1,
        trace(events, levels, mode="markers", marker=marker, text=texts, hovertemplate=template),
    )


def drawn(rows: list[Record], key: str) -> tuple[list[Record], list[float | None]]:
    """Return the points of a curve, and their values: None, a gap, for one that is not finite."""
    points = thinned([row for row in rows if key in row], key)
    return points, [point[key] if is_finite(point[key]) else None for point in points]


def with_axes(records: Iterable[Record], rows: list[Record]) -> list[Record]:
    """Return records with the tokens and hours of the last logged step at or before theirs."""
    placed, position = [], 0
    for record in sorted(records, key=lambda record: record["step"]):
        while position + 1 < len(rows) and rows[position + 1]["step"] <= record["step"]:
            position += 1
        axes = {name: rows[position].get(name) for name in ("tokens", "hours")}
        placed.append(axes | record)
    return placed


def describe(event: Record) -> str:
    """Describe an event for the pointer."""
    kind = event_of(event)
    if kind == "save":
        goodput = event.get("goodput")
        return f"saved; {100 * goodput:.1f} % of all time spent training" if is_finite(goodput) else "saved"
    if kind == END:
        return describe_end(event)
    if kind == LOST:
        return f"{LOST} since step {event['step']}"
    if kind == "straggler":
        return f"slow: {event['ranks']} times" if event.get("ranks") else "no slow rank any more"
    details = {name: event[name] for name in ("cause", "rank", "steps_lost", "seconds_lost") if name in event}
    return f"{kind}: " + ", ".join(f"{name} {value}" for name, value in details.items())


# The page


def page_of(runs: Sequence[RunData]) -> Iterator[str]:
    figure = figure_of(runs)
    title = ", ".join(run.label for run in runs)
    yield f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>\n'
    yield f"<h1>{title}</h1>\n"
    config = {"displaylogo": False, "responsive": True, "scrollZoom": True}
    yield figure.to_html(full_html=False, include_plotlyjs=True, config=config)
    yield "\n<h2>Results</h2>\n" + "".join(
        table([["run", "steps", "loss", "validation", "time", "end"], *map(results, runs)])
    )
    if len(runs) > 1:
        yield "\n<h2>Options that differ</h2>\n" + "".join(table(differing_options(runs)))
    yield "\n<h2>Jobs</h2>\n"
    for run in runs:
        yield f"<details><summary>{run.label}</summary><pre>{html.escape(run.job)}</pre></details>\n"
    runs_with_texts = [run for run in runs if run.texts]
    yield "\n<h2>Texts generated at validations</h2>\n" * bool(runs_with_texts)
    for run in runs_with_texts:
        keys = ("step", "prompt", "wanted", "generated")
        rows = [[html.escape(show_text(text.get(key))) for key in keys] for text in reversed(run.texts)]
        yield f"<details><summary>{run.label}</summary>{''.join(table([list(keys), *rows]))}</details>\n"
    yield "</html>\n"


def show_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def results(run: RunData) -> list[str]:
    """Return a run's row of the table of results."""
    mean, lost = run.rows[-1]["smoothed"], lost_losses(run.rows)
    loss = f"not finite since step {lost[-1]['step']}" if mean is None else f"{mean:.4f}"
    held_out = f"{run.validations[-1]['validation_loss']:.4f}" if run.validations else ""
    seconds = {name.removesuffix("_seconds"): v for name, v in run.account.items() if name.endswith("_seconds")}
    largest = sorted(((v, name) for name, v in seconds.items() if is_finite(v) and v >= 0.05), reverse=True)
    time = ", ".join(f"{name} {v:,.1f} s" for v, name in largest)
    return [run.label, f"{run.rows[-1]['step']:,}", loss, held_out, html.escape(time), html.escape(run.end)]


def differing_options(runs: Sequence[RunData]) -> Iterator[list[str]]:
    """Yield the rows of the table of options that differ between runs, without quiet ones (config/changes.py)."""
    yield ["option", *(run.label for run in runs)]
    for key, option in options().items():
        values = ["?" if run.options is None else show(saved_value(run.options, key, option.default)) for run in runs]
        if kind_of(key) != "quiet" and len({value for value in values if value != "?"}) > 1:
            yield [key, *map(html.escape, values)]


def table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield an HTML table of escaped cells. The first row is its head."""
    yield "<table>"
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        yield "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in row) + "</tr>\n"
    yield "</table>"


# The loss of one run in the terminal


def plot(argv: list[str]) -> int:
    """Run `torchtitan plot FOLDER`: draw one run in the terminal, and with --to into a file."""
    options, _ = parse_command("plot", argv)
    draw_in_terminal(options.folder, options.to)
    return 0


def draw_in_terminal(run: Path, target: Path | None = None) -> None:
    """Draw the loss of a run in the terminal, and into a page or a picture if there is a `target`.

    `run`: its folder, or its metrics.jsonl. Raises JobError for a format that cannot be written.
    """
    if target is not None:
        check_format(target, "--to", (PAGE, *FORMATS))
    path = run / METRICS if run.is_dir() else run
    records = read_run(path, ("loss",))
    print(text_plot(*points_of(records), shutil.get_terminal_size().columns - 1))
    if end := describe_run_end(path.parent, records):
        print(f"{'end':>{LABEL - 1}} {end}")
    if target is not None:
        try:
            write_plot(path, target, title=str(run))
        except OSError as error:
            raise JobError(f"{target}: cannot be written ({error.strerror}); give another name") from None
        print(f"drawn into {target}")


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


def write_plot(metrics: Path, target: Path, title: str) -> None:
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
