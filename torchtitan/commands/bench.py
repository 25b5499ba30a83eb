"""The picture of a sweep: a bar for each combination's speed and memory; those that failed say so.

`torchtitan bench JOB --sweep KEY=VALUE,VALUE ...`: how fast a job's steps are and what memory they take, measured
for every combination of the values, each in processes of its own, so that one that fails leaves the others.

    torchtitan bench sft_qlora.toml --sweep training.seq_len=2048,4096 --sweep adapter.rank=16,64

KEY is an option of a job, or `model`, whose values are family/flavor. A combination trains a step that is not counted
and as many as --steps says, on the job's data, from initial weights, without saving or validating. All combinations are
judged before the first one starts.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from torchtitan.adapters import NONE
from torchtitan.commands.command_lines import parse_command
from torchtitan.config.job import JobConfig
from torchtitan.config.manager import load, said_by, to_toml
from torchtitan.config.options import ConfigError, Fault, free_table
from torchtitan.config.sections.checkpoint import Checkpoint
from torchtitan.config.sections.optimization import LRScheduler
from torchtitan.config.sections.run import EarlyStop, Guard, Metrics, Profiling
from torchtitan.config.sections.training import Training, Validation
from torchtitan.core.errors import JobError, folded
from torchtitan.core.progress_bar import waiting
from torchtitan.metrics.json_lines import read_records
from torchtitan.metrics.plot import GREY, HELD_OUT, INK, LOSS, SPEED, STYLE, check_format
from torchtitan.process.exit import OUT_OF_MEMORY, REFUSED
from torchtitan.process.ranks import likely_device
from torchtitan.rules import check

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


MODEL = "model"
MOST = 200
"""Combinations."""
OF_THE_RUN = "job."
"""Options of what a run is called and where it lies: each combination has its own folder."""
KILLED = (-9, 128 + 9)
Row = dict[str, Any]


def main(argv: list[str]) -> int:
    options, words = parse_command("bench", argv)
    if options.plot:
        check_format(Path(options.plot))
    cases = list(combinations(options.sweep))
    configs = judged(cases, words, options)
    try:
        with Path(options.out).open("a") as file:
            rows = [file_row(file, row) for row in measured(cases, configs, options)]
        if options.plot:
            draw(rows, Path(options.plot))
    except OSError as error:
        raise JobError(f"{error.filename}: cannot be written ({error.strerror}); give another name") from None
    return 0 if any(row["result"] == "ok" for row in rows) else 1


def combinations(sweeps: list[str]) -> Iterator[dict[str, str]]:
    """Of the values of each --sweep: option -> value. JobError for what is no option with values."""
    axes: dict[str, list[str]] = {}
    for sweep in sweeps:
        key, equals, text = sweep.partition("=")
        values = [value.strip() for value in text.split(",")]
        if not equals or not all(values) or (key != MODEL and "." not in key):
            allowed = "section.key=VALUE,VALUE, or model=FAMILY/FLAVOR,FAMILY/FLAVOR"
            raise JobError(f"--sweep: given {sweep!r}; allowed: {allowed}")
        if key in axes or len(set(values)) < len(values):
            raise JobError(f"--sweep: given {sweep!r}; allowed: each option once, with values that differ")
        if key == MODEL and (wrong := [value for value in values if value.count("/") != 1]):
            raise JobError(
                f"--sweep: given {MODEL}={wrong[0]}; allowed: FAMILY/FLAVOR, as `torchtitan list models` says"
            )
        axes[key] = values
    for number, chosen in enumerate(itertools.product(*axes.values())):
        if number == MOST:
            raise JobError(f"--sweep: given more than {MOST} combinations; allowed: as many; leave some values out")
        yield dict(zip(axes, chosen, strict=True))


def judged(cases: list[dict[str, str]], words: list[str], options: argparse.Namespace) -> list[JobConfig]:
    """The job of each combination. JobError with all that is wrong with any of them."""
    configs, faults = [], dict[str, str]()
    for case in cases:
        said = [*words, *words_of(case)]
        try:
            job = load(said)
            config = only_steps(job, options.steps)
            wrong = [*left_out(case, job, config), *check(config, options.ranks, likely_device(), said_by(said))]
            configs.append(config)
        except ConfigError as error:
            wrong = error.faults
        faults |= {str(fault): named(case) for fault in reversed(wrong) if str(fault) not in faults}
    if faults:
        lines = [f"{fault}" + f"  ({name})" * bool(name) for fault, name in faults.items()]
        raise JobError("\n".join([*lines, "nothing was measured"]))
    return configs


def words_of(case: dict[str, str]) -> list[str]:
    words = []
    for key, value in case.items():
        family, _, flavor = value.partition("/")
        words += [f"--model.name={family}", f"--model.flavor={flavor}"] if key == MODEL else [f"--{key}={value}"]
    return words


def left_out(case: dict[str, str], job: JobConfig, config: JobConfig) -> Iterator[Fault]:
    """Options that are swept though the measured job has another value of them, or its steps do not ask them."""
    for key, value in case.items():
        option = attrgetter(free_table(key) or key)
        if key.startswith(OF_THE_RUN) or (key != MODEL and option(job) != option(config)):
            allowed, remedy = "options of what a step computes", "what a measured job leaves out is the same in all"
            yield Fault("", f"--sweep {key}", value, allowed, remedy)


def named(case: dict[str, str]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in case.items())


def only_steps(config: JobConfig, steps: int) -> JobConfig:
    """The job as it is measured: what is computed in a step is the job's, what is read, written and shown beside it is
    left out."""
    save: Literal["whole"] | None = None if config.adapter.kind == NONE else "whole"
    adapter = dataclasses.replace(config.adapter, save=save, initial_path=None, last_save_in_peft=False)
    training = dataclasses.replace(config.training, steps=steps + 1, epochs=None, tokens=None)
    job = dataclasses.replace(config.job, clean_start="never")  # in a folder of its own
    return dataclasses.replace(
        config,
        job=job,
        adapter=adapter,
        training=training,
        validation=Validation(),
        early_stop=EarlyStop(),
        guard=Guard(),
        checkpoint=Checkpoint(),
        lr_scheduler=schedule_of(config),
        metrics=Metrics(log_freq=1, plot=False, disable_color_printing=True),
        profiling=Profiling(),
    )


def schedule_of(config: JobConfig) -> LRScheduler:
    """The usual one, whose shape costs nothing; where an adapter begins anew, the job's, which comes back with it. That
    is as long as the job's steps, or the few that are measured would have no room for its restarts."""
    given = config.lr_scheduler
    if config.adapter.relora.every is None:
        return LRScheduler()
    warmup = None if isinstance(given.warmup_steps, str) else given.warmup_steps  # no epoch is measured
    length = given.total_steps or min(config.training.steps, Training().steps)
    return dataclasses.replace(given, total_steps=length, t_max=None, t_max_unit="epoch", warmup_steps=warmup)


def measured(cases: list[dict[str, str]], configs: list[JobConfig], options: argparse.Namespace) -> Iterator[Row]:
    """A row for each, which is shown as soon as it is there."""
    widths = {key: max(len(key), *(len(case[key]) for case in cases)) for key in cases[0]}
    heads = [f"{key:>{width}}" for key, width in widths.items()]
    print("  ".join([*heads, f"{'tokens/s':>10}", f"{'s/step':>8}", f"{'GiB':>7}", "result"]), flush=True)
    with tempfile.TemporaryDirectory(prefix="torchtitan-") as home:
        for number, (case, config) in enumerate(zip(cases, configs, strict=True)):
            with waiting(f"{number + 1} of {len(cases)}"):
                row = {"options": case, "ranks": options.ranks, **result_of(config, Path(home), number, options)}
            values = [f"{case[key]:>{width}}" for key, width in widths.items()]
            print("  ".join([*values, figures(row)]), flush=True)
            yield row


def figures(row: Row) -> str:
    if row["result"] == "ok":
        return f"{row['tokens_per_second']:>10,.0f}  {row['step_seconds']:>8.3f}  {row['memory_gib']:>7.2f}  ok"
    told = row["result"] + (f": {row['reason']}" if "reason" in row else "")
    return f"{'-':>10}  {'-':>8}  {'-':>7}  {told}"


def result_of(config: JobConfig, home: Path, number: int, options: argparse.Namespace) -> Row:
    """Trains it, in a folder of its own; what has been tokenized is used again."""
    folder = home / str(number)
    data = dataclasses.replace(config.data, cache_dir=config.data.cache_dir or str(home / "data"))
    job = dataclasses.replace(config.job, dump_folder=str(folder))
    folder.mkdir()
    file, log = folder / "job.toml", folder / "log"
    file.write_text(to_toml(dataclasses.replace(config, job=job, data=data)))
    words = [sys.executable, "-m", "torchtitan.launch", str(options.ranks), "--job.config_file", str(file)]
    with log.open("wb") as said:
        code = code_of(words, said, options.timeout)
    told = told_by(code, folder, options.steps)
    if told["result"] == "failed":
        last = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        told["reason"] = folded(last[-1] if last else f"exit code {code}")
    model = {"model": f"{config.model.name}/{config.model.flavor}", "seq_len": config.training.seq_len}
    return model | {"local_batch_size": config.training.local_batch_size, "exit_code": code, **told}


def code_of(words: list[str], log: Any, seconds: float) -> int | None:
    """The exit code of the job's launcher, with which its ranks end however it ends; None after `seconds`."""
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.kill()
        process.wait()


def told_by(code: int | None, folder: Path, steps: int) -> Row:
    """The median of the steps behind the first, and the most memory that the first rank had."""
    if code is None:
        return {"result": "too slow", "reason": "stopped by --timeout"}
    if code == OUT_OF_MEMORY or code in KILLED:
        return {"result": "out of memory"} | ({} if code == OUT_OF_MEMORY else {"reason": "killed, as by the system"})
    rows = [row for row in read_records(folder / "metrics.jsonl") if "loss" in row] if code == 0 else []
    if len(rows) != steps + 1:
        return {"result": "refused" if code == REFUSED else "failed"}
    found = {key: statistics.median(row[key] for row in rows[1:]) for key in ("tokens_per_second", "step_seconds")}
    return {"result": "ok", **found, "memory_gib": max(row["memory_gib"] for row in rows)}


def file_row(file: Any, row: Row) -> Row:
    print(json.dumps(row | {"at": round(time.time())}), file=file, flush=True)
    return row
