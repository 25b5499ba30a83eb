"""`torchtitan bench JOB --sweep KEY=VALUE,VALUE ...`: measure the speed and memory of a job's training steps.

    torchtitan bench sft_qlora.toml --sweep training.seq_len=2048,4096 --sweep adapter.rank=16,64
    torchtitan bench --hardware ours.toml --ranks 8

KEY is an option of a job, or `model` with values FAMILY/FLAVOR. Every combination of the values runs in separate
processes, so a failure does not affect the others. It trains one warm-up step and --steps measured steps on the job's
data, from initial weights, without saving or validating. All combinations are checked before the first one starts.
--plot draws a bar for each combination's speed and memory, or names its failure. --hardware measures this machine
instead of a job.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from torchtitan.adapters import NONE
from torchtitan.commands.command_lines import parse_command
from torchtitan.commands.sweep import MODEL, checked_jobs, combinations, failure_reason
from torchtitan.config.job import JobConfig
from torchtitan.config.manager import to_toml
from torchtitan.config.options import Fault, free_table
from torchtitan.config.sections.model import Relora
from torchtitan.config.sections.run import Callbacks, Checkpoint, EarlyStop, Guard, Metrics, Profiling
from torchtitan.config.sections.training import LRScheduler, Training, Validation
from torchtitan.core.errors import JobError
from torchtitan.core.hardware import Hardware
from torchtitan.core.progress_bar import waiting
from torchtitan.job import ResolvedJob
from torchtitan.metrics.json_lines import METRICS, read_records
from torchtitan.metrics.plot import GREY, HELD_OUT, INK, LOSS, SPEED, STYLE, check_format
from torchtitan.planner.time.measured_hardware import write_hardware
from torchtitan.process.children import python_command
from torchtitan.process.exit import OUT_OF_MEMORY, REFUSED, exiting_on_stop_signals

BAR = 0.32
"""Inches, of a row."""


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot the result rows of `torchtitan bench` to `path`. Raises OSError if the file cannot be written."""
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
        for panel, (key, title, color, number_format) in zip(axes, panels, strict=True):
            panel.barh(range(len(rows)), [row.get(key, 0) for row in rows], color=color, height=0.7)
            panel.set_title(title, loc="left", fontweight="bold")
            panel.grid(visible=False, axis="y")
            for index, row in enumerate(rows):
                label, ink = (format(row[key], number_format), INK) if key in row else (row["result"], HELD_OUT)
                panel.annotate(
                    label, (row.get(key, 0), index), (4, 0), textcoords="offset points", va="center", color=ink
                )
            panel.margins(x=0.18)
        axes[0].set_yticks(range(len(rows)), [name or "the job" for name in names], color=GREY)
        axes[0].invert_yaxis()
        dated: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix.lower() == ".svg" else {}
        figure.savefig(path, facecolor="white", **dated)


OF_THE_RUN = "job."
"""Prefix of options on the run's name and folder, which bench sets itself for each combination."""
KILLED = (-9, 128 + 9)
Row = dict[str, Any]


def main(argv: list[str]) -> int:
    options, job_args = parse_command("bench", argv)
    if options.hardware is not None:
        if job_args or options.sweep or options.plot:
            raise JobError("--hardware: allowed without a job, --sweep and --plot; it measures this machine, not a job")
        with waiting("products, attention, copies and messages are measured"):
            hardware = write_hardware(options.hardware, options.ranks)
        print(describe_hardware(hardware), f"written to {options.hardware}", sep="\n")
        return 0
    if options.plot:
        check_format(Path(options.plot))
    cases = list(combinations("--sweep", options.sweep))
    jobs = list(map(BenchCase, cases, checked_configs(cases, job_args, options)))
    try:
        with Path(options.out).open("a") as file, exiting_on_stop_signals():
            rows = [append_row(file, row) for row in measure(jobs, options)]
        if options.plot:
            draw(rows, Path(options.plot))
    except OSError as error:
        raise JobError(f"{error.filename}: cannot be written ({error.strerror}); give another name") from None
    return 0 if any(row["result"] == "ok" for row in rows) else 1


def describe_hardware(hardware: Hardware) -> str:
    rates = f"{hardware.peak.bfloat16 / 1e9:,.0f} GFLOP/s in bfloat16, {hardware.peak.float32 / 1e9:,.0f} in float32"
    link = hardware.machine_link
    messages = f"{link.bandwidth / 1e9:,.1f} GB/s between ranks and {link.latency * 1e6:,.0f} us a hop"
    return f"{rates}; {hardware.memory_bandwidth / 1e9:,.0f} GB/s of memory; {messages}, {link.evidence}"


def checked_configs(cases: list[dict[str, str]], job_args: list[str], options: argparse.Namespace) -> list[JobConfig]:
    """Return the job to measure for each combination. Raises one JobError with the faults of all combinations."""
    adjust = partial(measured_job, options=options)
    return checked_jobs(cases, job_args, options.ranks, adjust, "nothing was measured")


def measured_job(
    case: dict[str, str], job: JobConfig, options: argparse.Namespace
) -> tuple[JobConfig, Iterable[Fault]]:
    """Return the job to measure for a combination, and a fault for each swept option that bench overrides or that does
    not affect a step.
    """
    config, faults = only_steps(job, options.steps), []
    for key, value in case.items():
        option = attrgetter(free_table(key) or key)
        if key.startswith(OF_THE_RUN) or (key != MODEL and option(job) != option(config)):
            allowed, remedy = (
                "options that affect the computation of a step",
                "bench sets this option to the same value in all combinations",
            )
            faults.append(Fault("", f"--sweep {key}", value, allowed, remedy))
    return config, faults


def only_steps(config: JobConfig, steps: int) -> JobConfig:
    """Return the job that is measured: the same computation per step, without saving, validation and plots."""
    save: Literal["whole"] | None = None if config.adapter.kind == NONE else "whole"
    changes = {
        "job.clean_start": "never",  # the folder is new
        "adapter.save": save,
        "adapter.initial_path": None,
        "adapter.last_save_in_peft": False,
        "training.steps": steps + 1,
        "training.epochs": None,
        "training.tokens": None,
        "validation": Validation(),
        "early_stop": EarlyStop(),
        "callbacks": Callbacks(),
        "guard": Guard(),
        "checkpoint": Checkpoint(),
        "lr_scheduler": schedule_of(config.lr_scheduler, config.adapter.relora, config.training.steps),
        "metrics": Metrics(log_freq=1, plot=False, disable_color_printing=True),
        "profiling": Profiling(),
    }
    return ResolvedJob(config).with_options(changes).config


def schedule_of(scheduler: LRScheduler, relora: Relora, steps: int) -> LRScheduler:
    """Return the default LR schedule, or the job's if its adapter restarts (ReLoRA), as the schedule restarts with it.

    The job's schedule keeps its full length, because the few measured steps have no room for its restarts.
    """
    if relora.every is None:
        return LRScheduler()
    warmup = None if isinstance(scheduler.warmup_steps, str) else scheduler.warmup_steps  # no epoch is measured
    length = scheduler.total_steps or min(steps, Training().steps)
    return dataclasses.replace(scheduler, total_steps=length, t_max=None, t_max_unit="epoch", warmup_steps=warmup)


@dataclasses.dataclass(frozen=True)
class BenchCase:
    """A combination of options, and its job."""

    case: dict[str, str]
    config: JobConfig

    def row(self, home: Path, number: int, options: argparse.Namespace) -> Row:
        """Train in a new folder and return the result. Combinations share tokenized data."""
        config, folder = self.config, home / str(number)
        folder.mkdir()
        file, log = folder / "job.toml", folder / "log"
        cache = config.data.cache_dir or str(home / "data")
        in_folder = ResolvedJob(config).with_options({"job.dump_folder": str(folder), "data.cache_dir": cache})
        file.write_text(to_toml(in_folder.config))
        command = python_command("torchtitan.launch", str(options.ranks), "--job.config_file", str(file), tied=True)
        with log.open("wb") as log_file:
            code = exit_code_of(command, log_file, options.timeout)
        result = outcome_of(code, folder, options.steps)
        if result["result"] == "failed":
            result["reason"] = failure_reason(log.read_text(errors="replace"), code)
        sizes = {"seq_len": config.training.seq_len, "local_batch_size": config.training.local_batch_size}
        model = {"model": f"{config.model.name}/{config.model.flavor}", **sizes, "exit_code": code}
        return {"options": self.case, "ranks": options.ranks, **model, **result}


def measure(jobs: list[BenchCase], options: argparse.Namespace) -> Iterator[Row]:
    """Measure each combination; print and yield its result row."""
    cases = [job.case for job in jobs]
    widths = {key: max(len(key), *(len(case[key]) for case in cases)) for key in cases[0]}
    heads = [f"{key:>{width}}" for key, width in widths.items()]
    print("  ".join([*heads, f"{'tokens/s':>10}", f"{'s/step':>8}", f"{'GiB':>7}", "result"]), flush=True)
    with tempfile.TemporaryDirectory(prefix="torchtitan-") as home:
        for number, job in enumerate(jobs):
            with waiting(f"{number + 1} of {len(jobs)}"):
                row = job.row(Path(home), number, options)
            values = [f"{job.case[key]:>{width}}" for key, width in widths.items()]
            print("  ".join([*values, figures(row)]), flush=True)
            yield row


def figures(row: Row) -> str:
    if row["result"] == "ok":
        return f"{row['tokens_per_second']:>10,.0f}  {row['step_seconds']:>8.3f}  {row['memory_gib']:>7.2f}  ok"
    result = row["result"] + (f": {row['reason']}" if "reason" in row else "")
    return f"{'-':>10}  {'-':>8}  {'-':>7}  {result}"


def exit_code_of(command: list[str], log: Any, seconds: float) -> int | None:
    """Run the job's launcher and return its exit code, or None after `seconds`. Its ranks end with it."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.kill()
        process.wait()


def outcome_of(code: int | None, folder: Path, steps: int) -> Row:
    """Return the run's result: the medians after the first step and the first rank's peak memory, or the failure."""
    if code is None:
        return {"result": "too slow", "reason": "stopped by --timeout"}
    if code == OUT_OF_MEMORY or code in KILLED:
        return {"result": "out of memory"} | ({} if code == OUT_OF_MEMORY else {"reason": "killed, as by the system"})
    rows = [row for row in read_records(folder / METRICS) if "loss" in row] if code == 0 else []
    if len(rows) != steps + 1:
        return {"result": "refused" if code == REFUSED else "failed"}
    medians = {key: statistics.median(row[key] for row in rows[1:]) for key in ("tokens_per_second", "step_seconds")}
    return {"result": "ok", **medians, "memory_gib": max(row["memory_gib"] for row in rows)}


def append_row(file: Any, row: Row) -> Row:
    print(json.dumps(row | {"at": round(time.time())}), file=file, flush=True)
    return row
