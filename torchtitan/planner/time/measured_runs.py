"""Measured steps of runs: compare them with the planner's model, and fit the factors of its formula to them.

Imports no torch: planner/search.py, which needs it, is loaded when it is used.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from torchtitan.config import manager
from torchtitan.core.errors import JobError
from torchtitan.core.hardware import ASSUMED, Hardware, find_hardware, load_hardware
from torchtitan.job import ResolvedJob
from torchtitan.job.layout import JobLayout
from torchtitan.launcher.run_folder import JOB_FILE, job_of_step, plan_of_start, step_of_start
from torchtitan.metrics.curves import read_thinned
from torchtitan.metrics.json_lines import METRICS, Record, is_finite
from torchtitan.planner.plan import Plan, Workload, pipeline_obstacle, planning_obstacle
from torchtitan.planner.search import Candidate, Limits, PipelineTimer, Search, memory_limit
from torchtitan.planner.time.messages import FACTORS, PARTS, Calibration, Parts, StepTime
from torchtitan.planner.time.step_time import UNPUBLISHED_SPREAD, StepTimer

PUBLISHED_ROWS = {"h100": 53, "a100": 49, "h100-500w": 22}
"""Published rows by chip."""
PUBLISHED = {
    "products": 1.035,
    "attention": 1.166,
    "memory": 0.838,
    "tp": 0.515,
    "async_tp": 0.979,
    "ep": 0.269,
    "fsdp": 1.309,
    "stragglers": 1.043,
    "float8": 0.867,
    "products of a100": 0.862,
    "products of h100-500w": 1.304,
    "flash2": 1.913,
    "kernels of 2023": 1.175,
}
"""Factors that scripts/compare_published.py fits to tests/fixtures/published_*. "products" is of the H100 of 700 W, to
which other chips are related. The last two are of SOFTWARE."""
SOFTWARE = {"cudnn": (), "flash2": ("flash2",), "2023": ("flash2", "kernels of 2023")}
"""Factors of attention by the software of a run: kernels of cuDNN, which torch chooses today and Transformer Engine did
before; FlashAttention 2, made for the A100 and slow on later GPUs; and kernels of the year before it."""
PUBLISHED_SPREAD = 0.25
"""Relative error of a step's time like those of the published rows."""
SIGMAS = {"products": 0.7, "attention": 0.7, "ep": 0.7, "float8": 0.4, "messages": 1.0}
"""Standard deviations of the logarithms of factors before anything is measured."""
SIGMA = 0.5
"""The same for other factors."""
OUTLIER = 0.1
"""Largest error that counts in full in the fit of published runs, where a few rows are unlike all others."""
NOISE = 0.05
"""Standard deviation of the logarithm of a step's time around the formula."""
ITERATIONS = 6
STEP = 0.02
"""Of numerical derivatives, in the logarithm of a factor."""
Factors = dict[str, float]
Predicted = Callable[[Mapping[str, float]], float]
"""Seconds of a measured step by the formula with these factors."""


Linear = tuple[float, list[float]]
"""Of the logarithm of a measured step: its residual, and the slopes of the prediction by the logarithms of factors."""


def linearized(measured: Sequence[tuple[Predicted, float]], factors: Mapping[str, float]) -> list[Linear]:
    """Return the residual and the slopes of each measured step at these factors."""
    logs, rows = {name: math.log(factor) for name, factor in factors.items()}, list[Linear]()
    for predict, seconds in measured:
        predicted = math.log(predict(factors))
        slopes = [(math.log(predict(_exp(logs | {name: log + STEP}))) - predicted) / STEP for name, log in logs.items()]
        rows.append((math.log(seconds) - predicted, slopes))
    return rows


def corrected_factors(
    factors: Mapping[str, float], rows: Sequence[Linear], sigmas: Mapping[str, float], outlier: float = math.inf
) -> Factors:
    """Return the factors after one step of Gauss-Newton from `factors`, at which `rows` are. See `fit_factors`."""
    logs = [math.log(factor) for factor in factors.values()]
    weights = [(NOISE / sigmas.get(name, SIGMA)) ** 2 for name in factors]
    normal = [[weight * (i == j) for j in range(len(logs))] for i, weight in enumerate(weights)]
    right = [-weight * log for weight, log in zip(weights, logs, strict=True)]
    for residual, slopes in rows:
        weight = min(1.0, outlier / max(abs(residual), 1e-9))
        for i, slope in enumerate(slopes):
            right[i] += weight * slope * residual
            for j, other in enumerate(slopes):
                normal[i][j] += weight * slope * other
    changes = zip(factors, logs, _solved(normal, right), strict=True)
    return {name: math.exp(log + change) for name, log, change in changes}


def fit_factors(
    measured: Sequence[tuple[Predicted, float]],
    names: Sequence[str],
    sigmas: Mapping[str, float] | None = None,
    outlier: float = math.inf,
) -> Factors:
    """Return the factors that explain measured seconds best, and stay near 1 where nothing is measured.

    It maximizes the posterior of a normal prior on the logarithms, by Gauss-Newton. `sigmas`: of some factors.
    `outlier`: a larger error has less weight.
    """
    factors = dict.fromkeys(names, 1.0)
    for _ in range(ITERATIONS):
        factors = corrected_factors(factors, linearized(measured, factors), sigmas or {}, outlier)
    return factors


def _exp(logs: Mapping[str, float]) -> Factors:
    return {name: math.exp(value) for name, value in logs.items()}


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a positive definite system by elimination."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i, row in enumerate(rows):
        for below in rows[i + 1 :]:
            factor = below[i] / row[i]
            below[:] = [value - factor * pivot for value, pivot in zip(below, row, strict=True)]
    solution = [0.0] * len(rows)
    for i in reversed(range(len(rows))):
        subtracted = sum(value * factor for value, factor in zip(rows[i][i + 1 : -1], solution[i + 1 :], strict=True))
        solution[i] = (rows[i][-1] - subtracted) / rows[i][i]
    return solution


def with_software(factors: Mapping[str, float], hardware: Hardware, software: str) -> Factors:
    """Return the factors for a run of other SOFTWARE than this project's."""
    slower = [name for name in SOFTWARE[software] if name != "flash2" or hardware.chip != "a100"]
    attention = math.prod(factors.get(name, 1.0) for name in ("attention", *slower))
    return {**factors, "attention": attention}


def usual_calibration(hardware: Hardware, software: str = "cudnn") -> Calibration:
    """Return the calibration without measured runs of this job.

    Published factors of computation are of assumed curves, and those of messages of GPUs, which compute meanwhile. A
    chip without published rows has the mean factor of those with rows.
    """
    rows = sum(PUBLISHED_ROWS.values())
    curves = {"products": hardware.products, "attention": hardware.attention, "memory": hardware.memory_bound}
    measured = {name for name, curve in curves.items() if curve.evidence != ASSUMED}
    factors = {} if hardware.cores else with_software(PUBLISHED, hardware, software)
    if factors and hardware.chip not in PUBLISHED_ROWS:
        chips = [factors.get(f"products of {chip}", 1.0) for chip in PUBLISHED_ROWS]
        factors["products"] *= statistics.geometric_mean(chips)
    factors = {name: factor for name, factor in factors.items() if name.partition(" ")[0] not in measured}
    if of_this := PUBLISHED_ROWS.get(hardware.chip, 0):
        evidence = f"fitted on {of_this} published rows of this chip, {rows} in all"
        return Calibration(factors, PUBLISHED_SPREAD, evidence, is_published=True)
    return Calibration(
        factors, UNPUBLISHED_SPREAD, f"assumed: no published row is of this hardware; {rows} are of others"
    )


FIRST_STEPS = 3
"""Steps at the start of a run that are left out: the compiler and the allocator work in them."""
LEAST_SPREAD = 0.1
"""Smallest relative error of an interval."""
DATA, COMPUTATION, UNEXPLAINED = "waiting for data", "computation", "what the model does not explain"
COMPUTATION_PARTS = ("products", "attention", "memory", "optimizer")
"""Parts of the model (PARTS) that are computation."""
FEWEST_RUNS = 4
"""Fewer runs keep the usual interval: eleven factors can fit them whatever the formula is worth."""


def is_typical(record: Record) -> bool:
    """Return True for logged steps without a save, a validation or a first step."""
    measured = (record.get("step_seconds"), record.get("tokens_per_second"))
    return "marked" not in record and all(is_finite(value) and value > 0 for value in measured)


class MeasuredRun:
    """A run with a plan, and the median seconds of its steps in the last start that logged any.

    Raises JobError for a folder that is no run, and for a job whose steps the formulas do not describe. `records`: of
    its metrics, if they have been read.
    """

    def __init__(self, folder: Path, records: Sequence[Record] | None = None) -> None:
        self.name = str(folder)
        for name in (JOB_FILE, METRICS):
            if not (folder / name).is_file():
                raise JobError(f"{folder}: has no {name}; give the dump_folder of a run")
        try:
            records = read_thinned(folder / METRICS) if records is None else records
            steps = [record for record in records if is_typical(record)]
            file = job_of_step(folder, steps[-1]["step"] if steps else 1)
            job = ResolvedJob(manager.load(["--job.config_file", str(file)]))
        except (OSError, JobError) as error:
            raise JobError(f"{folder}: cannot be read ({error}); give the dump_folder of a run") from None
        steps = [record for record in steps if record["step"] > step_of_start(file)] or steps
        steps = steps[FIRST_STEPS:] or steps
        if not steps:
            raise JobError(f"{folder}: no step has been logged; give a run that has trained some steps")
        try:
            reason = planning_obstacle(job.model)
        except KeyError:  # of a package that is not installed here
            model = job.config.model
            reason = f"model.name = {model.name!r} with model.flavor = {model.flavor!r}: not known here"
        if reason:
            raise JobError(f"{folder}: {reason}")
        self.recorded = plan_of_start(file)
        self.seconds = statistics.median(record["step_seconds"] for record in steps)
        self.data_seconds = statistics.median(record.get("data_seconds") or 0.0 for record in steps)
        tokens = statistics.median(record["tokens_per_second"] * record["step_seconds"] for record in steps)
        self.samples = self.recorded.samples if self.recorded else round(tokens / job.config.training.seq_len)
        if not self.samples:
            raise JobError(f"{folder}: its steps have fewer tokens than a sample; give a run with its own {JOB_FILE}")
        if reason := pipeline_obstacle(job):
            raise JobError(f"{folder}: {reason}")
        self.job = job.on_ranks(self._gpus(job.layout))
        try:
            self.plan = Plan.of(self.job, self.samples)
            workload = Workload.of(self.job, self.samples)
            self.workload = replace(workload, seq_len=max(1, round(tokens / workload.rows)))  # may vary in length
            ranks = self.plan.gpus if self.recorded is None else self.recorded.ranks
            if min(self.plan.shards, self.plan.microbatches) < 1 or self.plan.gpus != ranks:
                raise ArithmeticError
            self.plan.stages(workload)
        except (ArithmeticError, LookupError, JobError) as error:
            remedy = "give the folder as the run has left it"
            raise JobError(f"{folder}: its job, recorded plan and metrics do not fit each other; {remedy}") from error

    def _gpus(self, layout: JobLayout) -> int:
        """Return the number of ranks that the run recorded. Of an older run it is computed from the samples of a step.

        Raises JobError if such a step may have several batches, so that its samples do not tell the shards.
        """
        if self.recorded is not None:
            return self.recorded.ranks
        shards = layout.parallelism.data_parallel_shard_degree
        if shards == -1 and layout.training.global_batch_size != -1:
            reason = "its ranks are not recorded, and training.global_batch_size does not tell them"
            raise JobError(f"{self.name}: {reason}; give a run with parallelism.data_parallel_shard_degree set")
        if shards == -1:
            shards = max(1, self.samples // (layout.training.local_batch_size * layout.replicas))
        return shards * layout.replicas * layout.tp * layout.cp * layout.pp

    def check_device(self, hardware: Hardware) -> None:
        """Raise JobError if the run has recorded that it ran on other hardware."""
        device = "cpu" if self.recorded is None else self.recorded.device
        is_other = not hardware.matches(device) if hardware.device_names else device != "cpu"
        if self.recorded is not None and is_other:
            remedy = "give --gpu the hardware of the runs"
            raise JobError(f"{self.name}: ran on {device}, which is not {hardware.title}; {remedy}")

    def predicted(self, hardware: Hardware, factors: Mapping[str, float]) -> float:
        """Return the seconds of a step by the formula, with the simulated bubble of a pipeline."""
        return self.step_time(hardware, Calibration(factors)).seconds

    def step_time(self, hardware: Hardware, calibration: Calibration) -> StepTime:
        """Predict a step of the run's plan, on as many ranks in each machine as it has recorded."""
        if self.recorded is not None:
            hardware = replace(hardware, devices_per_machine=self.recorded.ranks_per_machine)
        timer = StepTimer(self.workload, hardware, calibration)
        return (PipelineTimer(timer) if self.plan.pp > 1 else timer).step_time(self.plan)


@dataclass(frozen=True)
class ModelledStep:
    """The typical step of a run and the planner's model of it."""

    run: MeasuredRun
    hardware: Hardware
    calibration: Calibration

    @classmethod
    def of(cls, run: MeasuredRun, hardware: Hardware | None = None) -> "ModelledStep":
        """Model a run, by default on the device that it recorded. Raises JobError if no figures describe that."""
        if hardware is None:
            device = run.recorded.device if run.recorded else ""
            hardware = load_hardware(device) if device == "cpu" else find_hardware(device)
            if hardware is None:
                reason = f"no figures of {device}" if device else "the run has not recorded its device"
                raise JobError(f"{run.name}: {reason}; give --gpu NAME, or a file of `torchtitan bench --hardware`")
        if run.recorded is not None:
            hardware = replace(hardware, devices_per_machine=run.recorded.ranks_per_machine)
        return cls(run, hardware, usual_calibration(hardware))

    @cached_property
    def time(self) -> StepTime:
        """The prediction for the plan of the run."""
        return self.run.step_time(self.hardware, self.calibration)

    @property
    def busy_seconds(self) -> float:
        """Seconds of a step without the wait for data, which the model leaves out."""
        return max(0.0, self.run.seconds - self.run.data_seconds)

    @property
    def scale(self) -> float:
        """Factor of the model's seconds where it predicts more than was measured; else 1."""
        return min(1.0, self.busy_seconds / self.time.seconds)

    def shares(self) -> dict[str, float]:
        """Return the shares of the measured step by what takes them, largest first."""
        shares = Parts({DATA: self.run.data_seconds, UNEXPLAINED: self.busy_seconds})
        for name, seconds in self.time.parts.items():
            shares[COMPUTATION if name in COMPUTATION_PARTS else PARTS[name]] += self.scale * seconds
            shares[UNEXPLAINED] -= self.scale * seconds
        return {name: shares[name] / self.run.seconds for name in sorted(shares, key=lambda name: -shares[name])}

    def fastest(self) -> Candidate | None:
        """Return the planner's fastest legal plan on the ranks of the run; None if none fits."""
        run, device = self.run, "cuda" if self.hardware.device_names else "cpu"
        job = run.job.on_ranks(run.plan.gpus, device)
        search = Search(job, run.workload, run.samples, self.hardware, self.calibration)
        best = search.find(run.plan.gpus, 1, Limits(memory_limit(job.config, self.hardware))).best
        return best[0] if best else None

    def savings(self, other: StepTime) -> tuple[float, float, float]:
        """Return the share of the measured step that another plan saves by the model, and the ends of its interval.

        The time of the run's own plan is measured, so the interval is that of the other plan's time alone.
        """
        spread = 1 + max(self.time.spread, other.spread)
        least, most = (
            self.scale * (self.time.seconds - seconds) / self.run.seconds
            for seconds in (other.seconds * spread, other.seconds / spread)
        )
        return self.scale * (self.time.seconds - other.seconds) / self.run.seconds, least, most


def prior_sigmas(hardware: Hardware) -> dict[str, float]:
    """Return the factors that runs on this hardware fit, and the standard deviations of their logarithms before."""
    return {name: SIGMAS.get(name, SIGMA) for name in FACTORS} | {hardware.name: 2.0}


def changed(factors: Mapping[str, float], changes: Mapping[str, float]) -> Factors:
    """Return the factors with some of them multiplied by `changes`."""
    return {**factors, **{name: factors.get(name, 1.0) * factor for name, factor in changes.items()}}


def calibrate(folders: Sequence[Path], hardware: Hardware, usual: Calibration) -> tuple[Calibration, list[str]]:
    """Return the calibration that fits the steps of these runs, and a line with the residual of each.

    Raises JobError for a folder that is no run, or for a job that cannot be planned.
    """
    try:
        runs = [MeasuredRun(folder) for folder in folders]
        for run in runs:
            run.check_device(hardware)
    except JobError as error:
        raise JobError(f"--from {error}") from None
    measured = [
        (lambda changes, run=run: run.predicted(hardware, changed(usual.factors, changes)), run.seconds) for run in runs
    ]
    sigmas = prior_sigmas(hardware)
    factors = changed(usual.factors, fit_factors(measured, list(sigmas), sigmas))
    residuals = [run.predicted(hardware, factors) / run.seconds - 1 for run in runs]
    spread = max(LEAST_SPREAD, 2 * math.sqrt(statistics.fmean(residual**2 for residual in residuals)))
    lines = [
        f"{run.name}: {run.seconds:.4g} s a step measured, residual {residual:+.1%} ({run.plan})"
        for run, residual in zip(runs, residuals, strict=True)
    ]
    count = f"{len(runs)} measured run" + "s" * (len(runs) > 1)
    if len(runs) < FEWEST_RUNS:
        return replace(usual, factors=factors, evidence=f"fitted on {count}"), lines
    return Calibration(factors, spread, f"fitted on {count}"), lines
