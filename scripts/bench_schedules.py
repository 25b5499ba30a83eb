"""Compare the pipeline runtime with the simulator, with stages that sleep, on 4 ranks.

    python scripts/bench_schedules.py [--only NAME ...] [--milliseconds 40] [--runs 5] [--quick]

Forward, input gradient and weight gradient of a stage sleep for 40 ms each. 16 microbatches run, and the best of 5
makespans is divided by the simulated one. Sleeping takes no CPU, so 4 ranks overlap on 2 cores. The excess above 1 is
late wake-ups, the runtime and its messages; it is also printed per action of a rank. The script asserts that each
action ran once per microbatch. It needs an idle machine.
"""

import argparse
import json
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from bench_timing import ROOT, Goal, heading, row, torchrun
from torch import nn

from torchtitan.parallelisms.pipeline.actions import count_stages, stage_ranks
from torchtitan.parallelisms.pipeline.cut import SCHEDULES
from torchtitan.parallelisms.pipeline.runtime import Stage, TableSchedule
from torchtitan.parallelisms.pipeline.simulator import simulate
from torchtitan.parallelisms.pipeline.tables import build_table
from torchtitan.process.exit import exit_with

RANKS, MICROBATCHES, WIDTH = 4, 16, 8
IN_PAIRS = "DualPipeV in pairs"
NAMES = (*SCHEDULES, IN_PAIRS)


class Sleep(torch.autograd.Function):
    """The identity function with a backward that sleeps."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, kind: str, seconds: float, slept: Counter[str]) -> torch.Tensor:
        ctx.kind, ctx.seconds, ctx.slept = kind, seconds, slept
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        time.sleep(ctx.seconds)
        ctx.slept[ctx.kind] += 1
        return grad, None, None, None


class SleepingPart(nn.Module):
    """A stage: x [B, D] -> [B, D], or its sum in the last stage.

    I (input gradient) sleeps on the activation's path and W (weight gradient) on the weight's, so that each half of a
    split backward has one of them.
    """

    def __init__(self, seconds: float, is_first: bool, is_last: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.start = (
            nn.Parameter(torch.zeros(WIDTH)) if is_first else None
        )  # like an embedding, it makes x require a gradient
        self.seconds, self.is_last = seconds, is_last
        self.slept: Counter[str] = Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        self.slept["F"] += 1
        x = x if self.start is None else x + self.start
        x = Sleep.apply(x, "I", self.seconds, self.slept)
        x = x * Sleep.apply(self.weight, "W", self.seconds, self.slept)
        return x.sum() if self.is_last else x


def table_of(name: str, microbatches: int) -> list:
    return build_table(name.split()[0], RANKS, microbatches, overlap=name == IN_PAIRS)


def simulated(name: str, options: argparse.Namespace) -> float:
    """Return the simulated makespan in seconds, for stages that sleep equally long."""
    table = table_of(name, options.microbatches)
    return float(simulate(table).makespan) * count_stages(table) / RANKS * options.milliseconds / 1000


def measure(name: str, options: argparse.Namespace) -> list[float]:
    """Run a schedule on a rank; return seconds from the first start to the last end of all ranks without warm-up."""
    rank, table = dist.get_rank(), table_of(name, options.microbatches)
    num_stages, device = count_stages(table), torch.device("cpu")
    hidden, loss = torch.empty((1, WIDTH), device="meta").requires_grad_(), torch.empty((), device="meta")
    stages = []
    for index in sorted(stage for stage, owner in stage_ranks(table).items() if owner == rank):
        is_first, is_last = index == 0, index == num_stages - 1
        part = SleepingPart(options.milliseconds / 1000, is_first, is_last)
        shapes = {
            "input_args": hidden.detach() if is_first else hidden,
            "output_args": loss.requires_grad_() if is_last else hidden,
        }
        stages.append(Stage(part, index, num_stages, device, group=dist.group.WORLD, **shapes))
    schedule = TableSchedule(stages, table, options.microbatches)
    batch = torch.ones((options.microbatches, WIDTH))
    seconds = []
    for _ in range(options.runs + 1):
        for stage in stages:
            stage.submod.slept.clear()
        dist.barrier()
        span = [time.monotonic()]  # one clock for all processes of a machine
        schedule.run(batch, {}, 1)
        span.append(time.monotonic())
        for stage in stages:
            assert stage.submod.slept == dict.fromkeys("FIW", options.microbatches), (name, stage.submod.slept)
        spans: list = [None] * RANKS
        dist.all_gather_object(spans, span)
        seconds.append(max(end for _, end in spans) - min(start for start, _ in spans))
    return seconds[1:]


def worker(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measured = {name: measure(name, options) for name in options.only}
    if dist.get_rank() == 0:
        options.worker.write_text(json.dumps(measured))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    parser.add_argument("--milliseconds", type=float, default=40, help="length of each sleep of a stage (default: 40)")
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES, help="(default: 16)")
    parser.add_argument("--runs", type=int, default=5, help="number of runs; the best counts (default: 5)")
    parser.add_argument("--quick", action="store_true", help="short run to check that the script works")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.milliseconds, options.microbatches, options.runs = 1, 8, 1
    if options.worker:
        worker(options)
        return
    print(heading(threads=1), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "measured.json")
        options_to_pass = [f"--{name}={getattr(options, name)}" for name in ("milliseconds", "microbatches", "runs")]
        command = torchrun(RANKS, __file__, "--worker", str(answer), *options_to_pass, "--only", *options.only)
        subprocess.run(command, cwd=ROOT, check=True)
        measured = json.loads(answer.read_text())
    for name, seconds in measured.items():
        ideal = simulated(name, options)
        goal = None if options.quick else Goal("<=", 1.05)
        actions = max(len(actions) for actions in table_of(name, options.microbatches))
        note = f"best {min(seconds):.3f} s of {len(seconds)} runs up to {max(seconds):.3f} s; simulated {ideal:.3f} s"
        note += f"; {(min(seconds) - ideal) / actions * 1000:.1f} ms above it for each of {actions} actions"
        print(row(f"{name}: measured / simulated makespan", [min(seconds) / ideal], goal, note), flush=True)


if __name__ == "__main__":
    exit_with(main)
