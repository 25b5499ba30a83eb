"""`torchtitan verify RUN --steps 3`: make random steps of a finished run again, and hold them against its records.

    torchtitan verify outputs/debug                            the end and two random places of the run
    torchtitan verify outputs/debug --steps 10 --seed 7
    torchtitan verify outputs/debug --under tp=1               on one device, within rounding

For someone who was given a run and its data, and wants to know that the one came from the other. Each chosen step is
made again with all steps between the checkpoint before it and the next one: logged values and the tensors of that
checkpoint have the same bits on the run's own plan on such processors, and are equal up to rounding on another.
"""

import random
import tempfile
from pathlib import Path

from torchtitan.checkpoint import layout
from torchtitan.checkpoint.layout import CheckpointError
from torchtitan.commands.command_lines import parse_command
from torchtitan.commands.generate import JOB
from torchtitan.commands.replay import origin_of, plan_of
from torchtitan.core.errors import JobError
from torchtitan.process.gloo_ranks import RankError
from torchtitan.training.replay import RunJob
from torchtitan.training.verification import (
    RunSegment,
    SegmentResult,
    checkpoint_faults,
    require_records,
    segment_of,
    verify_segment,
)

VERIFIED, DIFFERENT = 0, 1
"""Exit codes."""
MOST_LINES = 10
"""Differences of a segment that are shown."""


def main(argv: list[str]) -> int:
    options, job_args = parse_command("verify", argv)
    run = Path(options.run)
    if not RunJob.of_step(run, 1).file.is_file():
        raise JobError(f"{run}: no {JOB} in it; give the dump_folder of a run")
    records = require_records(run)
    if job_args and options.under is None:
        raise JobError(f"{job_args[0]}: allowed: of the section parallelism, with --under")
    under, unused = (None, None) if options.under is None else plan_of(options.under, job_args)
    if unused:
        raise JobError(f"--{next(iter(unused))}: allowed: options of the section parallelism")
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    steps = chosen_steps(sorted(records), options.steps, seed)
    print(f"{run}: {len(steps)} of {len(records)} logged steps, by --seed {seed}: {', '.join(map(str, steps))}")
    segments, is_right, tensors = dict[tuple[int, int], RunSegment](), True, 0
    for step in steps:
        try:
            segment = segment_of(run, step, max(records))
        except JobError as error:
            print(f"step {step}: cannot be made again: {error}")
            is_right = False
        else:
            segments[segment.first, segment.last] = segment
    if not segments:
        raise JobError(f"{run}: none of these steps can be made again")
    for fault in checkpoint_faults(run, max(records)):
        print(fault)
        is_right = False
    for segment in segments.values():
        try:
            require_undamaged(segment)
            with tempfile.TemporaryDirectory(prefix="torchtitan-") as folder:
                result = verify_segment(segment, records, under, Path(folder), options.timeout)
        except (RankError, CheckpointError) as error:
            print(f"{title(segment)}: cannot be made again: {error}")
            is_right = False
            continue
        print("\n".join([outcome(result), *(f"  {fault}" for fault in result.faults[:MOST_LINES])]), flush=True)
        is_right &= not result.faults
        tensors += result.tensors
    print(verdict(is_right, tensors))
    return VERIFIED if is_right else DIFFERENT


def verdict(is_right: bool, tensors: int) -> str:
    """Return the last line. `tensors`: of checkpoints that were compared."""
    if not is_right:
        return "NOT verified: not all of these steps follow from the run's job, data and checkpoints"
    return "verified" if tensors else "verified, by the records alone: the run has no checkpoint after these steps"


def chosen_steps(steps: list[int], count: int, seed: int) -> list[int]:
    """Return the last step and random other ones, `count` in all, in order: what is used of a run is its end."""
    *earlier, last = steps
    return sorted([*random.Random(seed).sample(earlier, min(count - 1, len(earlier))), last])


def require_undamaged(segment: RunSegment) -> None:
    """Raise CheckpointError for checkpoints of the segment whose files are not those that were written."""
    for folder in filter(None, (segment.start.folder, segment.saved)):
        manifest = layout.check_complete(folder)
        if damaged := layout.damaged_files(folder, manifest, sorted(manifest.files)):
            raise CheckpointError(f"{folder.name} is damaged: {', '.join(damaged)} (other content than was written)")


def title(segment: RunSegment) -> str:
    steps = f"steps {segment.first} to {segment.last}" if segment.first < segment.last else f"step {segment.last}"
    return f"{steps}, from {origin_of(segment.start)}"


def outcome(result: SegmentResult) -> str:
    """Return a line on a segment that was made again."""
    of_values, of_tensors = result.tolerances
    extent = f"{result.steps} logged step{'s' * (result.steps != 1)}"
    if result.tensors:
        extent += f" and {result.tensors} tensors of {result.segment.saved.name if result.segment.saved else ''}"
    measure = (
        "bit for bit" if not of_values else f"up to rounding ({of_values:g} of a value, {of_tensors:g} of a tensor)"
    )
    verdict = f"equal {measure}" if not result.faults else f"{len(result.faults)} differ"
    return f"{title(result.segment)}, on {result.plan}: {extent} {verdict}"
