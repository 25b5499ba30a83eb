"""What supervisor, watchdog, lock and guards cost a step of the debug model, on two cores.

    python scripts/bench_guards.py [--ranks 1 2] [--pairs 20] [--agreement] [--checksums] [--aa] [--quick]

The ranks of a job run under the real launcher, which holds the folder's lock, watches for hangs and would start them
again. In each rank two trainers take turns step by step: one tells the launcher what it does, judges every step
(guard.non_finite and guard.spike = skip) and compares its replicas every 100 steps; the other does none of it, and in
its turns the launcher stands still (SIGSTOP). A comparison of replicas is also timed in every step; its share of a step
is a hundredth of that. The lock costs nothing once it is held. guard.shard_checksums has a separate row.

Judged is the CPU time of a rank, which others on the machine disturb least; the launcher's own is beside it, as a share
of a core. The ratio of two steps shows half a per cent on an idle machine alone. So the CPU time within the calls that
make the difference is counted too, in the same steps, and judged as a share of them: that is exact on a busy one.

Several ranks agree on each step (valid tokens, a stop) while the one before it is trained. A small model's steps
are timed beside steps on which they agree when these begin, and how long the host waits for the answers.
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
from torchtitan.core.initialization import local_part
from torchtitan.launcher.lock import held, this_process
from torchtitan.launcher.multi_node import First
from torchtitan.launcher.processes import SignalQueue
from torchtitan.process import distributed
from torchtitan.process.exit import exit_with
from torchtitan.process.ranks import read_ranks
from torchtitan.training.batches import Prefetcher
from torchtitan.training.trainer import Trainer

GOAL = Goal("<=", 1.005)
CHECKSUM_GOAL = Goal("<=", 1.01)
"""Above this the option stays off by default."""
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
BEGIN_SUM = distributed.begin_sum


def words(folder: Path, options: dict) -> list[str]:
    return [f"--{name}={value}" for name, value in (JOB | options | {"job.dump_folder": folder}).items()]


class Within:
    """Seconds within some calls, for each step; by the CPU time of this process if not by another clock."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self.clock = clock
        self.steps: list[float] = []

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self.clock()
            try:
                return call(*args, **kwargs)
            finally:
                self.steps[-1] += self.clock() - began

        return timed

    def shares(self, turns: Turns, each: int = 1) -> list[float]:
        """Of the steps of A, whose calls they are, without them; one for each repeat. `each`: one step of so many."""
        counted, whole = self.steps[WARM_UP:], turns.cpu["A"][WARM_UP:]
        size = len(whole) // turns.repeats
        parts = [slice(i * size, (i + 1) * size) for i in range(turns.repeats)]
        return [sum(counted[part]) / (sum(whole[part]) - sum(counted[part])) / each for part in parts]


class AtOnce(Prefetcher):
    """Ranks agree on a step when it begins, and the host waits for them."""

    stopping = False

    def agree(self, stop: bool) -> int:
        self._current.begin(stop)
        return self._current.wait()


class Steps:
    """A trainer's loop, a step at a call."""

    def __init__(self, folder: Path, options: dict, launched: bool, prefetcher: type[Prefetcher] = Prefetcher):
        ranks = read_ranks()
        ranks = ranks if launched else dataclasses.replace(ranks, launcher=None)
        self.trainer = Trainer(manager.load(words(folder, options)), ranks)
        self.trainer.metrics.start()
        self.batches = iter(self.trainer.loader)
        self.launcher = None if launched or read_ranks().rank else read_ranks().launcher.pid
        self.trainer.prefetcher = prefetcher(self.trainer.preparer, self.trainer.prefetcher.count, 10**6)
        self.judging, self.comparing, self.waiting = Within(), Within(), Within(time.perf_counter)
        self.trainer.enter = self.judging.counted(self.trainer.enter)
        self.trainer.guards.leaves_out = self.judging.counted(self.trainer.guards.leaves_out)
        self.trainer.guards.compare = self.comparing.counted(self.trainer.guards.compare)
        self.summing = Within()
        if (shards := self.trainer.guards.shards) is not None:
            shards.record, shards.changed = self.summing.counted(shards.record), self.summing.counted(shards.changed)

    def __call__(self) -> None:
        for within in (self.judging, self.comparing, self.summing, self.waiting):
            within.steps.append(0.0)
        distributed.begin_sum = lambda *own: self.waiting.counted(BEGIN_SUM(*own))
        if self.launcher:
            os.kill(self.launcher, signal.SIGSTOP)
        self.trainer.enter("data", self.trainer.step + 1)
        self.trainer.train_step(self.batches)
        self.trainer.guards.compare(self.trainer.step)
        self.trainer.maybe_save(False)
        if self.launcher:
            os.kill(self.launcher, signal.SIGCONT)


def agreements(folder: Path, size: dict, pairs: int, repeats: int) -> None:
    """The row of how ranks agree on steps."""
    distributed.init(read_ranks(), timeout_seconds=300)
    small = {"model.overrides": "{dim=64, n_layers=2, n_heads=4}", "training.seq_len": 64}
    kinds = (Prefetcher, AtOnce)
    by = [Steps(folder / kind.__name__, size | small | OFF, launched=False, prefetcher=kind) for kind in kinds]
    turns = take_turns(*by, pairs, repeats)
    waits = " / ".join(f"{1000 * statistics.median(each.waiting.steps[WARM_UP:]):.2f}" for each in by)
    note = f"the host waits for {waits} ms of a small model's step of {1000 * turns.median(turns.wall, 'A'):.0f}"
    if read_ranks().is_main:
        print(row("agreed a step ahead / at once, a step", turns.ratios(turns.wall), None, note), flush=True)


def checksums(made: dict[str, Steps], pairs: int, repeats: int) -> None:
    """Print the row of guard.shard_checksums."""
    turns = take_turns(made["sums"], made["off"], pairs, repeats)
    share = 100 * statistics.median(made["sums"].summing.shares(turns))
    weights = [local_part(parameter.detach())[0] for _, parameter in made["sums"].trainer.model.named_parameters()]
    size = 3 * sum(weight.numel() * weight.itemsize for weight in weights)  # with both moments of AdamW
    note = f"within their calls: {share:.2f} %; {size / 1e6:.0f} MB of a rank read twice a step"
    if read_ranks().is_main:
        name = f"checksums of shards, {read_ranks().world_size} rank(s)"
        print(row(name, turns.ratios(turns.cpu), CHECKSUM_GOAL, note, digits=4), flush=True)


def rank_main(folder: Path, options: argparse.Namespace) -> None:
    """One rank's program."""
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
    made = {}
    kinds = {"off": OFF, "sums": SUMS} if options.checksums else {"on": ON, "off": OFF, "often": OFTEN, "sums": SUMS}
    for name, given in kinds.items():
        made[name] = Steps(folder / name, size | given, launched=name == "on")
    if options.checksums:
        checksums(made, pairs, repeats)
        exit_with(lambda: 0)
    compared = (("off" if options.aa else "on", GOAL.unless(options.aa)), ("often", None))
    shares = []
    for above, goal in compared:
        before = cpu_seconds(ranks.launcher.pid)
        turns = take_turns(made[above], made["off"], pairs, repeats)
        used = (cpu_seconds(ranks.launcher.pid) - before) / sum(turns.wall["A"])
        ratios = turns.ratios(turns.cpu)
        kind = made[above].comparing if above == "often" else made[above].judging
        shares.append(kind.shares(turns, INTERVAL if above == "often" else 1))
        if above == "often":
            ratios = [1 + (ratio - 1) / INTERVAL for ratio in ratios]
        if ranks.is_main:
            what = "replicas compared every 100th step" if above == "often" else "launcher and guards"
            what = "noise: nothing against nothing" if above == "off" else what
            note = f"step {1000 * turns.median(turns.cpu, 'B'):.0f} ms of CPU, launcher {100 * used:.2f} % of a core"
            print(row(f"{what}, {ranks.world_size} rank(s)", ratios, goal, note, digits=4), flush=True)
    if ranks.is_main and not options.aa:
        added = [1 + judging + comparing for judging, comparing in zip(*shares, strict=True)]
        note = "within their calls: " + ", ".join(f"{100 * statistics.median(each):.4f} %" for each in shares)
        print(row(f"both, counted within a step, {ranks.world_size} rank(s)", added, GOAL, note, digits=5), flush=True)
    if not options.aa:
        checksums(made, pairs, repeats)
    if ranks.world_size > 1 and not options.aa:
        agreements(folder, size, pairs, repeats)
    exit_with(lambda: 0)


def cpu_seconds(pid: int) -> float:
    """That a process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=20, help="turns of each in a repeat, of which there are 5")
    parser.add_argument("--aa", action="store_true", help="compare the trainer without guards with itself")
    parser.add_argument("--agreement", action="store_true", help="only how several ranks agree on steps")
    parser.add_argument("--checksums", action="store_true", help="only guard.shard_checksums")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps, to see that it runs")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rank, options)
    print(heading(threads=1), flush=True)
    queue = SignalQueue()
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as name, held(Path(name), this_process()):
            folder = Path(name)
            config = manager.load(words(folder, {"comm.train_timeout_seconds": 3600}))  # not all turns are told
            flags = [f"--{name}" for name in ("aa", "quick", "agreement", "checksums") if getattr(options, name)]
            program = (sys.executable, __file__, "--rank", name, "--pairs", str(options.pairs), *flags)
            if code := launch.run(config, [], ranks, queue, First(), program):
                return code
    return 0


if __name__ == "__main__":
    exit_with(main)
