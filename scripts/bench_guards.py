"""Measure the cost of launcher, watchdog, lock and guards per step of the debug model, on two cores.

    python scripts/bench_guards.py [--ranks 1 2] [--pairs 20] [--agreement] [--checksums] [--aa] [--quick]

The ranks of a job run under the real launcher, which holds the folder's lock, watches for hangs and could restart them.
In each rank two trainers take turns step by step. One sends heartbeats, judges every step (guard.non_finite and
guard.spike = skip) and compares its replicas every 100 steps. The other does none of it, and the launcher is stopped
(SIGSTOP) during its turns. A comparison of replicas is also timed in every step and divided by 100. The lock costs
nothing once it is held. guard.shard_checksums has a separate row.

The measure is the CPU time of a rank, which other processes disturb least. The launcher's CPU time is printed as a
share of a core. The ratio of two steps resolves half a per cent on an idle machine only. So the CPU time within the
additional calls is measured in the same steps too, as a share of the step; this is exact on a busy machine.

Ranks agree on each step (valid tokens, a stop) during the step before. The script compares this for a small model with
ranks that agree at the start of a step, and measures how long the host waits for the agreement.
"""

import argparse
import dataclasses
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_timing import WARM_UP, Goal, Turns, heading, row, take_turns, throw_lines_away

from torchtitan import launch
from torchtitan.config import manager
from torchtitan.core.random_draws import local_part
from torchtitan.launcher.multi_node import Coordinator
from torchtitan.launcher.processes import SignalQueue
from torchtitan.launcher.run_folder import hold_lock, this_process
from torchtitan.process import distributed
from torchtitan.process.exit import exit_with
from torchtitan.process.ranks import read_ranks
from torchtitan.training.batches import Prefetcher
from torchtitan.training.trainer import Trainer

GOAL = Goal("<=", 1.005)
CHECKSUM_GOAL = Goal("<=", 1.01)
"""Above this cost the option stays off by default."""
INTERVAL = 100
JOB = {
    "job.config_file": "train_configs/debug_model.toml",
    "validation.enable": "false",
    "checkpoint.enable": "false",
    "metrics.plot": "false",
    "parallelism.data_parallel_shard_degree": 1,
}
QUICK = {"model.overrides": "{dim=64, n_layers=2, n_heads=4, n_kv_heads=4}", "training.seq_len": 32}
OFF = {"guard.replica_check_interval": 0}
ON = {"guard.non_finite": "skip", "guard.spike": "skip", "guard.replica_check_interval": INTERVAL}
OFTEN = {"guard.replica_check_interval": 1}
SUMS = OFF | {"guard.shard_checksums": "true"}
BEGIN_SUM = distributed.begin_sum_ints


def job_arguments(folder: Path, options: dict) -> list[str]:
    return [f"--{name}={value}" for name, value in (JOB | options | {"job.dump_folder": folder}).items()]


class CallTimer:
    """Measures the seconds spent within some calls, per step. The default clock is this process's CPU time."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self.clock = clock
        self.steps: list[float] = []

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self.clock()
            try:
                return call(*args, **kwargs)
            finally:
                self.steps[-1] += self.clock() - began

        return timed

    def shares(self, turns: Turns, steps_per_call: int = 1) -> list[float]:
        """Return for each repeat the calls' share of the other time in A's steps, divided by the steps per call."""
        call_seconds, step_seconds = self.steps[WARM_UP:], turns.cpu["A"][WARM_UP:]
        size = len(step_seconds) // turns.repeats
        parts = [slice(i * size, (i + 1) * size) for i in range(turns.repeats)]
        return [
            sum(call_seconds[part]) / (sum(step_seconds[part]) - sum(call_seconds[part])) / steps_per_call
            for part in parts
        ]


class AgreeAtStart(Prefetcher):
    """Lets ranks agree on a step when it begins; the host waits for them."""

    stopping = False

    def agree(self, stop: bool) -> int:
        self._current.begin(stop)
        return self._current.wait()


class Steps:
    """A trainer's loop that makes one step per call."""

    def __init__(self, folder: Path, options: dict, launched: bool, prefetcher: type[Prefetcher] = Prefetcher):
        ranks = read_ranks()
        ranks = ranks if launched else dataclasses.replace(ranks, launcher=None)
        self.trainer = Trainer(manager.load(job_arguments(folder, options)), ranks)
        self.trainer.metrics.start()
        self.launcher = None if launched or read_ranks().rank else read_ranks().launcher.pid
        self.trainer.prefetcher = prefetcher(self.trainer.preparer, self.trainer.prefetcher.count, 10**6)
        self.judging, self.comparing, self.waiting = CallTimer(), CallTimer(), CallTimer(time.perf_counter)
        self.trainer.enter = self.judging.wrap(self.trainer.enter)
        self.trainer.guards.reason_to_skip = self.judging.wrap(self.trainer.guards.reason_to_skip)
        self.trainer.guards.compare = self.comparing.wrap(self.trainer.guards.compare)
        self.summing = CallTimer()
        if (shards := self.trainer.guards.shards) is not None:
            shards.record, shards.changed = self.summing.wrap(shards.record), self.summing.wrap(shards.changed)

    def __call__(self) -> None:
        for timer in (self.judging, self.comparing, self.summing, self.waiting):
            timer.steps.append(0.0)
        distributed.begin_sum_ints = lambda *arguments: self.waiting.wrap(BEGIN_SUM(*arguments))
        if self.launcher:
            os.kill(self.launcher, signal.SIGSTOP)
        self.trainer.step(self.trainer.fetch())
        self.trainer.maybe_save(False)
        if self.launcher:
            os.kill(self.launcher, signal.SIGCONT)


def agreements(folder: Path, size: dict, pairs: int, repeats: int) -> None:
    """Print the row of the agreement between ranks."""
    distributed.init(read_ranks(), timeout_seconds=300)
    small = {"model.overrides": "{dim=64, n_layers=2, n_heads=4}", "training.seq_len": 64}
    kinds = (Prefetcher, AgreeAtStart)
    loops = [Steps(folder / kind.__name__, size | small | OFF, launched=False, prefetcher=kind) for kind in kinds]
    turns = take_turns(*loops, pairs, repeats)
    waits = " / ".join(f"{1000 * statistics.median(loop.waiting.steps[WARM_UP:]):.2f}" for loop in loops)
    note = f"the host waits for {waits} ms of a small model's step of {1000 * turns.median(turns.wall, 'A'):.0f}"
    if read_ranks().is_main:
        print(row("agreed a step ahead / at once, a step", turns.ratios(turns.wall), None, note), flush=True)


def checksums(loops: dict[str, Steps], pairs: int, repeats: int) -> None:
    """Print the row of guard.shard_checksums."""
    turns = take_turns(loops["sums"], loops["off"], pairs, repeats)
    share = 100 * statistics.median(loops["sums"].summing.shares(turns))
    weights = [local_part(parameter.detach())[0] for _, parameter in loops["sums"].trainer.model.named_parameters()]
    size = 3 * sum(weight.numel() * weight.itemsize for weight in weights)  # with both moments of AdamW
    note = f"within their calls: {share:.2f} %; {size / 1e6:.0f} MB of a rank read twice a step"
    if read_ranks().is_main:
        name = f"checksums of shards, {read_ranks().world_size} rank(s)"
        print(row(name, turns.ratios(turns.cpu), CHECKSUM_GOAL, note, digits=4), flush=True)


def rank_main(folder: Path, options: argparse.Namespace) -> None:
    """Run the benchmark as one rank."""
    throw_lines_away()
    torch.set_num_threads(1)
    ranks = read_ranks()
    size = QUICK if options.quick else {}
    size |= {"parallelism.data_parallel_replicate_degree": ranks.world_size, "training.steps": 10**6}
    size |= {"training.global_batch_size": 8 * ranks.world_size}
    pairs, repeats = (3, 2) if options.quick else (options.pairs, 5)
    if options.agreement:
        agreements(folder, size, pairs, repeats)
        exit_with(lambda: 0)
    loops = {}
    kinds = {"off": OFF, "sums": SUMS} if options.checksums else {"on": ON, "off": OFF, "often": OFTEN, "sums": SUMS}
    for name, guard_options in kinds.items():
        loops[name] = Steps(folder / name, size | guard_options, launched=name == "on")
    if options.checksums:
        checksums(loops, pairs, repeats)
        exit_with(lambda: 0)
    compared = (("off" if options.aa else "on", GOAL.unless(options.aa)), ("often", None))
    shares = []
    for above, goal in compared:
        before = cpu_seconds(ranks.launcher.pid)
        turns = take_turns(loops[above], loops["off"], pairs, repeats)
        used = (cpu_seconds(ranks.launcher.pid) - before) / sum(turns.wall["A"])
        ratios = turns.ratios(turns.cpu)
        kind = loops[above].comparing if above == "often" else loops[above].judging
        shares.append(kind.shares(turns, INTERVAL if above == "often" else 1))
        if above == "often":
            ratios = [1 + (ratio - 1) / INTERVAL for ratio in ratios]
        if ranks.is_main:
            title = "replicas compared every 100th step" if above == "often" else "launcher and guards"
            title = "noise: nothing against nothing" if above == "off" else title
            note = f"step {1000 * turns.median(turns.cpu, 'B'):.0f} ms of CPU, launcher {100 * used:.2f} % of a core"
            print(row(f"{title}, {ranks.world_size} rank(s)", ratios, goal, note, digits=4), flush=True)
    if ranks.is_main and not options.aa:
        added = [1 + judging + comparing for judging, comparing in zip(*shares, strict=True)]
        note = "within their calls: " + ", ".join(f"{100 * statistics.median(share):.4f} %" for share in shares)
        print(row(f"both, counted within a step, {ranks.world_size} rank(s)", added, GOAL, note, digits=5), flush=True)
    if not options.aa:
        checksums(loops, pairs, repeats)
    if ranks.world_size > 1 and not options.aa:
        agreements(folder, size, pairs, repeats)
    exit_with(lambda: 0)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=20, help="turns of each trainer in each of 5 repeats")
    parser.add_argument("--aa", action="store_true", help="compare the trainer without guards with itself")
    parser.add_argument("--agreement", action="store_true", help="measure only the agreement between ranks")
    parser.add_argument("--checksums", action="store_true", help="measure only guard.shard_checksums")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps, to see that it runs")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rank, options)
    print(heading(threads=1), flush=True)
    queue = SignalQueue()
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as name, hold_lock(Path(name), this_process()):
            folder = Path(name)
            config = manager.load(
                job_arguments(folder, {"comm.train_timeout_seconds": 3600})
            )  # one of the trainers sends no heartbeats
            flags = [f"--{name}" for name in ("aa", "quick", "agreement", "checksums") if getattr(options, name)]
            program = (sys.executable, __file__, "--rank", name, "--pairs", str(options.pairs), *flags)
            end = launch.LocalRanks(config, [], ranks, queue, program).run(Coordinator())
            if end.code:
                return end.code
    return 0


if __name__ == "__main__":
    exit_with(main)
