"""`torchtitan estimate job.toml --world-size 8 --device cuda --memory 80GiB`: memory and communication per rank.

The command simulates a step of the job on tensors without values. It needs no GPU, no other rank, no compiler and no
data.
"""

import argparse
import sys
import traceback
from collections import defaultdict
from dataclasses import replace

import torch

from torchtitan.commands import rehearse
from torchtitan.commands.check import STEP_FAILED
from torchtitan.commands.command_lines import SPEEDS, USUAL_GPU, parse_command
from torchtitan.config.job import JobConfig
from torchtitan.core.errors import JobError, format_bytes
from torchtitan.core.hardware import Hardware, load_hardware
from torchtitan.core.progress_bar import waiting
from torchtitan.planner.answer import WAITED_FOR, predicted_step, step_line
from torchtitan.planner.estimate import Prediction, Remedy, flops_of_a_rank, predict, remedies, worst
from torchtitan.planner.memory.closed_form import fit
from torchtitan.planner.search import is_judged, memory_limit
from torchtitan.planner.time.messages import Links
from torchtitan.process.machine import limit_in_bytes
from torchtitan.process.ranks import likely_device
from torchtitan.process.workers import WorkerEnded
from torchtitan.rules import Device
from torchtitan.rules.loading import load_valid, without_resume

CUDA = "--cuda"
"""The option that makes this command `torchtitan rehearse`."""
NO_JOB = """\
torchtitan estimate: no job is given; give a file, a name of `torchtitan list jobs`, or options of a job, as in
  torchtitan estimate llama3_8b --world-size 8 --device cuda --memory 80GiB
  torchtitan estimate --model.name=qwen3 --model.flavor=8B"""
USUAL_MFU = 0.4
"""Share of the peak for `--tflops`."""
FITS, TOO_LARGE = 0, 1
"""Exit codes."""


def main(argv: list[str]) -> int:
    if CUDA in argv:
        return rehearse.main([argument for argument in argv if argument != CUDA])
    options, job_args = parse_options(argv)
    if not job_args:
        raise JobError(NO_JOB)
    facts = load_valid(job_args, options.world_size, options.device, is_judged, without_resume)
    job = facts.job
    memory = options.memory or allowed(job.config, options)
    try:
        with waiting("a step is rehearsed"):
            predictions = predict(job, options.traffic)
    except WorkerEnded:
        raise
    except JobError as error:  # the step refuses what no rule judges, in training too
        print(" ".join(str(error).split()), file=sys.stderr)
        return STEP_FAILED
    except Exception:  # the step would fail in training too, or this program is wrong: the traceback tells
        traceback.print_exc()
        return STEP_FAILED
    name = " + ".join(job.config.job.config_file) or "the default job"
    most, ranks = worst(predictions), f"{job.world_size} rank{'s' if job.world_size > 1 else ''} ({options.device})"
    print(f"{name} on {ranks}: {format_bytes(most.peak)} of tensors at most, in {most.moment}")
    print("\n".join(table(predictions)))
    if options.traffic:
        step = step_line(predicted_step(job, hardware_of(options)))
        print("\n".join([*traffic(most, flops_of_a_rank(job), options), *step]))
    if memory is None:
        return FITS
    message, fits = verdict(most, memory, options.device)
    print(message)
    if not fits and not options.no_remedies:
        with waiting("what would make it fit is rehearsed"):
            candidates = remedies(job, memory)
        print("\n".join(ways_out(candidates, memory)))
    return FITS if fits else TOO_LARGE


def parse_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of the command, filled in from the hardware, and the arguments of the job."""
    options, job_args = parse_command("estimate", argv)
    hardware = load_hardware(options.gpu or USUAL_GPU)
    kind = "cuda" if hardware.device_names else "cpu"
    if options.gpu and options.device not in (None, kind):
        raise JobError(f"--gpu: given {options.gpu}; allowed with --device {kind} only")
    options.device = options.device or (kind if options.gpu else likely_device())
    defaults = {
        "inside": hardware.machine_link.reached_bandwidth / 1e9,
        "outside": hardware.network_link.reached_bandwidth / 1e9,
        "machine": hardware.devices_per_machine,
        "tflops": USUAL_MFU * hardware.peak.bfloat16 / 1e12,
    }
    for name in SPEEDS:
        if getattr(options, name) is None:
            setattr(options, name, defaults[name])
        elif not options.traffic:
            raise JobError(f"--{name}: allowed with --traffic only")
    return options, job_args


def allowed(config: JobConfig, options: argparse.Namespace) -> float | None:
    """Return the bytes that a rank may use; None if neither the job nor a GPU, of --gpu or of this machine, sets a
    limit. Raises LimitError for a limit of the job beyond the memory of --gpu.
    """
    if options.gpu:
        return memory_limit(config, load_hardware(options.gpu))
    limit = config.memory.limit
    amount = None if limit is None else limit_in_bytes(limit)
    if options.device != "cuda" or amount is not None:
        return amount
    if not torch.cuda.is_available():
        return None
    share = 1 if limit is None else limit
    return float(share) * torch.cuda.get_device_properties(0).total_memory


def table(predictions: list[Prediction]) -> list[str]:
    """Format the memory by kind of tensor at the peak, largest first; with a pipeline, for several of its ranks."""
    kinds = sorted(
        {kind for prediction in predictions for kind in prediction.kinds},
        key=lambda kind: -worst(predictions).kinds.get(kind, 0),
    )
    largest = worst(predictions).peak
    sizes_by_kind = {kind: [prediction.kinds.get(kind, 0) for prediction in predictions] for kind in kinds}
    sizes_by_kind["together"] = [prediction.peak for prediction in predictions]
    rows = [(kind, [format_bytes(size, largest) for size in sizes]) for kind, sizes in sizes_by_kind.items()]
    if len(predictions) > 1:
        rows.insert(0, ("pipeline rank", [str(prediction.pipeline_rank) for prediction in predictions]))
    return [f"  {kind:20}{''.join(f'{size:>12}' for size in sizes)}" for kind, sizes in rows]


def traffic(of_rank: Prediction, flops: float, speeds: argparse.Namespace) -> list[str]:
    """Format the messages that a rank sends in a step, by mesh axis and kind, with the time of each in isolation.

    The last lines compare the slowest axis with the time to compute `flops`.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    hardware = hardware_of(speeds)
    links = Links.of(hardware)
    lines = [
        f"sent by rank {of_rank.rank} in a step, at {speeds.inside:g} GB/s in a machine of {speeds.machine:g} ranks"
    ]
    lines[0] += f" and {speeds.outside:g} GB/s between machines"
    for axis, kind in sorted({(axis, kind) for axis, kind, _ in of_rank.sent}):
        calls, size = (round(of_rank.sent[axis, kind, unit]) for unit in ("calls", "bytes"))
        near = len({rank // speeds.machine for rank in of_rank.groups[axis]}) == 1
        took = links.sent(kind, size, calls, of_rank.groups[axis]).seconds
        seconds[axis] += took
        place = "inside" if near else "between"
        lines.append(f"  {axis:13}{kind:15}{calls:8,} calls{format_bytes(size):>12}{took:9.3f} s {place}")
    computed = flops / 1e12 / speeds.tflops
    lines.append(f"  {'computes':28}{flops / 1e12:8,.1f} TFLOP{'':12}{computed:9.3f} s at {speeds.tflops:g} TFLOP/s")
    if seconds:
        axis, most = max(seconds.items(), key=lambda item: item[1])
        on_top = "which comes on top, as a rank waits for it in every layer where nothing hides it"
        hidden = axis not in WAITED_FOR and hardware.cores is None  # gloo sends with the cores that compute
        meanwhile = "there is time for it while the rank computes" if hidden else on_top
        where = meanwhile if most <= computed else "more than the rank computes"
        lines.append(f"the most time takes {axis}, {most / computed:.0%} of what computing takes: {where}")
        other_axes = [other for other in WAITED_FOR if seconds[other] and other != axis]
        lines += [f"{other} takes {seconds[other] / computed:.0%} of it, {on_top}" for other in other_axes]
    return lines


def hardware_of(speeds: argparse.Namespace) -> Hardware:
    """Return the hardware of --gpu with the speeds of the options."""
    hardware = load_hardware(speeds.gpu or USUAL_GPU)
    inside, outside = hardware.machine_link.reached_bandwidth, hardware.network_link.reached_bandwidth
    scaled = hardware.with_speeds(speeds.inside * 1e9 / inside, speeds.outside * 1e9 / outside)
    return replace(scaled, devices_per_machine=speeds.machine)


def verdict(most: Prediction, memory: float, device: Device) -> tuple[str, bool]:
    """Return a line on whether the job fits, and True if it counts as fitting, as for a plan."""
    low, high = most.reserved(device)
    text = fit(low, most.needed(device), memory)
    fits = text == "fits"
    if low == high:
        return f"{text} in {format_bytes(memory)}: needs {format_bytes(high)}", fits
    sizes = f"{format_bytes(low)} to {format_bytes(high)}, with allocator, libraries and communicators"
    return f"{text} in {format_bytes(memory)}: reserves {sizes}, like published runs where there is room", fits


def ways_out(candidates: list[Remedy], memory: float) -> list[str]:
    """Format the changes that make the job fit, one per line."""
    if not candidates:
        return ["no recompute and no smaller batch is left to try; give it more ranks to share the state"]
    lines = []
    for changes, needed in candidates:
        settings = " and ".join(
            f"{name} = {value if isinstance(value, int) else repr(value)}" for name, value in changes.items()
        )
        lines.append(f"fits with {settings.replace(chr(39), chr(34))}: {format_bytes(needed)}")
    if candidates[0][1] > memory:
        lines = [f"least of what was tried, {lines[0].removeprefix('fits ')}; give it more ranks to share the state"]
    return lines
