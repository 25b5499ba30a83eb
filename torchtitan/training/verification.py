"""Make segments of a finished run again, from one checkpoint to the next, and hold them against what it recorded.

A segment is made by gloo ranks on the run's own plan, if it ran on processors, or on another one. Its logged steps are
compared with the records of the run, and its last state with the checkpoint that the run saved there. Data are read and
tokenized again; nothing of the run but its job and the checkpoint before the segment is used.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from torchtitan.adapters.interface import full_tensor
from torchtitan.checkpoint import layout
from torchtitan.checkpoint.layout import ADAPTER_STATE
from torchtitan.checkpoint.stored_tensors import compare_tensors, open_tensors
from torchtitan.checkpoint.tensors import model_tensors, optimizer_state
from torchtitan.config.job import JobConfig
from torchtitan.config.options import ConfigError
from torchtitan.config.sections.model import Parallelism
from torchtitan.core.errors import JobError
from torchtitan.launcher.run_folder import LAST_SAVE_FILE, RecordedPlan, jobs_of_steps, last_saved, plan_of_start
from torchtitan.metrics.json_lines import METRICS, Record, read_records
from torchtitan.process.gloo_ranks import run_on_ranks
from torchtitan.process.ranks import read_ranks
from torchtitan.rules import check
from torchtitan.training.replay import ONE_DEVICE, ReplayStart, RunJob, make_steps_before
from torchtitan.training.trainer import Trainer

COMPARED = ("loss", "grad_norm", "lr", "tokens")
ROUNDING = {"float32": (1e-4, 1e-2), "bfloat16": (5e-3, 1e-1)}
"""Type of the computation -> the largest relative difference of a logged value under another plan, and of a tensor
relative to its largest value: an optimizer may turn rounding into whole updates of weights whose gradient is nothing.
"""


@dataclass(frozen=True)
class RunSegment:
    """Steps of a run between two checkpoints, or to its end. `saved`: the checkpoint of `last`; None without one."""

    run_job: RunJob
    start: ReplayStart
    last: int
    saved: Path | None

    @property
    def first(self) -> int:
        return self.start.step + 1


@dataclass
class SegmentResult:
    """The differences of a segment that was made again. `tolerances`: of values and tensors; 0 for bit for bit."""

    segment: RunSegment
    plan: str
    tolerances: tuple[float, float]
    steps: int = 0
    tensors: int = 0
    """Of the saved state, with the numbers of the optimizers that are not tensors."""
    faults: list[str] = field(default_factory=list)


def steps_of_run(run: Path) -> dict[int, Record]:
    """Return the newest record of each step that a run has logged with a loss."""
    return {record["step"]: record for record in read_records(run / METRICS) if "loss" in record}


def segment_of(run: Path, step: int, newest_step: int) -> RunSegment:
    """Return the segment that a step is in: from the checkpoint before it to the next one, or to the newest step.

    It ends before the next start of the run, which may have had another job or plan: its checkpoint is deleted.
    Raises JobError if the step cannot be made again.
    """
    run_job = RunJob.of_step(run, step)
    start = run_job.find_start(step)
    complete, _ = layout.complete_steps(run / run_job.job.config.checkpoint.folder)
    saved = {number: path for path in complete if (number := layout.step_of(path.name) or 0) >= step}
    last = min(saved, default=max(newest_step, step))
    later_starts = [number for number, file in jobs_of_steps(run, step, last).items() if file != run_job.file]
    last = min(later_starts) - 1 if later_starts else last
    return RunSegment(run_job, start, last, saved.get(last))


def checkpoint_faults(run: Path, newest_step: int) -> Iterator[str]:
    """Yield a line on each checkpoint of a run that is incomplete, and on the one saved last if it is missing.

    Segments are made without these: a run whose checkpoints are worth nothing would still follow from its records.
    """
    checkpoints = run / RunJob.of_step(run, newest_step).job.config.checkpoint.folder
    complete, refused = layout.complete_steps(checkpoints)
    yield from (f"{checkpoint.folder.name} is incomplete: {checkpoint.reason}" for checkpoint in refused)
    name = last_saved(run)
    present = {path.name for path in [*complete, *(checkpoint.folder for checkpoint in refused)]}
    if name is not None and name not in present and not any(checkpoints.glob(f".aside-{name}-*")):
        yield f"{name}, which the run saved last by its {LAST_SAVE_FILE}, is missing"


def has_one_plan(segment: RunSegment) -> bool:
    """Return True if all starts that made steps of a segment had the plan of the last one."""
    files = jobs_of_steps(segment.run_job.run, segment.first, segment.last)
    return all(plan_of_start(file) == segment.start.plan for file in files.values())


def plan_of_run(run_job: RunJob, recorded: RecordedPlan) -> Parallelism:
    """Return the run's own plan, with the shards that it has left to the number of ranks."""
    section = run_job.job.config.parallelism
    return replace(section, data_parallel_shard_degree=recorded.degrees["dp_shard"])


def verify_segment(
    segment: RunSegment, records: Mapping[int, Record], under: Parallelism | None, folder: Path, limit: float
) -> SegmentResult:
    """Make a segment again and compare it. `under`: another plan than the run's; None for its own, if that ran on
    processors, else one device. `records`: of the run by step. Raises RankError, ConfigError.
    """
    run_job, recorded = segment.run_job, segment.start.plan
    is_of_run = under is None and recorded is not None and recorded.device == "cpu"
    plan = plan_of_run(run_job, recorded) if is_of_run and recorded is not None else under or ONE_DEVICE
    job = run_job.repeating_job(segment.start, folder, plan, {"data.cache_dir": str(folder / "data")})
    judged = job.with_options({"checkpoint": run_job.job.config.checkpoint})
    if faults := check(judged.config, job.world_size, "cpu"):
        raise ConfigError(faults)
    is_exact = is_of_run and has_one_plan(segment) and not run_job.job.config.compile.enable
    tolerances = (0.0, 0.0) if is_exact else ROUNDING[job.config.training.mixed_precision_param]
    degrees = [f"{axis}={size}" for axis, size in job.layout.dims.all_degrees.items() if size > 1]
    result = SegmentResult(segment, ", ".join(degrees) or "one device", tolerances)
    shares = run_on_ranks(
        job.world_size,
        repeat_segment,
        job.config,
        segment.last,
        segment.saved,
        tolerances[1],
        limit=limit,
        threads=_threads(job.world_size),
    )
    repeated = steps_of_run(folder)
    for step in sorted(records):
        if segment.first <= step <= segment.last:
            result.steps += 1
            result.faults += value_faults(step, records[step], repeated.get(step, {}), tolerances[0])
    if segment.saved is not None:
        result.tensors = len({name for names, _ in shares for name in names})
        result.faults += tensor_faults(segment.saved, shares)
    return result


def _threads(ranks: int) -> int:
    """Return the threads of a rank, as the launcher gives them to one of a run."""
    if ranks == 1 or "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    return max(1, (os.cpu_count() or 1) // ranks)


def value_faults(step: int, record: Record, repeated: Record, tolerance: float) -> Iterator[str]:
    """Yield a line for each value of a step's record that differs from the one made again."""
    for name in COMPARED:
        logged, value = record.get(name), repeated.get(name)
        if name not in record or (name == "grad_norm" and logged is None):  # the run has not computed it
            continue
        is_close = logged == value
        if isinstance(logged, int | float) and isinstance(value, int | float):
            is_close |= abs(logged - value) <= tolerance * abs(value)
        if not is_close:
            yield f"step {step}: {name} {logged} in {METRICS}, {value} made again"


def tensor_faults(saved: Path, shares: Sequence[tuple[Collection[str], Mapping[str, str]]]) -> Iterator[str]:
    """Yield a line on the tensors of a checkpoint that differ from those of all ranks, or that these lack."""
    names = {name for of_rank, _ in shares for name in of_rank}
    faults = {name: fault for _, faults in shares for name, fault in faults.items()}
    stored = [*layout.read_manifest(saved).tensors, *layout.read_state(saved)["optimizer"]]
    absent = [name for name in stored if name not in names]
    absent = [name for name in absent if not name.startswith(ADAPTER_STATE)]
    if absent:
        yield f"{saved.name}: {absent[0]} is in the checkpoint and not in the model made again ({len(absent)} in all)"
    if faults:
        first = min(faults.values())
        yield f"{saved.name}: {len(faults)} of {len(names)} tensors differ (saved -> made again): {first}"


def repeat_segment(
    config: JobConfig, last: int, saved: Path | None, tolerance: float
) -> tuple[list[str], dict[str, str]]:
    """Make the steps up to `last` on this rank, and compare its tensors with a checkpoint. Return the names of those
    that are in it, and a description of each that differs.
    """
    trainer = Trainer(config, read_ranks())
    try:
        make_steps_before(trainer, last)
        trainer.step(trainer.fetch())
        return ([], {}) if saved is None else _compare_state(trainer, saved, tolerance)
    finally:
        trainer.metrics.close()
        trainer.loader.close()
        trainer.validator.close()


def _compare_state(trainer: Trainer, saved: Path, tolerance: float) -> tuple[list[str], dict[str, str]]:
    parts = trainer.model.parts
    of_optimizers, numbers = optimizer_state(parts, trainer.optimizers)
    tensors: dict[str, Any] = model_tensors(parts) | of_optimizers
    names, faults = [], {}
    with open_tensors("native", saved) as stored:
        for name in [name for name in tensors if name in set(stored.names)]:
            names.append(name)
            difference = compare_tensors(name, stored.read(name), full_tensor(tensors[name]).cpu(), tolerance)
            if difference is not None:
                faults[name] = str(difference)
    saved_numbers = layout.read_state(saved)["optimizer"]
    for name, number in numbers.items():
        names.append(name)
        if name not in saved_numbers:
            faults[name] = f"{name}: absent -> {number}"
        elif not _are_equal(saved_numbers[name], number, tolerance):
            faults[name] = f"{name}: {saved_numbers[name]} -> {number}"
    return names, faults


def _are_equal(saved: Any, repeated: Any, tolerance: float) -> bool:
    """Compare two numbers or flags of an optimizer: those that count steps or decide exactly, under any plan."""
    if isinstance(saved, float) and isinstance(repeated, float):
        return saved == repeated or abs(saved - repeated) <= tolerance * max(abs(saved), abs(repeated))
    return type(saved) is type(repeated) and saved == repeated


def require_records(run: Path) -> dict[int, Record]:
    """Return `steps_of_run`. Raises JobError for a folder without logged steps."""
    try:
        records = steps_of_run(run)
    except OSError:
        records = {}
    if not records:
        raise JobError(f"{run}: no logged step in its {METRICS}; give the dump_folder of a run")
    return records
