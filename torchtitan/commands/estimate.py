"""`torchtitan estimate job.toml --world-size 8 --device cuda --memory 80GiB`: what a rank needs of memory, and sends.

A step of the job is rehearsed on tensors without values: nothing else is needed, no GPU, no other rank, no compiler and
no data.
"""

import argparse
import re
from collections import Counter
from dataclasses import replace

import torch

from torchtitan.commands.check import fewest_ranks
from torchtitan.config import manager
from torchtitan.config.job import JobConfig
from torchtitan.config.options import ConfigError, hint
from torchtitan.core.errors import JobError, in_units
from torchtitan.core.progress_bar import waiting
from torchtitan.planner.estimate import BESIDE, Prediction, Remedy, flops_of_a_rank, predict, remedies, worst
from torchtitan.process.machine import amount_of
from torchtitan.process.ranks import likely_device
from torchtitan.rules import Device, check

UNITS = {"MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
TO_BE_FETCHED = (
    *("model.tokenizer_path", "training.dataset", "training.sources", "validation.", "data."),
    *("checkpoint.", "job.", "metrics.", "profiling.", "adapter.initial_path"),
)
"""How the names of options begin whose faults keep a job from starting, but not from being rehearsed."""
SPEEDS = {
    "inside": (350.0, "GB/s that a rank sends to others of its machine"),
    "outside": (45.0, "GB/s that a rank sends to other machines"),
    "machine": (8, "ranks of a machine"),
    "tflops": (400.0, "TFLOP/s that a rank reaches: the peak of its matrix products times the MFU"),
}
"""Of --traffic: defaults, about those of eight H100 with NVLink and a network card each, at 40 % MFU; and help."""
WAITED_FOR = ("tp", "cp", "ep")
"""Axes of which the next product needs what is sent: hidden only by what docs/parallelism.md says of each."""
NO_JOB = """\
torchtitan estimate: no job is given; give a file, a name of `torchtitan list jobs`, or options of a job, as in
  torchtitan estimate llama3_8b --world-size 8 --device cuda --memory 80GiB
  torchtitan estimate --model.name=qwen3 --model.flavor=8B"""
FITS, TOO_LARGE = 0, 1
"""Exit codes."""


def main(argv: list[str]) -> int:
    options, rest = parse(argv)
    if not rest:
        raise JobError(NO_JOB)
    config = manager.load(rest)
    # nothing is gone on from: what else a run in the same folder has been is of no concern
    config = replace(config, job=replace(config.job, clean_start="always"))
    world_size = options.world_size or fewest_ranks(config)
    faults = [fault for fault in check(config, world_size, options.device) if not fault.key.startswith(TO_BE_FETCHED)]
    if faults:
        raise ConfigError(faults)
    with waiting("a step is rehearsed"):
        found = predict(config, world_size, options.device, options.traffic)
    name = " + ".join(config.job.config_file) or "the default job"
    most, ranks = worst(found), f"{world_size} rank{'s' if world_size > 1 else ''} ({options.device})"
    print(f"{name} on {ranks}: {in_units(most.peak)} of tensors at most, in {most.moment}")
    print("\n".join(table(found)))
    if options.traffic:
        print("\n".join(traffic(most, flops_of_a_rank(config, world_size), options)))
    memory = options.memory or allowed(config, options.device)
    if memory is None:
        return FITS
    told, fits = verdict(most, memory, options.device)
    print(told)
    if not fits and not options.no_remedies:
        with waiting("what would make it fit is rehearsed"):
            tried = remedies(config, world_size, options.device, memory)
        print("\n".join(ways_out(tried, memory)))
    return FITS if fits else TOO_LARGE


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options of this command, and what is left for the job."""
    parser = argparse.ArgumentParser(
        prog="torchtitan estimate",
        usage="torchtitan estimate job.toml [--world-size N] [--device cpu|cuda] [--memory SIZE] [--no-remedies] "
        "[--traffic] [--section.key value]",
        description="Foretell what a rank of a job needs of memory, whether it fits, and what it sends.",
        epilog=f"Exit code: {FITS} if it fits or nobody asks, {TOO_LARGE} if it does not, 2 for a job with faults.",
        allow_abbrev=False,
    )
    ranks = "ranks that it is to run on (default: as few as its degrees of parallelism need)"
    parser.add_argument("--world_size", "--world-size", type=_count, metavar="N", help=ranks)
    device = "what the ranks compute on, which need not be here (default: what this machine has)"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=likely_device(), help=device)
    memory = "what a rank has, with a unit as in 80GiB (default: memory.limit, or this machine's GPU)"
    parser.add_argument("--memory", type=_bytes, metavar="SIZE", help=memory)
    tried = "leave out what would make it fit, of which each change takes a rehearsal of its own"
    parser.add_argument("--no_remedies", "--no-remedies", action="store_true", help=tried)
    sent = "what a rank sends in a step too, along which axis, and how long it takes beside what it computes"
    parser.add_argument("--traffic", action="store_true", help=sent)
    for name, (value, words) in SPEEDS.items():
        told, kind = f"{words} (default: {value:g})", _count if isinstance(value, int) else _positive
        parser.add_argument(f"--{name}", type=kind, help=told)
    options, rest = parser.parse_known_args(argv)
    for name, (value, _) in SPEEDS.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
        elif not options.traffic:
            parser.error(f"--{name}: given without --traffic, of which it is; add that")
    for name in (word.partition("=")[0] for word in rest if word.startswith("--")):
        if "." not in name:  # those of a job have a section
            parser.error(f"no option {name}; {hint(name, [f'--{known}' for known in vars(options)])}".rstrip("; "))
    files = [word for word in rest[:1] if not word.startswith("--")]
    return options, ["--job.config_file", *rest] if files else rest


def _count(text: str) -> int:
    if text.isascii() and text.isdecimal() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"given {text!r}; allowed: a whole number >= 1")


def _positive(text: str) -> float:
    if re.fullmatch(r"[0-9]{1,9}(?:\.[0-9]{1,9})?", text) and float(text) > 0:
        return float(text)
    raise argparse.ArgumentTypeError(f"given {text!r}; allowed: a number above 0")


def _bytes(text: str) -> float:
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([MGT]i?B)", text)
    if found and float(found[1]) > 0:
        return float(found[1]) * UNITS[found[2]]
    raise argparse.ArgumentTypeError(f"given {text!r}; allowed: a number with one of {', '.join(UNITS)}, as 80GiB")


def allowed(config: JobConfig, device: str) -> float | None:
    """Bytes that the job may take of this machine's GPU; None where it does not say and there is none."""
    amount = None if config.memory.limit is None else amount_of(config.memory.limit)
    if device != "cuda" or amount is not None:
        return amount
    if not torch.cuda.is_available():
        return None
    share = 1 if config.memory.limit is None else config.memory.limit
    return float(share) * torch.cuda.get_device_properties(0).total_memory


def table(found: list[Prediction]) -> list[str]:
    """Kinds of tensors at the highest moment, the largest first; of a pipeline, for two of its ranks."""
    kinds = sorted({kind for each in found for kind in each.kinds}, key=lambda kind: -worst(found).kinds.get(kind, 0))
    rows = [(kind, [in_units(each.kinds.get(kind, 0)) for each in found]) for kind in kinds]
    rows.append(("together", [in_units(each.peak) for each in found]))
    if len(found) > 1:
        rows.insert(0, ("pipeline rank", [str(each.pipeline_rank) for each in found]))
    return [f"  {kind:20}{''.join(f'{size:>12}' for size in sizes)}" for kind, sizes in rows]


def traffic(of_rank: Prediction, flops: float, speeds: argparse.Namespace) -> list[str]:
    """What a rank sends in a step, by axis of the mesh and kind of message, with the time each takes by itself; and
    what of all that takes the most, beside the time in which the rank computes `flops`.
    """
    seconds: Counter[str] = Counter()
    lines = [
        f"sent by rank {of_rank.rank} in a step, at {speeds.inside:g} GB/s in a machine of {speeds.machine:g} ranks"
    ]
    lines[0] += f" and {speeds.outside:g} GB/s between machines"
    for axis, kind in sorted({(axis, kind) for axis, kind, _ in of_rank.sent}):
        calls, size = (round(of_rank.sent[axis, kind, unit]) for unit in ("calls", "bytes"))
        near = len({rank // speeds.machine for rank in of_rank.groups[axis]}) == 1
        took = size / 1e9 / (speeds.inside if near else speeds.outside)
        seconds[axis] += took
        place = "inside" if near else "between"
        lines.append(f"  {axis:13}{kind:15}{calls:8,} calls{in_units(size):>12}{took:9.3f} s {place}")
    computed = flops / 1e12 / speeds.tflops
    lines.append(f"  {'computes':28}{flops / 1e12:8,.1f} TFLOP{'':12}{computed:9.3f} s at {speeds.tflops:g} TFLOP/s")
    if seconds:
        axis, most = seconds.most_common(1)[0]
        on_top = "which comes on top, as a rank waits for it in every layer where nothing hides it"
        meanwhile = on_top if axis in WAITED_FOR else "there is time for it while the rank computes"
        where = meanwhile if most <= computed else "more than the rank computes"
        lines.append(f"the most time takes {axis}, {most / computed:.0%} of what computing takes: {where}")
        others = [other for other in WAITED_FOR if seconds[other] and other != axis]
        lines += [f"{other} takes {seconds[other] / computed:.0%} of it, {on_top}" for other in others]
    return lines


def verdict(most: Prediction, memory: float, device: Device) -> tuple[str, bool]:
    fits = most.needed(device) <= memory
    beside = f", with {BESIDE[device]:.0%} beside tensors for allocator, libraries and communicators" * bool(
        BESIDE[device]
    )
    told = f"{'fits' if fits else 'does not fit'} in {in_units(memory)}: needs {in_units(most.needed(device))}"
    return told + beside, fits


def ways_out(found: list[Remedy], memory: float) -> list[str]:
    """What makes it fit, a line each."""
    if not found:
        return ["no recompute and no smaller batch is left to try; give it more ranks to share the state"]
    lines = []
    for changes, needed in found:
        words = " and ".join(
            f"{name} = {value if isinstance(value, int) else repr(value)}" for name, value in changes.items()
        )
        lines.append(f"fits with {words.replace(chr(39), chr(34))}: {in_units(needed)}")
    if found[0][1] > memory:
        lines = [f"least of what was tried, {lines[0].removeprefix('fits ')}; give it more ranks to share the state"]
    return lines
