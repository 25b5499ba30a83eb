"""`torchtitan replay RUN --step N`: make one step of a run again on this machine, and look into it.

    torchtitan replay outputs/debug --step 120                 a spike or NaN at step 120
    torchtitan replay outputs/debug --step 120 --rank 3        the samples of one rank
    torchtitan replay outputs/debug --step 120 --under tp=2,pp=2

The step is made by one process under any plan of the run, from the newest checkpoint before it, or from the initial
weights; steps in between are made again first. It prints the samples with the highest losses as text, the loss of each
sample, the gradient norm of each parameter, the extremes of the activations of each block, and the first module that
produced a value that is not finite. Loss and gradient norm are compared with the run's: they have the same bits if the
run had one rank and no compilation on such a machine, and are equal up to rounding otherwise. Nothing is written.

With --under the step is made twice, on one device and on gloo ranks under that plan, both in float32, and compared:
loss, gradient norm, what each module returns and each gradient. The first tensor that differs is printed by its name.
"""

import argparse
import logging
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchtitan.commands.command_lines import parse_command
from torchtitan.commands.generate import JOB
from torchtitan.commands.preview import View
from torchtitan.config import manager
from torchtitan.config.options import ConfigError
from torchtitan.config.sections.model import Parallelism
from torchtitan.core.errors import JobError
from torchtitan.core.files import FileError
from torchtitan.job import ResolvedJob
from torchtitan.metrics.json_lines import METRICS, Record, read_records
from torchtitan.parallelisms.degrees import AXIS_OPTIONS, DEGREES
from torchtitan.process.gloo_ranks import RankError
from torchtitan.training.plan_replay import StepComparison, compare_under_plan, within
from torchtitan.training.replay import ReplayedStep, ReplaySample, ReplayStart, RunJob, ranks_of_sample

EQUAL, DIFFERENT = 0, 1
"""Exit codes of --under."""
DEFAULTS = {"timeout": 900.0, "rank": None, "samples": 3, "tokens": 200}
"""Of options that have an effect only with --under, the first one, or only without."""
MOST_LINES = 20
"""Samples, parameters or blocks in a table."""


def main(argv: list[str]) -> int:
    options, job_args = parse_command("replay", argv)
    settle(options)
    run = Path(options.run)
    run_job = RunJob.of_step(run, options.step)
    if not run_job.file.is_file():
        raise JobError(f"{run}: no {JOB} in it; give the dump_folder of a run")
    if options.under is not None:
        return replay_under(run_job, options, job_args)
    if job_args:
        raise JobError(f"{job_args[0]}: allowed: with --under; a step alone has the job of the run")
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


def settle(options: argparse.Namespace) -> None:
    """Give options that are absent their defaults. Raises JobError for one that would be ignored."""
    for name, default in DEFAULTS.items():
        preposition = "with" if name == "timeout" else "without"
        if getattr(options, name) is None:
            setattr(options, name, default)
        elif (options.under is None) == (preposition == "with"):
            raise JobError(f"--{name}: allowed: {preposition} --under")


def replay_under(run_job: RunJob, options: argparse.Namespace, job_args: list[str]) -> int:
    """Make the step under a plan and on one device, print how they differ, and return the exit code."""
    try:
        with tempfile.TemporaryDirectory(prefix="torchtitan-") as folder:
            plan, changed = plan_of(options.under, job_args)
            result = compare_under_plan(run_job, options.step, plan, changed, Path(folder), options.timeout)
    except RankError as error:
        print(f"step {options.step} of {run_job.run} under {degrees_text(options.under)}: {error}")
        return DIFFERENT
    record = logged_record(run_job.run, options.step)
    print("\n".join(comparison_lines(run_job, options.step, result, record)))
    return EQUAL if result.equal else DIFFERENT


def plan_of(degrees: Mapping[str, int], job_args: list[str]) -> tuple[Parallelism, dict[str, Any]]:
    """Return the section of a plan with these degrees by axis, and the other options of a command line."""
    _, layer = manager.parse_arguments(job_args)
    if faults := list(layer.all_faults()):
        raise ConfigError(faults)
    section = {AXIS_OPTIONS[axis]: degree for axis, degree in degrees.items()}
    if axes := [key for key in layer.values if key.removeprefix(DEGREES) in section]:
        raise JobError(f"--{axes[0]}: allowed: as an axis of --under, one of {', '.join(degrees)}")
    of_plan = {key.removeprefix(DEGREES): value for key, value in layer.values.items() if key.startswith(DEGREES)}
    return Parallelism(**section | of_plan), {k: v for k, v in layer.values.items() if not k.startswith(DEGREES)}


def degrees_text(degrees: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1) or "no parallelism"


def comparison_lines(run_job: RunJob, step: int, result: StepComparison, record: Record | None) -> Iterator[str]:
    """Yield lines about a step under a plan beside the same on one device."""
    job, start, (limit, of_tensors) = result.job, result.start, result.tolerances
    ranks, types = job.world_size, [one.config.training.mixed_precision_param for one in (job, run_job.job)]
    plan = degrees_text(job.layout.dims.all_degrees)
    yield f"step {step} of {run_job.run} under {plan}, on {ranks} gloo rank{'s' * (ranks > 1)}, from {origin_of(start)}"
    yield (
        f"  both in {types[0]} (the run: {types[1]}) and equal up to {limit:g}, tensors up to {of_tensors:g}: a plan "
        "adds the same terms in another order"
    )
    for name, (value, reference) in (("loss", result.loss), ("grad_norm", result.grad_norm)):
        verdict = "equal" if within(value, reference, limit) else "DIFFERS"
        against_run = comparison(value, name, record)
        yield f"  {name:<10} {value:<13.9g} one device {reference:<13.9g} {verdict}; {against_run}".rstrip("; ")
    yield f"  {'outputs':<10} {result.compared - len(result.outputs)} of {result.modules} modules return the same"
    gradients, differing = result.gradients, result.differing
    total = len(gradients) + len(result.missing) + len(result.partial)
    largest = max(gradients, key=lambda name: gradients[name].size, default="")
    note = f"; largest difference {gradients[largest].size:.2g} of its largest entry, {largest}" if largest else ""
    yield f"  {'gradients':<10} {len(gradients) - len(differing)} of {total} are the same{note}"
    if result.equal:
        yield "equal"
    if result.missing:
        yield f"no rank has a gradient of {result.missing[0]} ({len(result.missing)} in all)"
    if result.partial:
        yield f"only some ranks have a gradient of {result.partial[0]} ({len(result.partial)} in all)"
    if result.outputs:
        name, (value, reference) = next(iter(result.outputs.items()))
        sizes = f"root mean square {value:.6g}, one device {reference:.6g}"
        yield f"first tensor that differs, forward: the output of {name}: {sizes}"
    if differing:
        name, difference = next(iter(differing.items()))
        factor = "" if difference.ratio is None else f"; it is {difference.ratio:.6g} times one device's"
        yield f"first tensor that differs, backward: the gradient of {name}, by {difference.size:.2g}{factor}"


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


def origin_of(start: ReplayStart) -> str:
    return "the initial weights" if start.folder is None else f"the checkpoint of step {start.step}"


def heading(run: Path, step: int, result: ReplayedStep, record: Record | None) -> Iterator[str]:
    start = result.start
    yield f"step {step} of {run}, from {origin_of(start)}"
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
