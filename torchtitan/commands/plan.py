"""`torchtitan plan JOB --gpus 256 --gpu h100-80`: find the fastest plans of a job, explain them, and draw them.

Every plan trains the same model: the samples of a step and their length are the job's. Nothing is run. The picture has
time against memory of the plans, and duration against price by number of GPUs.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from string import ascii_lowercase
from typing import Any

import tomli_w

from torchtitan.commands.command_lines import parse_command
from torchtitan.commands.schedule import check_file
from torchtitan.config import manager
from torchtitan.config.job import JobConfig
from torchtitan.config.layers import nest
from torchtitan.config.options import ConfigError
from torchtitan.core.errors import JobError, LimitError, format_bytes
from torchtitan.core.hardware import load_hardware
from torchtitan.core.progress_bar import waiting
from torchtitan.job import ResolvedJob
from torchtitan.metrics.plot import GREY, HELD_OUT, INK, LOSS, RATE, RAW, STYLE, check_format
from torchtitan.parallelisms.pipeline.cut import schedule_traits
from torchtitan.planner.answer import (
    HEADER,
    Cost,
    as_record,
    comparison,
    costs,
    explanation,
    extrapolation,
    failure_lines,
    figure,
    gpus_text,
    interval,
    loss_of,
    pareto_front,
    row,
)
from torchtitan.planner.failures import Failures
from torchtitan.planner.informative_runs import differing_options, run_lines, runs_to_measure
from torchtitan.planner.memory.closed_form import NEEDED, RESERVED, fit, needed, reserved
from torchtitan.planner.plan import Plan, Workload, planning_obstacle
from torchtitan.planner.robust_search import PlanAnswer, search_plans
from torchtitan.planner.search import Candidate, Limits, Result, Search, faults_as_new, memory_limit
from torchtitan.planner.time.measured_runs import calibrate, usual_calibration
from torchtitan.planner.trace import check_ending, write_trace
from torchtitan.rules.loading import load_job

LABEL: dict[str, Any] = {
    "zorder": 5,
    "bbox": {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1},
}
"""Style of a text that may lie over lines, but below points."""
UNITS = (("days", 24.0), ("hours", 1.0), ("minutes", 1 / 60), ("seconds", 1 / 3600))
"""Units of a duration, and their hours."""


def draw_plans(path: Path, answer: PlanAnswer, memory: float, cost: Cost) -> None:
    """Draw a PNG or SVG. `memory`: bytes of a GPU. Raises OSError if the file cannot be written."""
    import matplotlib
    from matplotlib.figure import Figure

    result, job, alternatives = answer.result, answer.job, answer.alternatives
    widths = [3, 2] if alternatives else [1]
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": "plan"}):
        figure = Figure(figsize=(12, 6.6), dpi=150, layout="constrained")
        by_memory, *by_price = figure.subplots(1, 1 + bool(alternatives), squeeze=False, width_ratios=widths)[0]
        _draw_memory(by_memory, result, memory, None if isinstance(job, str) else job)
        if by_price:
            _draw_price(by_price[0], result.plans[0], alternatives, cost)
        figure.savefig(path, facecolor="white")


def _gib(candidate: Candidate) -> float:
    return (candidate.memory.low + candidate.memory.high) / 2**31


def _draw_memory(axes: Any, result: Result, memory: float, job: Candidate | None) -> None:
    """Plot each plan with the interval of its memory, the Pareto front, and the memory of a GPU."""
    axes.set_title("step time and memory of the fastest plans", loc="left", fontweight="bold", color=INK)
    judged = result.judged or result.may_fit
    for candidate in judged:
        ends = [candidate.memory.low / 2**30, candidate.memory.high / 2**30]
        axes.plot([candidate.time.seconds] * 2, ends, color=RAW, linewidth=2)
        axes.plot(candidate.time.seconds, _gib(candidate), "o", color=LOSS, markersize=5, zorder=6)
    front = pareto_front(judged)
    axes.plot([one.time.seconds for one in front], [_gib(one) for one in front], color=LOSS, label="Pareto front")
    numbers = {candidate.plan: f"{number}" for number, candidate in enumerate(result.best, start=1)}
    letters = iter(ascii_lowercase)
    for index, candidate in enumerate(front):
        label = numbers.get(candidate.plan) or next(letters, "-")
        place = {"xytext": (0, 7 if index % 2 else -15), "textcoords": "offset points", "ha": "center"} | LABEL
        axes.annotate(label, (candidate.time.seconds, _gib(candidate)), color=INK, fontsize=8, **place)
        name = f"{candidate.plan}, {candidate.plan.recompute_text}"
        axes.plot([], [], linestyle="none", marker=rf"$\mathdefault{{{label}}}$", color=INK, label=name)
    if job is not None:
        axes.plot(job.time.seconds, _gib(job), "D", color=HELD_OUT, markersize=7, zorder=7, label="the job's own plan")
    most = max(candidate.memory.high for candidate in judged + [job] * (job is not None)) / 2**30
    if memory / 2**30 < 2 * most:
        axes.axhline(memory / 2**30, color=GREY, linewidth=1, linestyle="--", label="memory of a GPU")
        most = max(most, memory / 2**30)
    axes.set_ylim(0, 1.1 * most)
    axes.margins(x=0.1)
    axes.set_xlabel("seconds of a step")
    axes.set_ylabel("GiB reserved, low to high; numbers as in the table")
    below = {"loc": "upper left", "bbox_to_anchor": (0, -0.12)}
    axes.legend(**below, labelcolor=INK, fontsize=8, framealpha=0.9, edgecolor="none")


def _draw_price(axes: Any, best: Candidate, alternatives: Sequence[tuple[str, Candidate | None]], cost: Cost) -> None:
    """Plot the best plan for each number of GPUs: duration and GPU-hours, or their price."""
    by_gpus = {best.plan.gpus: best}
    by_gpus |= {other.plan.gpus: other for _, other in alternatives if other and other.plan.gpus != best.plan.gpus}
    candidates = [by_gpus[gpus] for gpus in sorted(by_gpus)]
    prices = [cost.money(candidate) or cost.gpu_hours(candidate) for candidate in candidates]
    unit, size = next((one for one in UNITS if max(map(cost.hours, candidates)) >= 2 * one[1]), UNITS[-1])
    durations = [cost.hours(candidate) / size for candidate in candidates]
    axes.set_title("duration and price by number of GPUs", loc="left", fontweight="bold", color=INK)
    axes.plot(durations, prices, "o-", color=RATE, markersize=6)
    for candidate, x, y in zip(candidates, durations, prices, strict=True):
        text = gpus_text(candidate.plan.gpus)
        if candidate is not best:
            speed = best.time.seconds / candidate.time.seconds
            text += (
                f"\n{speed:.2f} times as fast\n{cost.gpu_hours(candidate) / cost.gpu_hours(best) - 1:+.1%} GPU-hours"
            )
        is_right = len(durations) > 1 and x == max(durations)
        side = {"xytext": (0, -12), "ha": "right", "va": "top"} if is_right else {"xytext": (8, 8)}
        place = side | {"textcoords": "offset points"} | LABEL
        axes.annotate(text, (x, y), color=INK, fontsize=8, **place)
    axes.set_ylim(0, max(prices) * 1.3)
    axes.margins(x=0.35)
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.set_xlabel(unit)
    axes.set_ylabel("GPU-hours" if cost.price is None else f"price at {cost.price:g} a GPU-hour")


BASE = ResolvedJob(JobConfig()).layout
PLANNED = {name for plan in (Plan(), Plan(tp=2, cp=2, pp=2, schedule="1F1B")) for name in plan.changes(BASE, 1)}
"""Options that a plan sets. Their faults in the job do not matter."""
WRITTEN = "# torchtitan plan: "
"""Start of a file of --write, which may be replaced by another one."""


def main(argv: list[str]) -> int:
    options, job_args = parse_command("plan", argv)
    if not job_args:
        raise JobError("torchtitan plan: no job is given; give a file or a name of `torchtitan list jobs`")
    if options.plot is not None:
        check_format(options.plot)
    for option in ("write", "plot", "trace"):
        check_file(option, getattr(options, option))
    check_ending(options.trace)
    if options.write is not None and options.write.suffix != ".toml":
        raise JobError(f"--write: given {str(options.write)!r}; allowed: names with .toml; rename it")
    if options.write is not None:
        check_replaced(options.write, job_args)
    question = ask(options, ResolvedJob(load_job(job_args)[0], options.gpus))
    with waiting("plans are searched"):
        number = max(options.top, options.explain or 0, options.rehearse)
        answer = search_plans(
            question.search, options.gpus, number, question.limits, with_alternatives=not options.quick
        )
    result = answer.result
    if options.explain and options.explain > len(result.plans):
        raise JobError(f"--explain: given {options.explain}; allowed: 1 to {len(result.plans)}, the plans found")
    peaks = list(question.rehearsed_peaks(result))
    if options.json:
        print(json.dumps(question.record(answer, peaks), indent=1))
    else:
        lines = [*report(question, answer), *question.comparison_with(peaks, result)]
        print("\n".join([*lines, *question.explained(result)]))
    write(question, answer)
    return 0


@dataclass(frozen=True)
class PlanRequest:
    """A job, its GPUs, and the limits of its plans."""

    options: argparse.Namespace
    search: Search
    limits: Limits
    cost: Cost
    residuals: list[str]
    """Lines on the runs of --from."""

    @property
    def gpus(self) -> int:
        return int(self.options.gpus)

    def runs_to_measure(self, result: Result) -> list[tuple[Plan, str]]:
        """Return the runs that would tell most for --from, with their commands; none if it is given."""
        if self.options.runs:
            return []
        leading = [candidate.plan for candidate in result.plans[: self.options.top]]
        return runs_to_measure(self.search, leading, [candidate.plan for candidate in result.judged])

    def explained(self, result: Result) -> list[str]:
        """Return the lines of --explain."""
        number = self.options.explain
        return explanation(result.plans[number - 1], self.search.calibration) if number else []

    def rehearsed_peaks(self, result: Result) -> Iterator[int]:
        """Yield the bytes of tensors at the peak of the first plans' steps, as many as --rehearse gives.

        First of those that may fit, up to as many of them too, then of the others.
        """
        for label, candidate in self.to_rehearse(result):
            with waiting(f"plan {label} is rehearsed"):
                estimate = resolve_name("torchtitan.planner.estimate")  # needs torch, unlike the search
                yield estimate.worst(estimate.predict(self.search.job(candidate.plan))).peak

    def to_rehearse(self, result: Result) -> list[tuple[str, Candidate]]:
        """Return the plans to rehearse by their labels in the table."""
        number = self.options.rehearse
        uncertain = [(f"m{index}", one) for index, one in enumerate(result.may_fit[:number], start=1)]
        return uncertain + [(f"{index}", one) for index, one in enumerate(result.best[:number], start=1)]

    def comparison_with(self, peaks: list[int], result: Result) -> list[str]:
        """Return lines that compare rehearsed peaks with the formula, and say which plans do not fit."""
        lines = ["rehearsed, nothing compiled; tensors at the peak:"] * bool(peaks)
        on_gpu = self.search.base.device_type == "cuda"
        for (label, candidate), peak in zip(self.to_rehearse(result), peaks, strict=True):
            low, high = reserved(peak, on_gpu=on_gpu)
            sizes = f"{format_bytes(peak)}, by the formula {format_bytes(candidate.memory.total)}"
            verdict = fit(low, needed(peak, on_gpu=on_gpu), self.limits.memory)
            lines.append(f"  {label:<3} {sizes}; reserved {format_bytes(low)} to {format_bytes(high)}: {verdict}")
        return lines

    def record(self, answer: PlanAnswer, peaks: list[int]) -> dict[str, object]:
        search, result, job = self.search, answer.result, answer.job

        def record_of(candidate: Candidate) -> dict[str, object]:
            options = candidate.plan.changes(search.base.layout, search.samples)
            extrapolated = extrapolation(candidate, search.hardware, search.calibration)
            return as_record(candidate, self.cost, options, extrapolated)

        return {
            "gpus": self.gpus,
            "hardware": search.hardware.name,
            "memory": self.limits.memory,
            "global_batch_size": search.samples,
            "seq_len": search.workload.seq_len,
            "tokens": self.cost.tokens,
            "evidence": search.calibration.evidence,
            "complete": result.complete,
            "excluded": dict(result.excluded),
            "plans": [record_of(candidate) for candidate in result.best],
            "may_fit": [record_of(candidate) for candidate in result.may_fit],
            "rehearsed_peaks": peaks,
            "job": job if isinstance(job, str) else record_of(job),
            "alternatives": {change: other and record_of(other) for change, other in answer.alternatives},
            "explanation": self.explained(result),
            "runs_to_measure": [command for _, command in self.runs_to_measure(result)],
        }


def ask(options: argparse.Namespace, job: ResolvedJob) -> PlanRequest:
    """Combine job and options. Raises JobError for what cannot be planned."""
    hardware = load_hardware(options.gpu)
    if options.machine:
        hardware = replace(hardware, devices_per_machine=options.machine)
    job = job.on_ranks(options.gpus, "cuda" if hardware.device_names else "cpu")
    if faults := [fault for fault in faults_as_new(job) if fault.key not in PLANNED]:
        raise ConfigError(faults)
    if reason := planning_obstacle(job.model):
        raise JobError(f"torchtitan plan: {reason}")
    config = job.config
    try:
        schedule_traits(config.parallelism.pipeline_parallel_schedule)
    except JobError as error:
        raise JobError(f"parallelism.pipeline_parallel_schedule: {error}") from None
    if config.training.epochs is not None and options.tokens is None:
        reason = "their tokens depend on the data, which is not read"
        raise JobError(f"training.epochs: given {config.training.epochs}; {reason}; give --tokens")
    try:
        samples = job.layout.samples
    except LimitError:
        fault = f"the job's degrees do not fit {gpus_text(options.gpus)}, so its batch is not known"
        raise JobError(f"{fault}; set training.global_batch_size, which all plans keep") from None
    workload = Workload.of(job, samples)
    if workload.dtype == "float8" and not hardware.peak.float8:
        remedy = "leave it out, or choose another --gpu"
        raise JobError(
            f"training.float8: given {config.training.float8!r}; {hardware.title} has no products in float8; {remedy}"
        )
    residuals: list[str] = []
    calibration = usual_calibration(hardware)
    if options.runs:
        calibration, residuals = calibrate(options.runs, hardware, calibration)
    memory = options.memory or memory_limit(config, hardware)
    price = options.price or hardware.price
    tokens = options.tokens or config.training.tokens or config.training.steps * workload.tokens
    search = Search(job, workload, samples, hardware, calibration)
    failures = expected_failures(options, search)
    slowdown = failures.slowdown(options.gpus) if failures else 1.0
    limits = Limits(memory, most_seconds(options, slowdown * tokens / workload.tokens, price))
    return PlanRequest(options, search, limits, Cost(tokens, price, failures), residuals)


def expected_failures(options: argparse.Namespace, search: Search) -> Failures | None:
    """Return the failures that --mtbf-hours names. Raises JobError if the run would hardly advance."""
    if options.mtbf_hours is None:
        for name in ("save_seconds", "restart_seconds"):
            if getattr(options, name) is not None:
                raise JobError(
                    f"--{name.replace('_', '-')}: allowed with --mtbf-hours only; give it, or leave this out"
                )
        return None
    memory = search.memory(Plan(microbatch=search.workload.rows_per_sample))
    failures = Failures(
        gpu_seconds=3600 * options.mtbf_hours,
        state=memory.parameters + memory.optimizer,
        in_background=search.base.config.checkpoint.async_mode != "disabled",
        save_seconds=options.save_seconds,
        restart_seconds=options.restart_seconds,
    )
    failures.check(options.gpus)
    return failures


def most_seconds(options: argparse.Namespace, steps: float, price: float | None) -> float:
    """Return the longest step that deadline and budget allow. `steps`: of the run, more with failures."""
    allowed = [float("inf")]
    if options.deadline:
        allowed.append(options.deadline / steps)
    if options.budget:
        if price is None:
            raise JobError("--budget: needs the price of a GPU for an hour; give --price")
        allowed.append(options.budget / price / options.gpus * 3600 / steps)
    return min(allowed)


def check_replaced(path: Path, job_args: list[str]) -> None:
    """Raise JobError if --write would replace a file of the job, or a file that it did not write."""
    name = str(path)
    if path.resolve() in {Path(layer.name).resolve() for layer in manager.read_layers(job_args)[1]}:
        raise JobError(f"--write: given {name!r}; allowed: a file that the job is not read from; name another")
    try:
        is_plan = not path.exists() or (path.is_file() and path.open("rb").read(len(WRITTEN)) == WRITTEN.encode())
    except OSError as error:
        raise JobError(f"--write: given {name!r}; cannot be read ({error.strerror}); name another") from None
    if not is_plan:
        allowed = f"a new file, or one that starts with {WRITTEN!r}"
        raise JobError(f"--write: given {name!r}; allowed: {allowed}; name another, or remove it")


# Report


def report(question: PlanRequest, answer: PlanAnswer) -> list[str]:
    search, result, job = question.search, answer.result, answer.job
    best = result.plans[0]
    workload, hardware = search.workload, search.hardware
    shown = result.best[: question.options.top]
    name = " + ".join(search.base.config.job.config_file) or "the default job"
    evidence = search.calibration.evidence
    extrapolated = extrapolation(best, hardware, search.calibration)
    lines = [
        f"{name} on {question.gpus:,} x {hardware.title}, {format_bytes(question.limits.memory)}"
        + f"; step times extrapolated: {extrapolated}" * bool(extrapolated),
        f"step times: {evidence}; interval {interval(best.time.spread)}. Bubbles: simulated. "
        "Memory: formula, allocator's share fitted. No step of these plans was measured",
        f"every plan trains {search.samples:,} samples x {workload.seq_len:,} tokens a step, as the job does",
        *question.residuals,
        "",
        *["MFU is of the bfloat16 peak"] * (workload.dtype == "float8"),
        HEADER + "plan; passes x microbatches x rows",
        *(row(candidate, f"m{number}") + "; may fit" for number, candidate in enumerate(result.may_fit, start=1)),
        *(row(candidate, f"{number}") for number, candidate in enumerate(shown, start=1)),
    ]
    if result.may_fit:
        lines.append(
            f"m: may fit; a plan counts as fitting in {NEEDED:g} times its tensors, and published runs reserved "
            f"{RESERVED[0]:g} times or more; --rehearse counts the tensors, and a few steps on the GPU decide"
        )
    if isinstance(job, str):
        lines.append(f"job  {job}")
    else:
        lines += [row(job, "job"), f"the job's own plan {loss_of(job, best, question.limits.memory)}"]
    lines += ["", costs(best, question.cost), *failure_lines(best, question.cost), *answer.network]
    if answer.alternatives:
        lines += ["with the best plan for it:", *comparison(answer.alternatives, best, question.cost)]
    judged = f"{result.layouts:,} layouts, {len(result.judged):,} plans simulated"
    excluded = ", ".join(f"{key} {count:,}" for key, count in result.excluded.most_common(3))
    lines.append(f"searched {judged}" + f"; excluded by {excluded}" * bool(excluded))
    if search.base.config.training.enable_cpu_offload:
        lines.append(
            "copies to the host and the optimizer's step there (training.enable_cpu_offload) are not in the time"
        )
    if any(candidate.plan.overlap_experts for candidate in shown):
        lines.append("memory of plans with overlap: not described by the formula; --rehearse shows it")
    if not result.complete:
        lines.append("the search ended at its limit: a faster plan may exist")
    return [*lines, *run_lines(search, question.runs_to_measure(result))]


def write(question: PlanRequest, answer: PlanAnswer) -> None:
    """Write the best plan as a job that extends the given one, the picture, and the trace."""
    options, result = question.options, answer.result
    try:
        for path in filter(None, (options.write, options.plot)):
            path.parent.mkdir(parents=True, exist_ok=True)
        if options.write is not None:
            options.write.write_text(overlay(question, result.plans[0]), encoding="utf-8")
            if not options.json:
                print(f"written  {options.write}")
        if options.plot is not None:
            draw_plans(options.plot, answer, question.limits.memory, question.cost)
            if not options.json:
                print(f"picture  {options.plot}")
        if options.trace is not None:
            write_trace(options.trace, question.search.timer, result.plans[0].plan)
            if not options.json:
                print(f"trace    {options.trace}")
    except OSError as error:
        raise JobError(f"{error.filename}: cannot be written ({error.strerror}); give another name") from None


def overlay(question: PlanRequest, best: Candidate) -> str:
    """Return the TOML of the best plan: options that differ from the job's files, which it extends.

    If an option that the files set has to be unset, which no file can say, the whole job is written.
    """
    planned = question.search.job(best.plan).config
    files = [str(Path(file).resolve()) for file in planned.job.config_file]
    head = f"{WRITTEN}{best.plan}, predicted {figure(best.time.seconds, 3)} s a step, MFU {best.time.mfu:.1%}"
    head += "; may fit\n" if best.memory.needed > question.limits.memory else "\n"
    differing = differing_options(planned)
    if not files or None in differing.values():
        return head + manager.to_toml(planned)
    return head + tomli_w.dumps({"extends": files[0] if len(files) == 1 else files, **nest(differing)})
