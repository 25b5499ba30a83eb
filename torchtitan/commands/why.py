"""`torchtitan why RUN`: what bounds a run's speed, by its records, and what to change first.

The shares of time by cause are from the account of time that a run logs at every save and at its end, over all of its
starts. A gain is an upper bound: the time that a cause takes. The planner's model of the run's own job, plan and
hardware divides the typical step, and names the fastest plan if the measured time is in the model's interval. Without a
model the bubble of a pipeline is simulated, as by `torchtitan schedule`. What neither the records nor the model tell is
listed as unknown.
"""

import dataclasses
import json
import math
import re
import signal
import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.commands.command_lines import parse_command
from torchtitan.commands.schedule import ask
from torchtitan.config.job import JobConfig
from torchtitan.config.manager import load
from torchtitan.config.options import ConfigError
from torchtitan.config.sections.run import Profiling
from torchtitan.core.errors import JobError
from torchtitan.core.hardware import Hardware, load_hardware
from torchtitan.core.machine_errors import MachineError
from torchtitan.core.progress_bar import waiting
from torchtitan.launcher.run_folder import JOB_FILE, describe_run_end, is_held, newest_step
from torchtitan.metrics.console import duration
from torchtitan.metrics.curves import read_run
from torchtitan.metrics.goodput import CAUSES, MARGIN, SHORTEST_ADVISED_SECONDS, best_save_interval
from torchtitan.metrics.json_lines import Record, is_finite
from torchtitan.metrics.run_end import end_of, without_ends
from torchtitan.planner.time.measured_runs import UNEXPLAINED, MeasuredRun, ModelledStep
from torchtitan.process import exit as exit_codes

WORTH_A_CHANGE = 0.05
"""Smallest share of all time for which a change is proposed."""
BOUND = 0.25
"""Smallest share of all time for which a cause besides the steps is said to bound the run."""
SLOW = 1.5
"""A window counts as slow if its steps take this many times the median."""
BUBBLE = "pipeline bubble"
ONCE = ("compile", "start", "end")
"""Causes (metrics/goodput.py) of time that does not grow with the steps of a start, so that no change comes first."""
FEW = 8
"""Fewest windows of steps to compare the times of."""
KILLED = 128 + signal.SIGKILL
AFTER_ENDS = {
    exit_codes.CRASHED: "look at the traceback in the log of the rank that failed first",
    exit_codes.REFUSED: "remove the fault that the reason names",
    exit_codes.NOT_LOADED: "see the reason above, about the checkpoint or its storage",
    exit_codes.NON_FINITE: "`torchtitan replay {run} --step {step}` shows its origin",
    exit_codes.CRASH_LOOP: "remove the reason of the restarts, in the log of the rank that failed first",
    exit_codes.HUNG: "see the stacks of the rank that the reason names, in the newest folder of {run}/hangs",
    exit_codes.NOT_SAVED: "make room, or repair the storage that the reason names, and start the run again",
    exit_codes.OUT_OF_MEMORY: "`torchtitan estimate --job.config_file {run}/config.toml` lists changes that fit",
    exit_codes.DIFFERING: "test the memory of the machine of the rank that the reason names",
    exit_codes.NOT_EXPORTED: "see the reason above; `torchtitan export {run}` repeats the export",
    KILLED: "if nobody has killed it, memory was used up: see `dmesg`, and the container's or SLURM's limit",
}
"""Exit code of a run that failed -> what to do first."""
BY_SIGNAL = "look at the stack that the rank has printed in the log, and in `dmesg`"
"""What to do first after other signals that end a rank, such as SIGSEGV and SIGBUS."""


@dataclass(frozen=True)
class Cause:
    """A cause of time that is not training. `share`: of all time. `gain`: the part of it that the remedy can save."""

    name: str
    share: float
    gain: float
    remedy: str


@dataclass(frozen=True)
class Account:
    """The time of a run by its causes, as its records and its job show them."""

    seconds: dict[str, float]
    """Seconds by cause, see `account_of`."""
    records: list[Record]
    config: JobConfig | None
    """None if it cannot be read."""

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def training(self) -> float:
        """The share of training."""
        return self.seconds.get("train", 0.0) / (self.total or 1.0)

    def lines(self, run: Path, step: ModelledStep | None, reason: str) -> Iterator[str]:
        """Yield the answer. `reason`: why there is no model of a step, see `model_of`."""
        total, training = self.total, self.training
        causes = sorted(self.causes(step is not None), key=lambda cause: -cause.gain)
        once = sum(self.seconds.get(cause, 0.0) for cause in ONCE) / total
        yield f"{run}: {duration(total)} recorded, {100 * training:.1f} % of it training"
        for cause in sorted(causes, key=lambda cause: -cause.share):
            yield f"  {100 * cause.share:5.1f} %  {cause.name}"
        if step is not None:
            yield from step_lines(step)
        first = causes[0] if causes and causes[0].gain >= WORTH_A_CHANGE else None
        if first is None and once >= WORTH_A_CHANGE:
            yield f"too short to tell what bounds it: {100 * once:.0f} % of it is spent once in each start"
        elif first is None:
            yield f"bound by the steps themselves: no other cause takes {100 * WORTH_A_CHANGE:.0f} % of the time"
        elif first.gain < BOUND:
            yield f"bound by the steps themselves; next comes {first.name}, {100 * first.gain:.0f} % of the time"
        else:
            yield f"bound by {first.name}; at most {1 / (1 - min(first.gain, 0.999)):.2f} times as fast without it"
        changes = sorted([*causes, *(plan_changes(step, training) if step else ())], key=lambda cause: -cause.gain)
        # without repetitions
        remedies = dict.fromkeys(cause.remedy for cause in changes if cause.gain >= WORTH_A_CHANGE)
        yield from (f"{'then' if index else 'change first'}: {remedy}" for index, remedy in enumerate(remedies))
        yield from (f"a {cause.remedy}" for cause in causes if not cause.gain and cause.share >= WORTH_A_CHANGE)
        if reason and self.config is not None:
            yield f"unknown: the parts of a step by the planner's model: {reason}"
        names_profiling = any(look_inside(self.profiling) in remedy for remedy in remedies)
        yield from (f"unknown: {text}" for text in self.unknowns(causes, step, names_profiling))

    def causes(self, is_modelled: bool = False) -> Iterator[Cause]:
        """Yield the causes of time besides training, and of time within training as far as the records show it.

        `is_modelled`: the planner's model has the bubble of a pipeline.
        """
        total, training = self.total, self.training
        for cause, spent in self.seconds.items():
            if cause != "train" and spent >= 0.001 * total:
                gain = 0.0 if cause in ONCE else spent / total
                yield Cause(CAUSES[cause], spent / total, gain, self.remedy(cause))
        times = [row["step_seconds"] - (row.get("data_seconds") or 0.0) for row in steady(self.records)]
        if len(times) >= FEW:
            median = statistics.median(times)
            slow = [time - median for time in times if time > SLOW * median]
            if slow:
                excess = training * sum(slow) / sum(times)
                count = f"{len(slow)} of {len(times)} logged ones"
                name = f"slow steps within training: {count} took over {SLOW} times the median"
                yield Cause(name, excess, excess, "look for other programs on the machine")
        yield from slow_ranks_of(self.records, training)
        if self.has_pipeline and not is_modelled:
            with suppress(JobError):  # no such schedule here: see unknowns
                yield self.bubble()

    @property
    def has_pipeline(self) -> bool:
        return self.config is not None and self.config.parallelism.pipeline_parallel_degree > 1

    @property
    def profiling(self) -> Profiling | None:
        return None if self.config is None else self.config.profiling

    def bubble(self) -> Cause:
        """Return the idle time of the pipeline within training, simulated, and what twice as many microbatches gain."""
        assert self.config is not None
        options, job = parse_command("schedule", ["--job.config_file", *self.config.job.config_file])
        question = ask(options, job)
        share = question.simulated(question.table()).bubble_share
        larger = dataclasses.replace(question, microbatches=2 * question.microbatches)
        better = larger.simulated(larger.table()).bubble_share
        gain = 1 - (1 - share) / (1 - better)
        count = f"{larger.microbatches} microbatches in place of {question.microbatches}"
        options_to_change = "training.local_batch_size or parallelism.pipeline_parallel_microbatch_size"
        remedy = f"{count}, by {options_to_change}; `torchtitan schedule` compares schedules"
        name = f"{BUBBLE} within training, simulated for {question.name}"
        return Cause(name, self.training * share, self.training * gain, remedy)

    def remedy(self, cause: str) -> str:
        """Return what to change about the time of a cause (metrics/goodput.py)."""
        if cause == "data":
            workers = "" if self.config is None else f" (now {self.config.training.dataloader.num_workers})"
            return f"more training.dataloader.num_workers{workers}, or tokenize once with `torchtitan prepare`"
        if cause == "save":
            return self.save_remedy()
        if cause in ("restart", "redone"):
            reasons = sorted({str(record.get("cause")) for record in self.records if record.get("event") == "restart"})
            shown = f" ({'; '.join(reasons[:3])})" if reasons else ""
            return f"remove the reason of the restarts{shown}; a shorter checkpoint.interval loses fewer steps"
        without_compiling = "; without compile.enable the first step is shorter and the others are longer"
        compiles = self.config is not None and self.config.compile.enable
        return {
            "validation": "a longer validation.freq, or fewer validation.samples",
            "compile": "longer run has a smaller share of its first step" + without_compiling * compiles,
            "start": "longer run has a smaller share of its start; `torchtitan prepare` tokenizes before it",
            "end": "longer run has a smaller share of its end, the last save and the exports",
        }[cause]

    def save_remedy(self) -> str:
        """Return what to change about saves: their mode, and in a run of an hour their interval (Young and Daly)."""
        total, spent = self.total, self.seconds.get("save", 0.0)
        accounts = [record for record in self.records if record.get("event") == "goodput"]
        # the others are ends
        saves = max(1, len({record["step"] for record in accounts if not record.get("end_seconds")}))
        failures = sum(record.get("event") == "restart" for record in self.records)
        advice = []
        if self.config is None or self.config.checkpoint.async_mode == "disabled":
            advice.append('checkpoint.async_mode = "async"')
        if total >= SHORTEST_ADVISED_SECONDS and failures:
            best = best_save_interval(total / failures, spent / saves)
            advice.append(f"a checkpoint.interval of about {duration(best)}, by the {failures} failures of the run")
        elif total >= SHORTEST_ADVISED_SECONDS:
            advice.append("a longer checkpoint.interval, as the run did not fail")
        return "; ".join(advice) or "a longer checkpoint.interval"

    def unknowns(
        self, causes: list[Cause], step: ModelledStep | None = None, names_profiling: bool = False
    ) -> Iterator[str]:
        """Yield the causes that neither the records nor the planner's model tell apart.

        `names_profiling`: a remedy already says how to look inside a step.
        """
        remedy = "" if names_profiling else f": {look_inside(self.profiling)}"
        rows = [row for row in steady(self.records) if is_finite(row.get("mfu_full"))]
        if rows:
            mfu = statistics.median(row["mfu_full"] for row in rows)
            yield f"the parts of the steps that are not at the device's peak (MFU {100 * mfu:.1f} %)"
        if step is None:
            yield f"host time, kernels and exposed communication within a step{remedy}"
        else:
            yield f"host time and slow kernels within a step, which the model does not have{remedy}"
        if step is not None and step.hardware.name == "cpu":
            measure = "`torchtitan bench --hardware FILE` measures it for --gpu"
            yield f"whether the CPU is like {step.hardware.title}; {measure}"
        if self.has_pipeline and step is None and not any(cause.name.startswith(BUBBLE) for cause in causes):
            yield f"bubble of the pipeline: `torchtitan schedule --job.config_file RUN/{JOB_FILE}` shows why"
        if not any("slowest_ratio" in record for record in self.records):
            timed = "only data-parallel ranks are timed, unless all blocks are compiled as one"
            yield f"a rank slower than the others: {timed}"
        elif not list(slow_ranks_of(self.records, 1.0)):
            yield "a rank that is slow in few steps: longer samples look the same"
        accounts = [record["step"] for record in self.records if record.get("event") == "goodput"]
        if accounts and self.records[-1].get("event") != "goodput":
            yield f"the time after step {accounts[-1]}: the run logs its account of time at every save and at its end"
        if not accounts:
            yield "starts, saves and restarts: they are logged at every save and at the end of training, and none came"
        if self.config is None:
            yield f"the options of the job: no {JOB_FILE} that can be read"


def main(argv: list[str]) -> int:
    options, _ = parse_command("why", argv)
    hardware = load_hardware(options.gpu) if options.gpu else None
    records = read_run(options.run, or_ended=True)
    config = job_of_file(options.run / JOB_FILE)
    end, head = end_of(records), list(end_lines(options.run, records, config))
    if head and not options.json:
        print("\n".join(head), flush=True)
    records = without_ends(records)
    account = Account(account_of(records), records, config)
    if not account.total and end is None:
        remedy = "let it log a few steps"
        raise JobError(f"{options.run}: no account of its time and no times of steps in its metrics; {remedy}")
    lines, causes = ["unknown: what bounds its speed, as it has logged no step"], []
    if account.total:
        step, reason = model_of(options.run, records, hardware)
        lines = list(account.lines(options.run, step, reason))
        causes = sorted(account.causes(step is not None), key=lambda cause: -cause.gain)
    if options.json:
        shown = {"causes": [dataclasses.asdict(cause) for cause in causes], "lines": head + lines}
        share = {"seconds": account.total, "training_share": account.training}
        print(json.dumps({"run": str(options.run), "exit_code": 0} | share | shown, indent=1))
    else:
        print("\n".join(lines))
    return 0


def end_lines(run: Path, records: list[Record], config: JobConfig | None) -> Iterator[str]:
    """Yield how the last start of a run ended, a remedy, and the step from which another start resumes."""
    described, end = describe_run_end(run, records), end_of(records)
    if not described:
        return
    yield f"{run}: {described}"
    is_locked = is_held(run) if run.is_dir() else None
    if is_locked or (is_locked is None and not (end and end.get("exit_code"))):
        return  # at work, or ended well
    if is_locked is None and end and (remedy := remedy_of(run, end)):
        yield f"first of all: {remedy}"
    if config is not None:
        yield resume_line(run, config, max(record["step"] for record in records))


def remedy_of(run: Path, end: Record) -> str:
    """Return what to do about the end of a run that failed; "" if its reason says that, or it was stopped."""
    code, reason = end.get("exit_code"), str(end.get("reason"))
    is_killed = isinstance(code, int) and 128 < code <= 128 + signal.NSIG and code not in exit_codes.STOPPED
    bad_step = re.search(r"--step ([0-9]+)", reason)
    if code == exit_codes.NON_FINITE and bad_step is None:
        return ""  # the loss is finite, or no step is to blame
    remedy = AFTER_ENDS.get(code, "") if isinstance(code, int) else ""
    return (remedy or BY_SIGNAL * is_killed).format(run=run, step=bad_step and bad_step[1])


def resume_line(run: Path, config: JobConfig, reached: int) -> str:
    """Return a line on the step from which another start resumes a run that has reached a step."""
    options = config.checkpoint
    try:
        saved = newest_step(run / options.folder) if options.enable else -1
    except MachineError as error:
        return f"unknown: where another start goes on: {error}"
    if saved <= 0:
        return (
            f"another start begins with step 1: there is no checkpoint{' (checkpoint.enable)' * (not options.enable)}"
        )
    repeated = f"; {reached - saved} steps are made again" if reached > saved else ""
    return f"another start goes on from the checkpoint of step {saved}{repeated}"


def job_of_file(path: Path) -> JobConfig | None:
    """Return the job in a file; None if it cannot be read."""
    try:
        return load(["--job.config_file", str(path)])
    except ConfigError:
        return None


def model_of(run: Path, records: list[Record], hardware: Hardware | None) -> tuple[ModelledStep | None, str]:
    """Return the planner's model of the run's typical step, or None and the reason."""
    rows = [row for row in records if is_finite(row.get("step_seconds"))]
    if rows and not steady(rows):
        return None, "each logged step has a save, a validation or a compilation in it; log steps in between"
    try:
        step = ModelledStep.of(MeasuredRun(run, records), hardware)
        step.run.step_time(step.hardware, step.calibration)  # may raise too
        return step, ""
    except JobError as error:
        return None, str(error).removeprefix(f"{run}: ")


def step_lines(step: ModelledStep) -> Iterator[str]:
    """Yield what takes the typical step, and what bounds it."""
    time, run = step.time, step.run
    yield (
        f"a step takes {run.seconds:.4g} s, by the planner's model {time.low:.4g} to {time.high:.4g} s without data: "
        f"{run.plan} on {step.hardware.title} ({step.calibration.evidence})"
    )
    if step.busy_seconds < time.low:
        yield "what bounds the steps is not known: they take less time than the model's interval, so it is wrong here"
        return
    shares = step.shares()
    yield from (f"  {100 * share:5.1f} %  {name}" for name, share in shares.items() if share >= 0.001)
    bound = next(iter(shares))
    if step.busy_seconds > time.high:
        bound = f"{UNEXPLAINED}: they take longer than its interval, and it cannot know why"
    yield f"the steps are bound by {bound}"


def plan_changes(step: ModelledStep, training: float) -> Iterator[Cause]:
    """Yield the planner's fastest plan on the ranks of the run, if the model explains the steps and it is faster."""
    if step.busy_seconds > step.time.high:
        share = training * step.shares()[UNEXPLAINED]
        yield Cause(
            UNEXPLAINED,
            share,
            share,
            f"to see what takes the unexplained time, {look_inside(step.run.job.config.profiling)}",
        )
    if not step.time.low <= step.busy_seconds <= step.time.high:
        return
    with waiting("plans are searched"):
        best = step.fastest()
    if best is not None and best.time.seconds < step.time.seconds:
        plan = best.plan
        share, least, most = step.savings(best.time)
        yield Cause(
            "the plan",
            training * share,
            training * share,
            f"the fastest legal plan on these {plan.gpus} ranks, which saves {100 * share:.0f} % of a step by the "
            f"model ({100 * least:.0f} to {100 * most:.0f} %): {plan}; batch {plan.batch}; "
            f"{plan.recompute_text}; `torchtitan plan` writes it as a job",
        )


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


def steady(records: list[Record]) -> list[Record]:
    """Return the logged windows of steps without a save, a validation or a first step."""
    return [row for row in records if is_finite(row.get("step_seconds")) and "marked" not in row]


def slow_ranks_of(records: list[Record], training: float) -> Iterator[Cause]:
    """Yield the time within training for which ranks waited for those that the run has named as slow.

    The whole step of a slow rank is taken to be as slow as its data and forwards, which are timed.
    """
    names, is_slow, waits = "", False, []
    for record in records:
        if record.get("event") == "straggler":
            is_slow = bool(record.get("number"))
            names = str(record.get("ranks")) if is_slow else names
        elif is_finite(record.get("slowest_ratio")) and record["slowest_ratio"] > 0:
            waits.append(max(0.0, 1 - 1 / record["slowest_ratio"]) if is_slow else 0.0)
    remedy = "look at other programs, clocks, temperature and storage of that machine, or train without it"
    if names and waits:
        share = training * sum(waits) / len(waits)
        yield Cause(f"waiting within training for slow ranks, last named: {names} times", share, share, remedy)
    elif mostly := mostly_slow_rank(steady(records)):
        number, count, of, waited = mostly
        name = f"waiting within training for rank {number:.0f}, the slowest in {count} of {of} windows with a slow rank"
        yield Cause(name, training * waited, training * waited, remedy)


def mostly_slow_rank(rows: list[Record]) -> tuple[int, int, int, float] | None:
    """Return the rank that is the slow one too often for chance, its number of windows, all with a slow rank, and the
    share of the steps for which others wait for it.

    By chance, as for longer samples, a rank is the slowest in half of the windows at most, and for it are half of the
    seconds that ranks wait for one another. Four standard deviations more are required.
    """
    timed = [row for row in rows if is_finite(row.get("slowest_ratio")) and is_finite(row.get("slowest_rank"))]
    slow = [row for row in timed if row["slowest_ratio"] > MARGIN]
    if not slow:
        return None
    waits: defaultdict[float, float] = defaultdict(float)
    squares = 0.0
    for row in slow:
        waited = row["step_seconds"] * (1 - 1 / row["slowest_ratio"])
        waits[row["slowest_rank"]] += waited
        squares += waited**2
    number = max(waits, key=lambda rank: waits[rank])
    if waits[number] < sum(waits.values()) / 2 + 2 * math.sqrt(squares):
        return None
    count = sum(row["slowest_rank"] == number for row in slow)
    return int(number), count, len(slow), waits[number] / sum(row["step_seconds"] for row in timed)


def look_inside(options: Profiling | None) -> str:
    """Return how to see what takes time within a step of a job with this section [profiling]."""
    if options is not None and options.enable_profiling:
        return f"see the traces in {options.save_traces_folder} in the run's folder"
    return "set profiling.enable_profiling for some steps"
