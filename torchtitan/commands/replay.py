"""`torchtitan replay RUN --step N`: make one step of a run again on this machine, and look into it.

    torchtitan replay outputs/debug --step 120                 a spike or NaN at step 120
    torchtitan replay outputs/debug --step 120 --rank 3        the samples of one rank

The step is made by one process under any plan of the run, from the newest checkpoint before it, or from the initial
weights; steps in between are made again first. It prints the samples with the highest losses as text, the loss of each
sample, the gradient norm of each parameter, the extremes of the activations of each block, and the first module that
produced a value that is not finite. Loss and gradient norm are compared with the run's: they have the same bits if the
run had one rank and no compilation on such a machine, and are equal up to rounding otherwise. Nothing is written.
"""

import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan.commands.command_lines import parse_command
from torchtitan.commands.generate import JOB
from torchtitan.commands.preview import View
from torchtitan.core.errors import JobError
from torchtitan.core.files import FileError
from torchtitan.job import ResolvedJob
from torchtitan.metrics.json_lines import METRICS, Record, read_records
from torchtitan.training.replay import ReplayedStep, ReplaySample, ReplayStart, RunJob, ranks_of_sample

MOST_LINES = 20
"""Samples, parameters or blocks in a table."""


def main(argv: list[str]) -> int:
    options, _ = parse_command("replay", argv)
    run = Path(options.run)
    run_job = RunJob.of_step(run, options.step)
    if not run_job.file.is_file():
        raise JobError(f"{run}: no {JOB} in it; give the dump_folder of a run")
    job, record = run_job.job, logged_record(run, options.step)
    if record is not None and job.config.optimizer.early_step_in_backward:
        record.pop("grad_norm", None)  # null, as the run has not computed it
    if options.rank is not None:  # before the steps in between, which may take hours
        check_rank(options.rank, run_job.find_start(options.step))
    with only_errors():
        result = run_job.replay(options.step, lambda line: print(line, file=sys.stderr, flush=True))
    samples = samples_of_rank(result, options.rank)
    lines = [*heading(run, options.step, result, record), *findings(result)]
    lines += [*sample_lines(job, result, samples, options.samples, options.tokens)]
    lines += [*gradient_lines(result), *block_lines(result)]
    encoding = sys.stdout.encoding or "utf-8"
    print("\n".join(lines).encode(encoding, "replace").decode(encoding))
    return 0


@contextmanager
def only_errors() -> Iterator[None]:
    """Silence the log of the trainer, which describes a run that saves nothing."""
    log = logging.getLogger("torchtitan")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def logged_record(run: Path, step: int) -> Record | None:
    """Return the record of a step that the run logged; None if there is none."""
    try:
        records = read_records(run / METRICS)
    except (OSError, FileError):
        return None
    return next((record for record in reversed(records) if record["step"] == step and "loss" in record), None)


def check_rank(rank: int, start: ReplayStart) -> None:
    """Raise JobError for a rank that the start of the run lacked, or if its ranks are not known."""
    dims = start.dims()
    if dims is None:
        raise JobError(f"--rank: given {rank}; allowed: in a run that recorded its plan or a checkpoint; leave it out")
    if rank >= dims.world_size:
        raise JobError(f"--rank: given {rank}; allowed: 0 to {dims.world_size - 1}, the ranks of the run")


def samples_of_rank(result: ReplayedStep, rank: int | None) -> list[ReplaySample]:
    """Return the samples of the step, or those that a rank of the run read."""
    dims = result.start.dims()
    if rank is None or dims is None:
        return result.samples
    return [sample for sample in result.samples if rank in ranks_of_sample(sample.number, dims)]


def heading(run: Path, step: int, result: ReplayedStep, record: Record | None) -> Iterator[str]:
    start = result.start
    origin = "the initial weights" if start.folder is None else f"the checkpoint of step {start.step}"
    yield f"step {step} of {run}, from {origin}"
    for name, value in (("loss", result.loss), ("grad_norm", result.grad_norm)):
        yield f"  {name:<10} {value:<20.9g} {comparison(value, name, record)}".rstrip()


def comparison(value: float, name: str, record: Record | None) -> str:
    """Compare a value with the one that the run logged."""
    if record is None:
        return "the run did not log this step"
    if name not in record:
        return ""
    logged = record[name]
    if logged is None:  # NaN and infinity, which JSON lacks
        return "the run logged a value that is not finite"
    if logged == value:
        return "equal to the run's, bit for bit"
    relative = abs(value - logged) / max(abs(logged), 1e-30)
    return f"the run's {logged:.9g}, relative difference {relative:.2g}"


def findings(result: ReplayedStep) -> Iterator[str]:
    """Yield lines on values that are not finite, in the order of the step."""
    if result.bad_weights:
        names = ", ".join(result.bad_weights[:5])
        yield f"not finite before the step: {names}, {len(result.bad_weights)} weights in all"
    if result.first_output:
        origin = "its inputs are finite" if result.inputs_are_finite else "an input of it is not finite already"
        yield f"first output that is not finite: {result.first_output}; {origin}"
    elif result.first_gradient:
        yield f"all outputs are finite; first gradient that is not: of the output of {result.first_gradient}"
    elif not math.isfinite(result.grad_norm):
        yield "all outputs and their gradients are finite; the gradient of a parameter is not, see below"


def sample_lines(
    job: ResolvedJob, result: ReplayedStep, samples: list[ReplaySample], count: int, tokens: int
) -> Iterator[str]:
    """Yield a table of the samples with the highest losses, those that are not finite first, and `count` as text."""
    ordered = sorted(samples, key=lambda sample: (math.isfinite(sample.loss), -sample.loss, sample.number))
    dims = result.start.dims()
    yield f"\n{len(samples)} samples, highest loss first"
    for sample in ordered[:MOST_LINES]:
        ranks = "" if dims is None else f"  rank {ranks_of_sample(sample.number, dims)[0]}"
        yield f"  sample {sample.number:<6} loss {sample.loss:<12.6g} {sample.tokens} tokens with a loss{ranks}"
    view = View(
        job.tokenizer(),
        tokens,
        ids=False,
        colour=False,
        labels=job.model.spec.labels,
        classes=job.config.task.labels,
        packs=job.model.spec.whole_records,
    )
    for sample in ordered[:count]:
        for row in sample.rows:
            yield from view.sample(sample.number, {name: values.tolist() for name, values in row.items()})


def gradient_lines(result: ReplayedStep) -> Iterator[str]:
    ordered = sorted(result.norms.items(), key=lambda item: (math.isfinite(item[1]), -item[1]))
    yield f"\ngradient norms of {len(ordered)} parameters, largest first"
    for name, norm in ordered[:MOST_LINES]:
        yield f"  {norm:<12.6g} {name}"


def block_lines(result: ReplayedStep) -> Iterator[str]:
    yield "\nactivations by block: smallest and largest output"
    for name, extremes in result.blocks.items():
        note = f"  {extremes.not_finite} not finite" if extremes.not_finite else ""
        yield f"  {name:<12} {extremes.low:<12.6g} {extremes.high:<12.6g}{note}".rstrip()
