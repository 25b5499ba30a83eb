"""`torchtitan schedule --pp 4 --microbatches 16 --schedule ZBVZeroBubble`: simulate and plot a pipeline schedule.

Bubble, makespan and peak activations are simulated from the given costs of forward and backward; no model is run.
With --job.config_file (and options of a job after it) ranks, microbatches and schedule are taken from the job.
"""

import argparse
import dataclasses
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from torchtitan.commands.command_lines import parse_command
from torchtitan.config.job import JobConfig
from torchtitan.config.options import ConfigError
from torchtitan.config.sections.model import Parallelism
from torchtitan.core.errors import JobError
from torchtitan.job import ResolvedJob
from torchtitan.job.layout import JobLayout
from torchtitan.job.model import JobModel
from torchtitan.metrics.plot import GREY, INK, STYLE, check_format
from torchtitan.parallelisms.pipeline.actions import (
    ACTION_NAMES,
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Table,
    count_stages,
    load_schedule_csv,
    to_csv,
    with_full_backward,
)
from torchtitan.parallelisms.pipeline.cut import SCHEDULES, schedule_traits
from torchtitan.parallelisms.pipeline.simulator import Costs, Simulation, TimeSpan, simulate
from torchtitan.parallelisms.pipeline.tables import build_table
from torchtitan.process.ranks import likely_device
from torchtitan.rules import Facts
from torchtitan.rules.loading import load_valid
from torchtitan.rules.monitoring import unwritable

OF_THE_PIPELINE = (
    "model.name",
    "model.flavor",
    "model.overrides",
    "training.local_batch_size",
    "parallelism.module_fqns_per_model_part",
    "parallelism.pipeline_",
)
"""Prefixes of options with faults that prevent showing a job's pipeline. Other faults do not matter here."""
MOST_WORK = 50_000
"""Largest number of simulated forwards, which takes seconds."""


@dataclass(frozen=True)
class ScheduleRequest:
    """A pipeline schedule and the costs to simulate it with."""

    pp: int
    microbatches: int
    schedule: str
    stages_per_rank: int | None
    """Stages per rank; None: the schedule's usual number."""
    csv: str | None
    merge_backward: bool
    costs: Costs
    p2p: Fraction
    overlap: Fraction | None
    layers: tuple[int, ...] = ()
    """Layers of each stage of the job if the stages differ in cost, which the simulation ignores."""

    @property
    def name(self) -> str:
        return Path(self.csv).name if self.csv else schedule_traits(self.schedule).name

    def table(self) -> Table:
        if not self.csv:
            return build_table(
                self.schedule,
                self.pp,
                self.microbatches,
                self.stages_per_rank,
                merge_backward=self.merge_backward,
                overlap=self.overlap is not None,
            )
        stages = None if self.stages_per_rank is None else self.pp * self.stages_per_rank
        table = load_schedule_csv(self.csv, self.pp, stages, self.microbatches)
        return with_full_backward(table) if self.merge_backward else table

    def simulated(self, table: Table) -> Simulation:
        return simulate(table, self.costs, self.p2p, self.overlap)


def main(argv: list[str]) -> int:
    options, job_args = parse_command("schedule", argv)
    question = ask(options, job_args)
    check_format(options.out, "--out")
    for option in ("out", "write_csv"):
        check_file(option, getattr(options, option))
    work = question.pp * question.microbatches * (question.stages_per_rank or 1)
    if work > MOST_WORK:
        stage_count = question.stages_per_rank or 1
        size_text = f"{question.pp} ranks x {question.microbatches} microbatches x {stage_count} stages"
        raise JobError(f"given {size_text} = {work:,}; allowed: {MOST_WORK:,}; ask for fewer microbatches")
    table = question.table()
    simulation = question.simulated(table)
    print("\n".join([*report(question, table, simulation), *comparison(question, simulation)]))
    try:
        if options.write_csv:
            options.write_csv.parent.mkdir(parents=True, exist_ok=True)
            options.write_csv.write_text(to_csv(table))
            print(f"table                  {options.write_csv}")
        options.out.parent.mkdir(parents=True, exist_ok=True)
        draw_schedule(simulation, options.out, question.name, caption(question, table, simulation))
    except OSError as error:
        file = error.filename or "the output"
        raise JobError(f"{file}: {error.strerror}; name a file that can be written") from None
    print(f"picture                {options.out}")
    return 0


def check_file(option: str, path: Path | None) -> None:
    """Raise JobError if the file cannot be written. A missing folder is no error: it is created later."""
    if path is None:
        return
    if fault := unwritable(path.parent) or _no_file(path):
        allowed, reason = fault
        raise JobError(f"--{option.replace('_', '-')}: given {str(path)!r}; allowed: {allowed}; {reason}; name another")


def _no_file(path: Path) -> tuple[str, str] | None:
    try:
        return ("a file", "it is a folder") if path.is_dir() else None
    except OSError as error:
        return "a file", error.strerror or str(error)


def ask(options: argparse.Namespace, job: list[str]) -> ScheduleRequest:
    """Combine the options with the job's values for missing ones. Raises ConfigError for an invalid pipeline."""
    pp, microbatches, schedule, stages_per_rank = (
        options.pp,
        options.microbatches,
        options.schedule,
        options.stages_per_rank,
    )
    csv, merge_backward = options.csv, options.merge_backward
    if job:
        facts = facts_of(options, job)
        pp, microbatches = facts.layout.pp, facts.layout.microbatches
        degrees = facts.config.parallelism
        schedule, csv = degrees.pipeline_parallel_schedule, degrees.pipeline_parallel_schedule_csv
        stages_per_rank = stages_per_rank or (None if csv else facts.layout.num_stages(facts.model.args.n_layers) // pp)
        merge_backward |= facts.config.activation_checkpoint.mode != "none" or facts.layout.compiles_model
    pp = pp or 4
    return ScheduleRequest(
        pp=pp,
        microbatches=microbatches or 4 * pp,
        schedule=schedule or "1F1B",
        stages_per_rank=stages_per_rank,
        csv=csv,
        merge_backward=merge_backward,
        costs=Costs(*options.costs),
        p2p=options.p2p,
        overlap=options.overlap,
        layers=unequal_layers(facts) if job and not options.stages_per_rank else (),
    )


def unequal_layers(facts: Facts) -> tuple[int, ...]:
    """Return the layers per stage, or () if all stages cost the same, counting embedding and head as the cut does."""
    layers, (first, last) = facts.layers_by_stage, facts.layout.end_costs
    costs = list(layers)
    costs[0] += first
    costs[-1] += last
    return tuple(layers) if len(set(costs)) > 1 else ()


def facts_of(options: argparse.Namespace, job: list[str]) -> Facts:
    """Load the job and override it by the options. Raises ConfigError if its pipeline is invalid."""
    return load_valid(
        job,
        None,
        likely_device(),
        matters=lambda fault: fault.key.startswith(OF_THE_PIPELINE),
        adjust=lambda config: overridden(config, options),
    )


def overridden(config: JobConfig, options: argparse.Namespace) -> JobConfig:
    """Return the job with the pipeline that the options describe. Raises ConfigError if it has none."""
    degrees = config.parallelism
    if options.pp:
        degrees.pipeline_parallel_degree = options.pp
    if options.csv:
        degrees.pipeline_parallel_schedule_csv = options.csv
        degrees.pipeline_parallel_schedule = Parallelism().pipeline_parallel_schedule
        degrees.pipeline_parallel_layers_per_stage = None
    if options.schedule:
        degrees.pipeline_parallel_schedule, degrees.pipeline_parallel_schedule_csv = options.schedule, None
        job = ResolvedJob(config)
        if not cut_suits(job.layout, job.model):
            degrees.pipeline_parallel_layers_per_stage = degrees.module_fqns_per_model_part = None
    if options.microbatches:
        config.training.local_batch_size = options.microbatches * degrees.pipeline_parallel_microbatch_size
    if degrees.pipeline_parallel_degree == 1:
        fault = Facts(ResolvedJob(config)).fault
        remedy = "set it in the job, or give --pp"
        raise ConfigError(
            [fault("parallelism.pipeline_parallel_degree", "at least 2, for there to be a schedule", remedy)]
        )
    return config


def cut_suits(layout: JobLayout, model: JobModel) -> bool:
    """Return True if the job's schedule allows the number of stages that the job cuts its model into."""
    try:
        n_layers = model.args.n_layers
    except (JobError, KeyError):  # the rules report it
        return True
    try:
        return layout.num_stages(n_layers) > 0
    except JobError:
        return False


# Report


def report(question: ScheduleRequest, table: Table, simulation: Simulation) -> list[str]:
    works = list(map(_short, dict.fromkeys((min(simulation.busy), max(simulation.busy)))))
    peaks = " ".join(map(_short, simulation.peak_activations))
    lines = [
        f"{question.name:22} {about(question, table)}",
        f"bubble                 {simulation.bubble_share:.1%} of the ranks' time",
        f"makespan               {_short(simulation.makespan)}, each rank is busy {' to '.join(works)}",
        f"peak activations       {peaks} by rank, in a rank's layers x a microbatch",
    ]
    if question.layers:
        layers = ", ".join(map(str, question.layers))
        lines.append(f"stages                 taken as equal; the job's have {layers} layers")
    unmerged = dataclasses.replace(question, merge_backward=False)
    if question.merge_backward and (split := unmerged.table()) != table:
        share = unmerged.simulated(split).bubble_share
        lines.append(f"merged backward        with input and weight gradients apart the bubble would be {share:.1%}")
    return lines


def about(question: ScheduleRequest, table: Table) -> str:
    stages = count_stages(table)
    stages_text = f" x {stages // question.pp}" if stages % question.pp == 0 else f", {stages}"
    stages_text += " stage" if stages == question.pp else " stages"
    extra = f", messages {_short(question.p2p)}" if question.p2p else ""
    if question.overlap is not None and any(action.parts for row in table for action in row):
        extra += f", overlapping pairs {_short(question.overlap)} (F + B)"
    if question.merge_backward:
        extra += ", merged backward"
    return f"{question.pp} ranks{stages_text}, {question.microbatches} microbatches, F:I:W = {question.costs}{extra}"


def comparison(question: ScheduleRequest, simulation: Simulation) -> list[str]:
    """List all schedules at the same costs, the fastest first, then the ones that these numbers do not allow."""
    rows, impossible = [(simulation.makespan, question.name, simulation)] if question.csv else [], []
    for traits in SCHEDULES.values():
        stages_per_rank = None if traits.fixed_stages or question.stages_per_rank == 1 else question.stages_per_rank
        other = dataclasses.replace(question, schedule=traits.name, stages_per_rank=stages_per_rank, csv=None)
        try:
            result = other.simulated(other.table())
        except JobError as error:
            impossible.append(f"  {traits.name:22} {str(error).partition(';')[0]}")
            continue
        rows.append((result.makespan, traits.name, result))
    lines = [f"\n  at the same costs      {'makespan':>9} {'bubble':>9} {'peak':>9}"]
    for makespan, name, result in sorted(rows, key=lambda row: row[:2]):
        peak = _short(max(result.peak_activations))
        mark = ">" if name == question.name else " "
        lines.append(f"{mark} {name:22} {_short(makespan):>9} {result.bubble_share:>9.1%} {peak:>9}")
    return [*lines, *impossible, ""]


def caption(question: ScheduleRequest, table: Table, simulation: Simulation) -> str:
    share, makespan = f"{simulation.bubble_share:.1%}", _short(simulation.makespan)
    return f"{about(question, table)}    bubble {share}    makespan {makespan}"


def _short(number: Fraction | int) -> str:
    return f"{float(number):.6g}"


COLORS = {FORWARD: "#1d4ed8", INPUT_GRAD: "#ea7317", WEIGHT_GRAD: "#0f8a7e", BACKWARD: "#a8204e"}
IDLE: dict[str, Any] = {"facecolor": "#f8fafc", "edgecolor": "#d5dbe3", "hatch": "////", "linewidth": 0}
WIDTH, HEAD, TALLEST = 14.0, 2.1, 16.0
"""Inches: width of the picture, height above and below the rows, and maximum height of all rows."""
LARGEST_FONT, SMALLEST_FONT, DIGIT = 9.0, 4.5, 0.7
"""Font sizes in points, and the width of a digit relative to the font size."""


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


def _draw_row(axes: Any, rank: int, spans: list[TimeSpan], points_per_unit: float, height: float) -> None:
    """Draw the actions of one rank. `height`: of a row, in points."""
    stages = sorted({span.action.stage for span in spans})
    digits = len(str(max(span.action.microbatch for span in spans)))
    alike: dict[tuple[str, int, float, float], list[TimeSpan]] = {}
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


def _band(span: TimeSpan) -> tuple[float, float]:
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
    patches = [Patch(facecolor=COLORS[kind], label=ACTION_NAMES[kind]) for kind in ACTION_NAMES if kind in used]
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
