"""`torchtitan why RUN`: what bounds a run's speed, from its own records, and what to change first.

The shares of time by cause are from the account of time that a run logs at every save and at its end, over all of its
starts. The bubble of a pipeline is simulated, as by `torchtitan schedule`. A gain is an upper bound: the time that a
cause takes. Causes that the records do not tell apart are listed as unknown.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.commands.command_lines import parse_command
from torchtitan.commands.schedule import ask
from torchtitan.config.job import JobConfig
from torchtitan.config.manager import load
from torchtitan.config.options import ConfigError
from torchtitan.core.errors import JobError
from torchtitan.launcher.run_folder import JOB_FILE
from torchtitan.metrics.console import duration
from torchtitan.metrics.goodput import CAUSES, SHORTEST_ADVISED_SECONDS
from torchtitan.metrics.json_lines import Record, is_finite, read_run

WORTH_A_CHANGE = 0.05
"""Smallest share of all time for which a cause is said to bound the run."""
SLOW = 1.5
"""A window counts as slow if its steps take this many times the median."""
FEW = 8
"""Fewest windows of steps to compare the times of."""


@dataclass(frozen=True)
class Cause:
    """A cause of time that is not training. `share`: of all time. `gain`: the part of it that the remedy can save."""

    name: str
    share: float
    gain: float
    remedy: str


def main(argv: list[str]) -> int:
    options, _ = parse_command("why", argv)
    records = read_run(options.run)
    config = job_of_file(options.run / JOB_FILE)
    print("\n".join(lines_of(options.run, records, config)))
    return 0


def job_of_file(path: Path) -> JobConfig | None:
    """Return the job in a file; None if it cannot be read."""
    try:
        return load(["--job.config_file", str(path)])
    except ConfigError:
        return None


def lines_of(run: Path, records: list[Record], config: JobConfig | None) -> Iterator[str]:
    seconds = account_of(records)
    total = sum(seconds.values())
    if not total:
        raise JobError(f"{run}: no account of its time and no times of steps in its metrics; let it log a few steps")
    causes = sorted(causes_of(seconds, records, config), key=lambda cause: -cause.gain)
    training = seconds.get("train", 0.0) / total
    yield f"{run}: {duration(total)} recorded, {100 * training:.1f} % of it training"
    for cause in causes:
        yield f"  {100 * cause.share:5.1f} %  {cause.name}"
    first = causes[0] if causes and causes[0].gain >= WORTH_A_CHANGE else None
    if first is None:
        yield f"bound by the steps themselves: no other cause takes {100 * WORTH_A_CHANGE:.0f} % of the time"
    else:
        yield f"bound by {first.name}; at most {1 / (1 - min(first.gain, 0.999)):.2f} times as fast without it"
        yield f"change first: {first.remedy}"
    for cause in causes[1:] if first else []:
        if cause.gain >= WORTH_A_CHANGE:
            yield f"then: {cause.remedy}"
    yield from (f"unknown: {text}" for text in unknowns(records, config))


def account_of(records: list[Record]) -> dict[str, float]:
    """Return the seconds by cause (metrics/goodput.py) that the run logged last, or else of its logged steps."""
    events = [record for record in records if record.get("event") == "goodput"]
    if events:
        values: dict[str, Any] = {cause: events[-1].get(f"{cause}_seconds") for cause in CAUSES}
        return {cause: value for cause, value in values.items() if is_finite(value)}
    seconds, last = {"train": 0.0, "data": 0.0}, 0
    for record in records:
        if is_finite(record.get("step_seconds")) and is_finite(record.get("data_seconds")):
            steps = max(0, record["step"] - last)
            last = record["step"]
            seconds["data"] += steps * record["data_seconds"]
            seconds["train"] += steps * (record["step_seconds"] - record["data_seconds"])
    return seconds


def causes_of(seconds: dict[str, float], records: list[Record], config: JobConfig | None) -> Iterator[Cause]:
    """Yield the causes of time besides training, and of time within training as far as the records show it."""
    total = sum(seconds.values())
    for cause, spent in seconds.items():
        if cause != "train" and spent >= 0.001 * total:
            yield Cause(CAUSES[cause], spent / total, spent / total, remedy_of(cause, records, config, total, spent))
    training = seconds.get("train", 0.0) / total
    times = [row["step_seconds"] for row in steady(records)]
    if len(times) >= FEW:
        median = statistics.median(times)
        slow = [time - median for time in times if time > SLOW * median]
        if slow:
            excess = training * sum(slow) / sum(times)
            name = f"slow steps within training: {len(slow)} of {len(times)} windows took {SLOW} times the median"
            remedy = "look for other programs on the machine, and set profiling.enable_profiling"
            yield Cause(name, excess, excess, remedy)
    if config is not None and config.parallelism.pipeline_parallel_degree > 1:
        yield bubble_of(config, training)


def steady(records: list[Record]) -> list[Record]:
    """Return the logged windows of steps without a save, a validation or a first step."""
    return [row for row in records if is_finite(row.get("step_seconds")) and "marked" not in row]


def bubble_of(config: JobConfig, training: float) -> Cause:
    """Return the idle time of the pipeline within training, simulated, and the gain of twice as many microbatches."""
    options, job = parse_command("schedule", ["--job.config_file", *config.job.config_file])
    question = ask(options, job)
    share = question.simulated(question.table()).bubble_share
    larger = dataclasses.replace(question, microbatches=2 * question.microbatches)
    better = larger.simulated(larger.table()).bubble_share
    gain = 1 - (1 - share) / (1 - better)
    count = f"{larger.microbatches} microbatches in place of {question.microbatches}"
    options_to_change = "training.local_batch_size or parallelism.pipeline_parallel_microbatch_size"
    remedy = f"{count}, by {options_to_change}; `torchtitan schedule` compares schedules"
    name = f"pipeline bubble within training, simulated for {question.name}"
    return Cause(name, training * share, training * gain, remedy)


def remedy_of(cause: str, records: list[Record], config: JobConfig | None, total: float, spent: float) -> str:
    """Return what to change about the time of a cause (metrics/goodput.py)."""
    if cause == "data":
        workers = "" if config is None else f" (now {config.training.dataloader.num_workers})"
        return f"more training.dataloader.num_workers{workers}, or tokenize once with `torchtitan prepare`"
    if cause == "save":
        return save_remedy(records, config, total, spent)
    if cause in ("restart", "redone"):
        reasons = sorted({str(record.get("cause")) for record in records if record.get("event") == "restart"})
        shown = f" ({'; '.join(reasons[:3])})" if reasons else ""
        return f"remove the reason of the restarts{shown}; a shorter checkpoint.interval loses fewer steps"
    return {
        "validation": "a longer validation.freq, or fewer validation.samples",
        "compile": "a longer run; without compile.enable the first step is shorter and the others are longer",
        "start": "a longer run; `torchtitan prepare` tokenizes before it",
        "end": "nothing, unless the last save or the exports are slow: see checkpoint.async_mode",
    }[cause]


def save_remedy(records: list[Record], config: JobConfig | None, total: float, spent: float) -> str:
    """Return what to change about saves: their mode, and in a run of an hour their interval (Young and Daly)."""
    saves = max(1, sum(record.get("event") == "goodput" for record in records))
    failures = sum(record.get("event") == "restart" for record in records)
    advice = []
    if config is None or config.checkpoint.async_mode == "disabled":
        advice.append('checkpoint.async_mode = "async"')
    if total >= SHORTEST_ADVISED_SECONDS and failures:
        best = math.sqrt(2 * total / failures * spent / saves)
        advice.append(f"a checkpoint.interval of about {duration(best)}, by the {failures} failures of the run")
    elif total >= SHORTEST_ADVISED_SECONDS:
        advice.append("a longer checkpoint.interval, as the run did not fail")
    return "; ".join(advice) or "a longer checkpoint.interval"


def unknowns(records: list[Record], config: JobConfig | None) -> Iterator[str]:
    """Yield the causes that the records cannot tell apart."""
    rows = [row for row in steady(records) if is_finite(row.get("mfu_full"))]
    if rows:
        mfu = statistics.median(row["mfu_full"] for row in rows)
        yield f"the parts of the steps that are not at the device's peak (MFU {100 * mfu:.1f} %)"
    yield "host time, kernels and exposed communication within a step: set profiling.enable_profiling for some steps"
    yield "a rank slower than the others: times are the first rank's"
    if not any(record.get("event") == "goodput" for record in records):
        yield "starts, saves and restarts: the run has neither saved nor ended, and logs its account of time then"
    if config is None:
        yield f"the options of the job: no {JOB_FILE} that can be read"
