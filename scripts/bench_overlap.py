"""Measure the gain of overlap in pipeline schedules: compute and all-to-alls only sleep, so two cores are enough.

    python scripts/bench_overlap.py                       the table of docs/dualpipev.md, about ten minutes
    python scripts/bench_overlap.py --a 1 --policies none full_keep_comm --repeats 1

Attention and experts take one unit each for forward, input gradients and weight gradients. An all-to-all takes `a`
units on a channel that carries one at a time, as a network card would. Everything else is the real training code:
stages, segments, recompute, schedules, and sends over gloo. Ratios are to ZBVZeroBubble on the same stages and policy,
once without overlap and once with its gaps filled with weight gradients.
"""

import argparse
import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from torchtitan.parallelisms.pipeline.actions import stage_ranks
from torchtitan.parallelisms.pipeline.overlap.exchange import SplitSizes
from torchtitan.parallelisms.pipeline.overlap.segments import (
    CountExchange,
    Program,
    RecomputePolicy,
    RowExchange,
    Segment,
)
from torchtitan.parallelisms.pipeline.overlap.stage import SegmentedSchedule, SegmentedStage
from torchtitan.parallelisms.pipeline.tables import build_table

RUNS = {
    "ZBV": ("ZBVZeroBubble", False),
    "ZBV, gaps filled": ("ZBVZeroBubble", True),
    "DualPipeV": ("DualPipeV", False),
    "DualPipeV + overlap": ("DualPipeV", True),
}
SHAPE = (4, 8)


class SleepingBackward(torch.autograd.Function):
    """An identity whose backward sleeps for `seconds`."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


class Channel:
    """A transport that carries one all-to-all at a time, in order of issue, and returns the rows that were sent."""

    size = 2

    def __init__(self, seconds: float):
        self.seconds, self.free = seconds, 0.0

    def issue(self, rows, send, receive):
        self.free = max(self.free, time.perf_counter()) + self.seconds
        return Arrival(rows, self.free)

    def issue_counts(self, counts):
        return Arrival(SplitSizes(counts[None], [], []), 0.0)


class Arrival:
    """A result that can be read from time `at` on."""

    def __init__(self, value, at: float):
        self.value, self.at = value, at

    def wait(self):
        time.sleep(max(0.0, self.at - time.perf_counter()))
        return self.value


class Layers(nn.Module):
    """A stage of `number` blocks with sleeping segments in place of attention and experts."""

    def __init__(self, number: int, unit: float, is_last: bool):
        super().__init__()
        self.unit, self.is_last = unit, is_last
        self.weights = nn.ParameterList(torch.zeros(SHAPE) for _ in range(2 * number))

    def work(self, weight):
        def run(meta, x):
            time.sleep(self.unit)
            return SleepingBackward.apply(x, self.unit) + SleepingBackward.apply(weight, self.unit)

        return run

    @staticmethod
    def route(meta, h):
        meta.once("counts", lambda: torch.zeros(2, dtype=torch.long))
        return h * 1

    def programs(self):
        programs = []
        for layer in range(len(self.weights) // 2):
            attention, experts = (self.work(weight) for weight in self.weights[2 * layer : 2 * layer + 2])
            steps = (
                Segment("attention", attention, ("x",), ("h",)),
                Segment("route", self.route, ("h",), ("xs",), light=True),
                CountExchange(),
                RowExchange("dispatch", "xs", "y"),
                Segment("experts", experts, ("y",), ("z",)),
                RowExchange("combine", "z", "zc", back=True),
                Segment("rest", lambda meta, h, zc: h + zc, ("h", "zc"), ("out",), light=True),
            )
            programs.append(Program(f"layers.{layer}", steps))
        if self.is_last:
            loss = Segment("loss", lambda meta, x: x.sum(), ("x",), ("out",), light=True)
            programs.append(Program("head", (loss,), recompute=False))
        return programs


def build(run: str, policy: str, args: argparse.Namespace, a: float) -> SegmentedSchedule:
    """Build the schedule of a run with this rank's stages."""
    name, overlap = RUNS[run]
    table = build_table(name, args.p, args.m, 2, overlap=overlap)
    hidden = torch.empty(SHAPE, device="meta", requires_grad=True)
    stages = []
    channel = Channel(a * args.unit)  # one for both stages of the rank
    for index, owner in sorted(stage_ranks(table).items()):
        if owner == dist.get_rank():
            is_last = index == 2 * args.p - 1
            layers = Layers(args.layers, args.unit, is_last)
            stage = SegmentedStage(
                layers,
                index,
                2 * args.p,
                torch.device("cpu"),
                input_args=hidden,
                output_args=torch.empty((), device="meta", requires_grad=True) if is_last else hidden,
                group=dist.group.WORLD,
                programs=layers.programs(),
                context=lambda x: None,
                transport=channel,
                policy=RecomputePolicy(policy),
            )
            stages.append(stage)
    return SegmentedSchedule(stages, table, args.m, overlap)


def seconds(policy: str, args: argparse.Namespace, a: float) -> dict[str, float]:
    """Return the seconds of a step of each schedule, from a common start to the end of the last rank.

    Schedules take turns, and the minimum of the repeats counts, since other load can only prolong a sleep.
    """
    schedules = {run: build(run, policy, args, a) for run in RUNS}
    least = dict.fromkeys(RUNS, float("inf"))
    for _ in range(args.repeats):
        for run, schedule in schedules.items():
            dist.barrier()
            start = time.perf_counter()
            schedule.run(torch.zeros(args.m * SHAPE[0], SHAPE[1]), {}, 1)
            dist.barrier()
            least[run] = min(least[run], time.perf_counter() - start)
    return least


def main(rank: int, args: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.p)
    for a in args.a:
        for policy in args.policies:
            units = {run: value / args.unit for run, value in seconds(policy, args, a).items()}
            if rank == 0:
                best = units["DualPipeV + overlap"]
                print(
                    f"p={args.p} m={args.m} layers={args.layers} a={a:g} {policy}: "
                    + ", ".join(f"{run} {value:.0f}" for run, value in units.items())
                    + f" units; overlap / ZBV = {best / units['ZBV']:.3f}"
                    + f", / ZBV with gaps filled = {best / units['ZBV, gaps filled']:.3f}",
                    flush=True,
                )
    dist.destroy_process_group()
    os._exit(0)  # see torchtitan/process/exit.py


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--p", type=int, default=4, help="pipeline ranks")
    parser.add_argument("--m", type=int, default=16, help="microbatches")
    parser.add_argument("--layers", type=int, default=1, help="layers of a stage")
    parser.add_argument("--a", type=float, nargs="+", default=[1.0, 0.5], help="units that an all-to-all takes")
    parser.add_argument("--policies", nargs="+", default=["none", "full_keep_comm", "full"])
    parser.add_argument("--unit", type=float, default=0.02, help="seconds")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        spawn(main, (arguments, os.path.join(folder, "store")), nprocs=arguments.p)
