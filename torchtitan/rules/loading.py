"""Load a job and judge it: the way from a command's arguments to a job that it may act on."""

from collections.abc import Callable
from dataclasses import replace
from math import gcd
from typing import Any

from pydantic import ValidationError

from torchtitan.config import manager
from torchtitan.config.changes import saved_value
from torchtitan.config.job import JobConfig
from torchtitan.config.layers import OTHER_ENDS, Values, merged
from torchtitan.config.options import ConfigError, Fault, show
from torchtitan.config.sections.model import Parallelism
from torchtitan.config.sections.training import LRScheduler, Training
from torchtitan.core.cadence import NO_LIMIT
from torchtitan.job import ResolvedJob
from torchtitan.lr_schedules import CYCLICAL, JAGGED
from torchtitan.rules import check, judge, with_faults_of_the_rest, without_unknown_names
from torchtitan.rules.checkpoint import checkpoint_to_resume
from torchtitan.rules.facts import Device, Facts
from torchtitan.rules.optimization import schedule_can_be_built

STEPS = "training.steps"


def load_valid(
    argv: list[str],
    world_size: int | None,
    device: Device | None,
    matters: Callable[[Fault], bool] = lambda fault: True,
    adjust: Callable[[JobConfig], JobConfig] = lambda config: config,
) -> Facts:
    """Return the job that the arguments describe, and what follows from it.

    `world_size`: None for the fewest ranks that the job allows. `device`: None if only faults on every kind of device
    count. `matters`: tells the faults that prevent what the command does. `adjust`: changes the job before it is
    judged. Raises ConfigError with all faults.
    """
    kind: Device = device or "cpu"
    try:
        config, notice = load_job(argv)
        config = adjust(config)
    except ConfigError as error:
        ranks = world_size or (fewest_ranks(error.rest.parallelism) if error.rest else 1)
        raise ConfigError(with_faults_of_the_rest(error, ranks, kind, manager.said_by(argv))) from None
    ranks = world_size or fewest_ranks(config.parallelism)
    facts = Facts(ResolvedJob(config, ranks, kind), manager.said_by(argv), notice)
    faults = check(config, ranks, kind, facts.said_by)
    if device is None:
        elsewhere = check(config, ranks, "cuda", facts.said_by)
        faults = [fault for fault in faults if fault in elsewhere]
    if faults := [fault for fault in faults if matters(fault)]:
        raise ConfigError(faults)
    return facts


def without_resume(config: JobConfig) -> JobConfig:
    """Return the job as one that ignores an earlier run in its folder."""
    return replace(config, job=replace(config.job, clean_start="always"))


def load_job(argv: list[str]) -> tuple[JobConfig, str]:
    """Return the job that the arguments describe, and a notice if its schedule was shortened for a trial run.

    A trial run has fewer steps by the command line than its files say. A warmup and decay of the files that do not fit
    are shortened, or are those of the checkpoint that the run resumes. Raises ConfigError for values that are wrong in
    themselves.
    """
    config = manager.load(argv)
    *of_files, command_line = manager.read_layers(argv)[1]
    is_set = [key for key in command_line.values if key.startswith("lr_scheduler.")]
    ends = [key for key in (STEPS, *OTHER_ENDS) if key in command_line.values]
    if not ends or is_set or _fits(config):
        return config, ""
    shape, resume_point = config.lr_scheduler, checkpoint_to_resume(Facts(ResolvedJob(config)))
    saved = [] if resume_point is None else _saved_schedules(shape, resume_point[1])
    candidates = [*saved, *_shorter(shape, config.training.steps, merged(layer.values for layer in of_files))]
    jobs = (replace(config, lr_scheduler=schedule) for schedule in candidates)
    shortened = next(filter(_fits, jobs), None)
    if shortened is None:
        return config, ""
    form = f"is that of {resume_point[0].name}" if shortened.lr_scheduler in saved and resume_point else "is shortened"
    before, after = vars(config.lr_scheduler), vars(shortened.lr_scheduler)
    differing = [key for key, value in before.items() if value != after[key]]
    changes = [f"lr_scheduler.{key} {show(before[key])} -> {show(after[key])}" for key in differing]
    end = f"{ends[0]} = {show(command_line.values[ends[0]])}"
    notice = f"a trial run by {end}: the job's schedule does not fit, and {form}: {', '.join(changes)}"
    return shortened, notice


def _saved_schedules(shape: LRScheduler, saved_job: dict[str, Any]) -> list[LRScheduler]:
    """Return the forms of a schedule that a resume accepts: the checkpoint's, for this run's steps or for as many.

    Other options than its lengths stay the job's: a resume refuses their change.
    """
    job = saved_job.get("job")
    if not isinstance(job, dict):
        return []
    lengths = ("warmup_steps", "decay_ratio", "total_steps")
    steps = saved_value(job, STEPS, NO_LIMIT)
    try:
        same = replace(shape, **{key: saved_value(job, f"lr_scheduler.{key}", getattr(shape, key)) for key in lengths})
        return [same] if same.total_steps or steps == NO_LIMIT else [same, replace(same, total_steps=steps)]
    except ValidationError:  # a resume reports what it cannot use of a checkpoint
        return []


def _shorter(shape: LRScheduler, steps: int, of_files: Values) -> list[LRScheduler]:
    """Return shorter forms of a schedule, for a run of `steps`, the most similar first.

    A warmup keeps its share of the run. Cycles cannot be shortened, so a run with them has the first steps of the
    files' schedule.
    """
    file_steps = of_files.get(STEPS, Training().steps) if not any(map(of_files.get, OTHER_ENDS)) else None
    if shape.decay_type in (JAGGED, CYCLICAL):
        return [] if file_steps is None else [replace(shape, total_steps=file_steps)]
    warmup = shape.warmup_steps
    if isinstance(warmup, int):
        share = None if file_steps is None else min(max(1, round(warmup * steps / file_steps)), steps - 1)
        warmup = share if warmup else 0
    candidates = [replace(shape, warmup_steps=warmup), replace(shape, warmup_steps=warmup, decay_ratio=None)]
    candidates = [replace(shape, decay_ratio=None), *candidates] if shape.warmup_steps in (None, 0) else candidates
    return [*candidates, replace(shape, warmup_steps=None, decay_ratio=None)]


def _fits(config: JobConfig) -> bool:
    """Return True if the schedule can be built, or nothing can be said because of an unknown name."""
    facts, faults = without_unknown_names(Facts(ResolvedJob(config)))
    return bool(faults) or not judge(facts, [schedule_can_be_built])


def fewest_ranks(options: Parallelism) -> int:
    """Return the smallest number of ranks that these degrees allow."""
    cp, tp, ep = options.context_parallel_degree, options.tensor_parallel_degree, options.expert_parallel_degree
    product = max(1, options.data_parallel_shard_degree) * options.data_parallel_replicate_degree
    product *= cp * tp * options.pipeline_parallel_degree
    # the shards that expert parallel needs in addition to cp and tp
    return product * (ep // gcd(ep, cp * tp)) if options.data_parallel_shard_degree == -1 else product
