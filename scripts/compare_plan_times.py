"""Rank plans by predicted and by measured time on this machine's CPU, and write the result into docs/planning.md.

    python scripts/compare_plan_times.py [--folder outputs/plan_times] [--rounds 1] [--write] [--quick]

Measures the hardware as `torchtitan bench --hardware` does, trains one job for some steps under eleven plans as a user
would, calibrates the planner on three of them as `torchtitan plan --from` does, and predicts the other eight. Prints
Kendall's tau of predicted and measured order, how much slower the predicted winner is than the fastest plan, the pairs
that are predicted in the wrong order, and the share of the cores that other programs took: the order means little if
that is more than a few percent.

A round takes about 8 minutes on two idle cores. With --rounds each plan is trained once in every round, so that what
else the machine does falls on all of them, and its seconds are the median of the rounds. --folder keeps what was
measured: a second call measures only what is missing, such as further rounds.
"""

import argparse
import itertools
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import NamedTuple

from bench_timing import ROOT
from bench_trainer import arguments, write_shards

from torchtitan.commands.command_parser import whole_number
from torchtitan.core.hardware import Hardware, load_hardware
from torchtitan.metrics.json_lines import METRICS, read_records
from torchtitan.planner.search import PipelineTimer
from torchtitan.planner.time.measured_hardware import write_hardware
from torchtitan.planner.time.measured_runs import MeasuredRun, calibrate, usual_calibration
from torchtitan.planner.time.step_time import StepTimer
from torchtitan.process.exit import exit_with

PAGE = ROOT / "docs/planning.md"
BEGIN, END = "<!-- plan times -->", "<!-- /plan times -->"
SAMPLES = 8
"""Samples of a step under every plan."""
SHAPE = "{dim=512, n_layers=8, n_heads=8, n_kv_heads=8, vocab_size=8192}"
QUICK_SHAPE = "{dim=32, n_layers=4, n_heads=4, n_kv_heads=4, vocab_size=512}"
RANKS = 2
"""Ranks that measure the hardware."""
OTHERS = "other_programs.txt"
"""File of a run's folder: the share of the cores that other programs took meanwhile."""


def options(**degrees: object) -> dict[str, object]:
    """Return options of [parallelism]; "shards" is short for the number of shards, which every plan sets."""
    shards = {"data_parallel_shard_degree": degrees.pop("shards", 1)}
    return {f"parallelism__{name}": value for name, value in (shards | degrees).items()}


def pipeline(schedule: str, microbatches: int, shards: int = 1) -> dict[str, object]:
    size = SAMPLES // shards // microbatches
    return options(
        shards=shards,
        pipeline_parallel_degree=2,
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_microbatch_size=size,
    )


FULL = {"activation_checkpoint__mode": "full"}
SELECTIVE = {"activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op"}
FSDP, TP = options(shards=2), options(tensor_parallel_degree=2)
CALIBRATED: dict[str, tuple[int, dict[str, object]]] = {
    "FSDP 2": (2, FSDP),
    "TP 2, selective recompute": (2, TP | SELECTIVE),
    "PP 2 1F1B, 4 microbatches": (2, pipeline("1F1B", 4)),
}
"""Number of ranks and options of the plans that calibrate."""
PREDICTED: dict[str, tuple[int, dict[str, object]]] = {
    "FSDP 2, full recompute": (2, FSDP | FULL),
    "FSDP 2, 4 passes": (2, FSDP | {"training__local_batch_size": 1}),
    "2 replicas": (2, options(data_parallel_replicate_degree=2)),
    "TP 2, full recompute": (2, TP | FULL),
    "CP 2": (2, options(context_parallel_degree=2)),
    "PP 2 GPipe, 2 microbatches": (2, pipeline("GPipe", 2)),
    "PP 2 ZBVZeroBubble, 8 microbatches": (2, pipeline("ZBVZeroBubble", 8)),
    "FSDP 2, TP 2": (4, FSDP | {"parallelism__tensor_parallel_degree": 2}),
}
PLANS = CALIBRATED | PREDICTED


class Row(NamedTuple):
    """A plan that was predicted, and measured. Seconds of a step."""

    name: str
    measured: float
    predicted: float


def name_of_folder(name: str, number: int = 1) -> str:
    """Return the name of the folder of a plan's run in a round."""
    return name.replace(",", "").replace(" ", "-") + f"-round-{number}" * (number > 1)


def job_of(name: str, folder: Path, quick: bool, number: int = 1) -> tuple[int, list[str], int]:
    """Return the number of ranks, the job of a plan, and its steps."""
    ranks, changes = PLANS[name]
    steps = 4 if quick else 8
    data_parallel = int(str(changes["parallelism__data_parallel_shard_degree"]))
    data_parallel *= int(str(changes.get("parallelism__data_parallel_replicate_degree", 1)))
    settings: dict[str, object] = {
        "job__dump_folder": folder / name_of_folder(name, number),
        "model__overrides": QUICK_SHAPE if quick else SHAPE,
        "training__seq_len": 32 if quick else 256,
        "training__steps": steps,
        "training__global_batch_size": SAMPLES,
        "training__local_batch_size": SAMPLES // data_parallel,
        "metrics__log_freq": 1,
    }
    return ranks, arguments(folder, **(settings | changes)), steps


def complete(run: Path, steps: int) -> bool:
    """Return whether a run has logged this number of steps, and what other programs took meanwhile."""
    if not ((run / METRICS).exists() and (run / OTHERS).exists()):
        return False
    return sum("step_seconds" in record for record in read_records(run / METRICS)) >= steps


def core_seconds() -> tuple[float, float]:
    """Return the seconds that all cores have worked since the machine started, and those for children of this process
    that have ended.
    """
    of_all = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    user, nice, system, _idle, _wait, interrupts, soft, stolen, *_ = map(int, of_all)
    busy = (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return busy, children.ru_utime + children.ru_stime


def measure(name: str, folder: Path, quick: bool, number: int = 1) -> Path:
    """Train the job under a plan, unless the folder has a complete run of it, and return the run's folder."""
    ranks, job, steps = job_of(name, folder, quick, number)
    run = folder / name_of_folder(name, number)
    if not complete(run, steps):
        shutil.rmtree(run, ignore_errors=True)
        print(f"{name}: {steps} steps on {ranks} ranks", flush=True)
        command = [sys.executable, "-m", "torchtitan.launch", str(ranks), *job]
        started, before = time.monotonic(), core_seconds()
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if ended.returncode:
            raise SystemExit(f"{name} ended with {ended.returncode}:\n{ended.stderr}")
        busy, ours = (after - earlier for after, earlier in zip(core_seconds(), before, strict=True))
        others = (busy - ours) / (time.monotonic() - started) / (os.cpu_count() or 1)
        (run / OTHERS).write_text(f"{max(others, 0.0):.3f}\n")
    return run


def predict(runs: Mapping[str, Sequence[Path]], hardware: Hardware) -> tuple[list[Row], list[str]]:
    """Calibrate with the runs of CALIBRATED, and return a row for each plan and the residuals of the calibration.

    `runs`: the folders of all rounds by plan.
    """
    calibrating = [folder for name, folders in runs.items() if name in CALIBRATED for folder in folders]
    calibration, residuals = calibrate(calibrating, hardware, usual_calibration(hardware))
    rows = []
    for name, folders in runs.items():
        rounds = [MeasuredRun(folder) for folder in folders]
        timer = PipelineTimer(StepTimer(rounds[0].workload, hardware, calibration))
        seconds = statistics.median(run.seconds for run in rounds)
        rows.append(Row(name, seconds, timer.step_time(rounds[0].plan).seconds))
    return rows, residuals


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Kendall's tau: concordant minus discordant pairs, relative to all pairs."""
    signs = [
        (a[0] > b[0]) - (a[0] < b[0]) if a[1] > b[1] else (a[0] < b[0]) - (a[0] > b[0]) if a[1] < b[1] else 0
        for a, b in itertools.combinations(pairs, 2)
    ]
    return sum(signs) / len(signs)


def winner_gap(rows: Sequence[Row]) -> float:
    """Return how much longer the plan that is predicted to be the fastest takes than the fastest one."""
    winner = min(rows, key=lambda row: row.predicted)
    return winner.measured / min(row.measured for row in rows) - 1


def wrong_pairs(rows: Sequence[Row]) -> list[str]:
    """Return a line for each pair that is predicted in the wrong order, with how far apart it is measured."""
    slower = sorted(rows, key=lambda row: row.measured)
    return [
        f"in the wrong order: {b.name} takes {b.measured / a.measured - 1:.1%} longer than {a.name}"
        for a, b in itertools.combinations(slower, 2)
        if a.predicted > b.predicted
    ]


def predicted_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of plans that did not calibrate."""
    return [row for row in rows if row.name in PREDICTED]


def summary(rows: Sequence[Row]) -> str:
    """Return the result of the plans that did not calibrate, or that none was measured."""
    predicted = predicted_rows(rows)
    if not predicted:
        return "Not measured yet."
    tau = kendall([(row.measured, row.predicted) for row in predicted])
    return (
        f"{len(predicted)} plans without their own measurement: Kendall's tau {tau:.2f}; the predicted winner takes "
        f"{winner_gap(predicted):.1%} longer than the fastest."
    )


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table in docs/planning.md, and their summary."""
    lines = ["| plan | measured s/step | predicted | error |", "|---|---|---|---|"] if rows else []
    for row in rows:
        name = f"{row.name} (calibrates)" if row.name in CALIBRATED else row.name
        lines.append(f"| {name} | {row.measured:.3f} | {row.predicted:.3f} | {row.predicted / row.measured - 1:+.1%} |")
    return [*lines, *[""] * bool(rows), summary(rows)]


def write_page(lines: Sequence[str]) -> None:
    """Write the section into docs/planning.md."""
    head, _, after = PAGE.read_text().partition(BEGIN)
    PAGE.write_text("\n".join([f"{head}{BEGIN}", *lines, f"{END}{after.partition(END)[2]}"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs/plan_times", help="what was measured")
    parser.add_argument("--rounds", type=whole_number(1), default=1, help="runs of each plan, in turns (default: 1)")
    parser.add_argument("--write", action="store_true", help="write the result into docs/planning.md")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model and few steps, to check that the script runs"
    )
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "shards").exists():
        write_shards(folder / "shards", 200_000)
    file = folder / "hardware.toml"
    hardware = load_hardware(str(file)) if file.exists() else write_hardware(file, RANKS)
    runs: dict[str, list[Path]] = {name: [] for name in PLANS}
    for number in range(1, options.rounds + 1):
        for name in PLANS:
            runs[name].append(measure(name, folder, options.quick, number))
    rows, residuals = predict(runs, replace(hardware, devices_per_machine=4))
    others = max(float((run / OTHERS).read_text()) for rounds in runs.values() for run in rounds)
    rounds = f", median of {options.rounds} rounds" * (options.rounds > 1)
    heading = f"{date.today():%-d %B %Y}, {os.cpu_count()} cores{rounds}; other programs took at most {others:.0%} of"
    lines = [f"{heading} them:", "", *table(rows)]
    print("\n".join([*residuals, *lines, *wrong_pairs(predicted_rows(rows))]))
    if options.write:
        write_page(lines)


if __name__ == "__main__":
    exit_with(main)
