"""`torchtitan sweep JOB --over KEY=VALUE,VALUE ...`: train a job once for each combination of some options' values.

    torchtitan sweep my_job.toml --over optimizer.lr=1e-4,3e-4,1e-3
    torchtitan sweep my_job.toml --over optimizer.lr=1e-4,3e-4 --over debug.seed=1,2 --workers 2 --ranks 4

KEY is an option of a job, or `model` with values FAMILY/FLAVOR. Each combination is a separate run, started by the
launcher, in a folder named after its values. --workers of them train at the same time; each gets its share of the GPUs
or CPU cores. All combinations are checked before the first one starts, and they share tokenized data.

The same command again completes a sweep that was interrupted: combinations that have ended well are left alone, others
resume from their own checkpoints, if they have any, and new values only add runs. A folder with runs of another job is
refused. At the end there is a table of all combinations, and a picture of their losses.
`bench --sweep` names combinations in the same way.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchtitan.commands.command_lines import parse_command
from torchtitan.config.changes import kind_of, saved_value
from torchtitan.config.job import JobConfig, as_dict
from torchtitan.config.manager import load, said_by, to_toml
from torchtitan.config.options import ConfigError, Fault, options, show
from torchtitan.core.errors import JobError, wrap_lines
from torchtitan.core.files import FileError, read_file
from torchtitan.launcher.processes import SignalQueue
from torchtitan.metrics.curves import EXTREME, read_thinned, smoothed_losses
from torchtitan.metrics.json_lines import METRICS, is_finite, lost_losses
from torchtitan.metrics.plot import draw_losses
from torchtitan.process.children import python_command
from torchtitan.process.ranks import count_ranks, likely_device
from torchtitan.rules import check
from torchtitan.rules.loading import load_job

MODEL = "model"
ERROR = "ERROR:"
"""How the message of a JobError begins in a log."""
MOST = 200
"""Combinations."""


def combinations(option: str, sweeps: list[str]) -> Iterator[dict[str, str]]:
    """Yield the combinations of the values of a repeated command-line option, as option of a job -> value.

    `sweeps`: texts like `training.seq_len=512,1024`. Raises JobError for one that is not an option with values.
    """
    axes: dict[str, list[str]] = {}
    for sweep in sweeps:
        key, equals, text = sweep.partition("=")
        values = split_values(text)
        if not equals or not all(values) or (key != MODEL and "." not in key):
            allowed = "section.key=VALUE,VALUE, or model=FAMILY/FLAVOR,FAMILY/FLAVOR"
            raise JobError(f"{option}: given {sweep!r}; allowed: {allowed}")
        if key in axes or len(set(values)) < len(values):
            raise JobError(f"{option}: given {sweep!r}; allowed: each option once, with values that differ")
        if key == MODEL and (malformed := [value for value in values if value.count("/") != 1]):
            raise JobError(
                f"{option}: given {MODEL}={malformed[0]}; allowed: FAMILY/FLAVOR, as `torchtitan list models` lists"
            )
        axes[key] = values
    for number, chosen in enumerate(itertools.product(*axes.values())):
        if number == MOST:
            raise JobError(f"{option}: given more than {MOST} combinations; allowed: as many; leave some values out")
        yield dict(zip(axes, chosen, strict=True))


def split_values(text: str) -> list[str]:
    """Split at the commas outside of brackets and quotes. A quote opens at the start of a value or within brackets."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and (depth or not values[-1].strip()):
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and depth <= 0:
            values.append("")
            continue
        values[-1] += character
    return [value.strip() for value in values]


def arguments_of(case: dict[str, str]) -> list[str]:
    job_args = []
    for key, value in case.items():
        family, _, flavor = value.partition("/")
        job_args += [f"--model.name={family}", f"--model.flavor={flavor}"] if key == MODEL else [f"--{key}={value}"]
    return job_args


def case_name(case: dict[str, str]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in case.items())


def checked_jobs(
    cases: list[dict[str, str]],
    job_args: list[str],
    ranks: int,
    adjust: Callable[[dict[str, str], JobConfig], tuple[JobConfig, Iterable[Fault]]],
    consequence: str,
) -> list[JobConfig]:
    """Return the job of each combination, as `adjust` changes it.

    Raises one JobError with the faults of all combinations, and `consequence` as its last line.
    """
    configs, faults = [], dict[str, str]()
    for case in cases:
        case_args = [*job_args, *arguments_of(case)]
        try:
            config, of_adjustment = adjust(case, load_job(case_args)[0])
            case_faults = [*of_adjustment, *check(config, ranks, likely_device(), said_by(case_args))]
            configs.append(config)
        except ConfigError as error:
            case_faults = error.faults
        faults |= {str(fault): case_name(case) for fault in reversed(case_faults) if str(fault) not in faults}
    if faults:
        lines = [f"{fault}" + f"  ({name})" * bool(name) for fault, name in faults.items()]
        raise JobError("\n".join([*lines, consequence]))
    return configs


def failure_reason(log: str, code: int | None) -> str:
    """Return the last error in a failed job's log up to its end, else the last line, or the exit code."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [number for number, line in enumerate(lines) if line.startswith(ERROR)]
    reason = " ".join(lines[errors[-1] if errors else -1 :])
    return wrap_lines(reason or f"exit code {code}")


RESULTS, PICTURE = "sweep.jsonl", "losses.png"
JOBS, LOGS = "jobs", "logs"
LOOK_SECONDS = 1.0
LARGEST_LOG = 2**30
LONGEST_NAME = 120
PER_RUN = ("job.dump_folder", "data.cache_dir")
"""Options that a sweep sets itself."""
Case = dict[str, str]


@dataclasses.dataclass
class SweepRun:
    """The run of one combination. `result`: "" until it has ended."""

    case: Case
    home: Path
    job: JobConfig
    result: str = ""
    process: subprocess.Popen | None = None
    slot: int = 0
    started: float = 0.0

    @property
    def name(self) -> str:
        return folder_name(self.case)

    @property
    def folder(self) -> Path:
        return self.home / self.name

    @property
    def log(self) -> Path:
        return self.home / LOGS / f"{self.name}.log"

    @property
    def job_file(self) -> Path:
        return self.home / JOBS / f"{self.name}.toml"


def main(argv: list[str]) -> int:
    arguments, job_args = parse_command("sweep", argv)
    if not arguments.over:
        raise JobError("torchtitan sweep: --over: not given; allowed: KEY=VALUE,VALUE, as optimizer.lr=1e-4,3e-4")
    cases = list(combinations("--over", arguments.over))
    home = arguments.to or Path(f"{Path(load_job([*job_args, *arguments_of(cases[0])])[0].job.dump_folder)}_sweep")
    if (home / METRICS).exists():
        raise JobError(f"{home}: the folder of a run; give another folder by --to; nothing was started")
    devices = visible_devices(arguments.workers * arguments.ranks)
    jobs = checked_jobs(
        cases, job_args, arguments.ranks, lambda case, job: run_of(case, job, home), "nothing was started"
    )
    runs = [SweepRun(case, home, job) for case, job in zip(cases, jobs, strict=True)]
    done = completed(home)
    if faults := [fault for run in runs if (fault := fault_of_folder(run, done))]:
        raise JobError("\n".join([*faults, "give another folder by --to; nothing was started"]))
    with writing(home):
        for folder in (home / JOBS, home / LOGS):
            folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        run.result = "ok" if run.name in done and run.job_file.exists() and (run.folder / METRICS).exists() else ""
    code = train_all(runs, home, arguments, devices)
    print("\n".join(table(runs)))
    labels = [(case_name(run.case), run.folder / METRICS) for run in runs if (run.folder / METRICS).exists()]
    with writing(home):
        drawn = draw_losses(labels, home / PICTURE)
    if drawn:
        print(f"losses drawn into {home / PICTURE}")
    return code


@contextmanager
def writing(home: Path) -> Iterator[None]:
    """Turn a failure to write a file of the sweep into a JobError."""
    try:
        yield
    except OSError as error:
        place = error.filename or home
        raise JobError(f"{place}: cannot be written ({error.strerror}); give another folder by --to") from None


def fault_of_folder(run: SweepRun, done: set[str]) -> str:
    """Return a line about the folder of a combination that another job has trained in; "" for other folders."""
    if not run.job_file.exists() or not (run.name in done or figures(run)):
        return ""
    try:
        before = as_dict(load(["--job.config_file", str(run.job_file)]))
    except ConfigError:
        return f"{run.folder}: trained by a job that cannot be read, {run.job_file}"
    now, differences = as_dict(run.job), []
    for key, option in options().items():
        values = [show(saved_value(job, key, option.default)) for job in (before, now)]
        if values[0] != values[1] and key not in PER_RUN and kind_of(key) != "quiet":
            differences.append(f"{key} {values[0]} there, {values[1]} now")
    return f"{run.folder}: trained by another job ({'; '.join(differences)})" if differences else ""


def run_of(case: Case, job: JobConfig, home: Path) -> tuple[JobConfig, Iterable[Fault]]:
    """Return the job of a combination in its folder, and the faults of options that a sweep sets itself."""
    allowed, remedy = "options that a sweep does not set itself", "--to names the folder of a sweep"
    faults = [Fault("", f"--over {key}", case[key], allowed, remedy) for key in PER_RUN if key in case]
    data = dataclasses.replace(job.data, cache_dir=job.data.cache_dir or str(home / "data"))
    place = dataclasses.replace(job.job, dump_folder=str(home / folder_name(case)))
    return dataclasses.replace(job, job=place, data=data), faults


def folder_name(case: Case) -> str:
    """Return a folder name that no other combination has, like `optimizer.lr=1e-4,debug.seed=1`."""
    exact = ",".join(f"{key}={value}" for key, value in case.items())
    name = re.sub(r"[^A-Za-z0-9.,=_+-]", "-", exact)[:LONGEST_NAME]
    return name if name == exact else f"{name}-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"


def visible_devices(ranks: int) -> list[str]:
    """Return the GPUs for all ranks that run at the same time; none on a CPU. Raises JobError if there are too few."""
    if likely_device() != "cuda":
        return []
    listed = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    devices = listed or [str(number) for number in range(count_ranks())]
    if ranks > len(devices):
        raise JobError(f"--workers times --ranks: given {ranks}; allowed: at most {len(devices)}, the GPUs here")
    return devices


def completed(home: Path) -> set[str]:
    """Return the folders of the runs that ended well the last time that they were started."""
    if not (home / RESULTS).exists():
        return set()
    codes = {}
    for line in read_file(home / RESULTS, LARGEST_LOG).splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # cut off by a crash
            continue
        if isinstance(row, dict):
            codes[str(row.get("folder"))] = row.get("exit_code")
    return {folder for folder, code in codes.items() if code == 0}


def train_all(runs: list[SweepRun], home: Path, arguments: argparse.Namespace, devices: list[str]) -> int:
    """Train the runs that have no result yet. Return 0 if all ended well, 1 if not, 128 + a stop signal's number."""
    pending = [run for run in runs if not run.result]
    count = f"{len(runs)} combination{'s' * (len(runs) > 1)}"
    print(f"{count} in {home}, {len(runs) - len(pending)} already done; logs in {home / LOGS}")
    active: list[SweepRun] = []
    queue, stop = SignalQueue(), 0
    try:
        while active or (pending and not stop):
            while pending and len(active) < arguments.workers and not stop:
                slot = min(set(range(arguments.workers)) - {run.slot for run in active})
                active.append(start(pending.pop(0), slot, arguments, devices))
            for number in queue.wait(LOOK_SECONDS):  # the launcher saves and stops; a second one ends it at once
                stop = number
                for run in active:
                    run.process.send_signal(number)
            for run in [run for run in active if run.process.poll() is not None]:
                active.remove(run)
                print(f"{case_name(run.case)}: {finish(run, home)}", flush=True)
    finally:
        queue.close()
        for run in active:
            run.process.kill()
    return 128 + stop if stop else int(any(run.result != "ok" for run in runs))


def start(run: SweepRun, slot: int, arguments: argparse.Namespace, devices: list[str]) -> SweepRun:
    """Start the launcher of a run, with its share of the machine. Its ranks end with it."""
    with writing(run.home):
        run.job_file.write_text(to_toml(run.job))
        log = run.log.open("ab")
    environment = dict(os.environ)
    if devices:
        devices_of_run = devices[slot * arguments.ranks : (slot + 1) * arguments.ranks]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices_of_run)
    elif arguments.workers > 1:
        threads = max(1, (os.cpu_count() or 1) // (arguments.workers * arguments.ranks))
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    job = ("--job.config_file", str(run.job_file))
    command = python_command("torchtitan.launch", str(arguments.ranks), *job, tied=True)
    with log:
        run.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that a Ctrl-C reaches it once, through this process
        )
    run.slot, run.started = slot, time.monotonic()
    return run


def finish(run: SweepRun, home: Path) -> str:
    """Record the end of a run in the sweep's results, and return its result."""
    code = run.process.returncode
    run.result = "ok"
    if code:
        reason = failure_reason(read_end(run.log), code).replace("another job.dump_folder", "another folder by --to")
        run.result = f"exit code {code}: {reason}"
    row = {"options": run.case, "folder": run.name, "exit_code": code}
    row |= {"seconds": round(time.monotonic() - run.started, 1)}
    with writing(home), (home / RESULTS).open("a") as file:
        file.write(json.dumps(row) + "\n")
    return run.result


def read_end(log: Path) -> str:
    try:
        return read_file(log, LARGEST_LOG).decode(errors="replace")
    except FileError as error:
        return str(error)


# Results


def table(runs: list[SweepRun]) -> Iterator[str]:
    """Yield the lines of a table of all runs.

    A star marks the best loss of the runs that ended well with a finite one, of the validation if all of these have it.
    """
    rows = [figures(run) for run in runs]
    ranked = [row for run, row in zip(runs, rows, strict=True) if run.result == "ok" and "loss" in row]
    key = "validation" if all("validation" in row for row in ranked) else "loss"
    best = [row for row in ranked if row[key] == min(other[key] for other in ranked)]
    names = list(runs[0].case)
    columns = [[name, *(run.case[name] for run in runs)] for name in names]
    for title, form in (("steps", ",d"), ("loss", ".4f"), ("validation", ".4f"), ("tokens/s", ",.0f")):
        cells = [format(row[title], form) if title in row else "-" for row in rows]
        if title == key and best:
            cells = [f"{cell}{'*' if row in best else ' '}" for cell, row in zip(cells, rows, strict=True)]
        columns.append([title, *cells])
    notes = [f", loss not finite since step {row['lost']}" if "lost" in row else "" for row in rows]
    results = [f"{run.result or 'not started'}{note}" for run, note in zip(runs, notes, strict=True)]
    columns.append(["result", *results])
    widths = [max(map(len, column)) for column in columns[:-1]]
    for *aligned, result in zip(*columns, strict=True):
        yield "  ".join([*(f"{cell:>{width}}" for cell, width in zip(aligned, widths, strict=True)), result])


def figures(run: SweepRun) -> dict[str, Any]:
    """Return the results that a run has logged: steps, smoothed loss at its end, last validation loss, tokens/s.

    In place of the loss of a run that ends without a finite one: "lost", the first step of those.
    """
    try:
        records = read_thinned(run.folder / METRICS, ("loss",))
    except (OSError, FileError):
        return {}
    steps = [record for record in records if "loss" in record]
    if not steps:
        return {}
    values: dict[str, Any] = {"steps": records[-1]["step"]}
    if is_finite(steps[-1]["loss"]):
        values["loss"] = smoothed_losses([record for record in steps if is_finite(record["loss"])])[-1]
    else:
        values["lost"] = lost_losses(steps)[-1]["step"]
    held_out = [record["validation_loss"] for record in records if is_finite(record.get("validation_loss"))]
    speeds = [record for record in steps if is_finite(record.get("tokens_per_second")) and EXTREME not in record]
    steady = [record for record in speeds if "marked" not in record] or speeds
    values |= {"validation": held_out[-1]} if held_out else {}
    return values | ({"tokens/s": statistics.median(r["tokens_per_second"] for r in steady)} if steady else {})
