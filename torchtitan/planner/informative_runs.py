"""Short runs whose measured steps would tell most about some plans, for `torchtitan plan --from`.

The logarithm of a step's time is taken as linear in those of the factors of its formula, which have the prior of
`fit_factors`. A measured step shows one direction of them, up to noise. Each run is the one that leaves the least
variance in the predicted steps of the leading plans, given those before it.
"""

import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from torchtitan.config import manager
from torchtitan.config.job import JobConfig, as_dict
from torchtitan.config.layers import walk
from torchtitan.job import ResolvedJob
from torchtitan.planner.plan import Plan
from torchtitan.planner.search import Search, faults_as_new
from torchtitan.planner.time.measured_runs import NOISE, STEP, changed, prior_sigmas
from torchtitan.planner.time.step_time import StepTimer
from torchtitan.rules.loading import load_job

RUNS, STEPS = 3, 10
"""Number of runs to name, and of their steps."""
MOST_CANDIDATES = 300
"""Most plans to choose from: the slopes of one take milliseconds."""
FOLDER = "outputs/measured"
"""Start of the dump_folder of each run."""
Slopes = list[float]
"""Of the logarithm of a plan's step by those of the factors."""


def slopes_of(search: Search, plans: Sequence[Plan]) -> list[Slopes]:
    """Return the slopes of each plan, at the calibration of the search."""
    usual = search.calibration

    def logs(changes: Mapping[str, float]) -> list[float]:
        calibration = replace(usual, factors=changed(usual.factors, changes))
        timer = StepTimer(search.workload, search.hardware, calibration)
        return [math.log(timer.step_time(plan).seconds) for plan in plans]

    before = logs({})
    by_factor = [logs({name: math.exp(STEP)}) for name in prior_sigmas(search.hardware)]
    return [[(log - base) / STEP for log in after] for base, *after in zip(before, *by_factor, strict=True)]


def most_informative(sigmas: Sequence[float], leading: Sequence[Slopes], candidates: Sequence[Slopes]) -> Iterator[int]:
    """Yield the indices of the candidates, first the one that lowers the sum of the leading plans' variances most."""
    covariance = [[sigma**2 * (row == column) for column in range(len(sigmas))] for row, sigma in enumerate(sigmas)]
    unmeasured = list(range(len(candidates)))

    def along(slopes: Slopes) -> Slopes:
        return [_dot(row, slopes) for row in covariance]

    def lowered(index: int) -> float:
        direction = along(candidates[index])
        gain = sum(_dot(plan, direction) ** 2 for plan in leading)
        return gain / (_dot(candidates[index], direction) + NOISE**2)

    while unmeasured:
        best = max(unmeasured, key=lowered)
        yield best
        unmeasured.remove(best)
        direction = along(candidates[best])
        variance = _dot(candidates[best], direction) + NOISE**2
        for row, share in zip(covariance, direction, strict=True):
            row[:] = [value - share * other / variance for value, other in zip(row, direction, strict=True)]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def runs_to_measure(search: Search, leading: Sequence[Plan], judged: Iterable[Plan]) -> list[tuple[Plan, str]]:
    """Return the runs to measure, each with its command. `judged`: plans that are legal and fit."""
    plans = list(dict.fromkeys([*leading, *judged]))[:MOST_CANDIDATES]
    slopes = slopes_of(search, plans)
    sigmas = list(prior_sigmas(search.hardware).values())
    order = most_informative(sigmas, slopes[: len(leading)], slopes)
    commands = ((plans[index], command) for index in order if (command := _command(search, plans[index])))
    return [
        (plan, f"{command} --job.dump_folder={FOLDER}_{number}")
        for number, (plan, command) in enumerate(islice(commands, RUNS), start=1)
    ]


def _command(search: Search, plan: Plan) -> str:
    """Return the command of a plan's short run without its folder; empty if no command line can say its options."""
    job = search.job(plan)
    training = job.config.training
    end = {"training.tokens": STEPS * search.workload.tokens} if training.tokens else {"training.steps": STEPS}
    changes = ({} if training.epochs else end) | {"metrics.log_freq": 1, "checkpoint.enable": False}
    config = job.with_options(changes).config
    options = differing_options(config)
    options.pop("job.dump_folder", None)
    arguments = [*config.job.config_file, *(f"--{key}={_text(value)}" for key, value in options.items())]
    if None in options.values() or faults_as_new(ResolvedJob(load_job(arguments)[0], plan.gpus, job.device_type)):
        return ""
    return f"python -m torchtitan.launch {min(plan.gpus, search.hardware.devices_per_machine)} {shlex.join(arguments)}"


def _text(value: Any) -> str:
    """Return a value as the command line takes it: a text without quotes, all else as in TOML."""
    return value if isinstance(value, str) else _toml(value)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(inner)}' for key, inner in value.items())}}}"
    return json.dumps(value)


def differing_options(config: JobConfig) -> dict[str, Any]:
    """Return the options that differ from the files that the job is read from, by dotted name."""
    base = manager.load([argument for file in config.job.config_file for argument in ("--job.config_file", file)])
    before, after = (dict(walk(as_dict(one))) for one in (base, config))
    return {key: value for key, value in after.items() if before.get(key) != value and key != "job.config_file"}


def run_lines(search: Search, runs: Sequence[tuple[Plan, str]]) -> list[str]:
    """Format the runs to measure; nothing if there is none."""
    if not runs:
        return []
    machines = -(-runs[0][0].gpus // search.hardware.devices_per_machine)
    where = f", each started on all {machines:,} machines (docs/clusters.md)" * (machines > 1)
    ends = f", and each ended after {STEPS} steps" * bool(search.base.config.training.epochs)
    folders = " ".join(f"{FOLDER}_{number}" for number in range(1, len(runs) + 1))
    lines = [f"these short runs would tell most about the steps of the plans above{where}{ends}:"]
    for plan, command in runs:
        lines += [f"  {plan}; batch {plan.batch}; {plan.options_text}", f"    {command}"]
    return [*lines, f"then plan again with --from {folders}"]
