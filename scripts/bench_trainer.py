"""Measure the overhead of the trainer, each time as a ratio taken in one run.

    python scripts/bench_trainer.py [--only N ...] [--aa] [--quick]

1 a training step against a bare loop | 2 time to the first step against a bare script | 3 the loader against slicing a
memory map | 4 the stall of an asynchronous save against a synchronous one | 5 the printed FLOPs against torch's count.
docs/benchmarks.md describes the method.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from bench_timing import (
    ROOT,
    Goal,
    Guest,
    Later,
    heading,
    row,
    seconds_to_first_step,
    steps,
    take_turns,
    throw_lines_away,
    torchrun,
)
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.assembly.data import JobDatasets
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.config import manager
from torchtitan.datasets.loader import LoaderOptions, WeightedSource, build_loader
from torchtitan.datasets.token_shards import ShardWriter, TokenShards
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.job import ResolvedJob
from torchtitan.losses.objective import choose
from torchtitan.metrics.json_lines import read_records
from torchtitan.process.ranks import Ranks
from torchtitan.training.trainer import Trainer

SEQ_LEN, BATCH = 256, 4
THREADS = 1
ON_HOST = ("count", choose.__name__, "not_finite")
"""Functions of the trainer that read values on the host: labels before the transfer; labels again, to leave out tokens
without one, and the norm on a CPU only."""


def arguments(folder: Path, **options: object) -> list[str]:
    """Return the arguments of the job: a Llama of 4 layers and width 256 in float32, on prepared shards.

    `options` are further ones, with __ for the dot; None leaves an option out.
    """
    settings = {
        "job.dump_folder": folder / "run",
        "model.overrides": "{n_layers=4}",
        "model.tokenizer_path": "bytes",
        "training.dataset": "tokens",
        "training.dataset_path": folder / "shards",
        "training.local_batch_size": BATCH,
        "training.seq_len": SEQ_LEN,
        "training.mixed_precision_param": "float32",
        "activation_checkpoint.mode": "none",
        "metrics.plot": "false",
    }
    settings |= {name.replace("__", "."): value for name, value in options.items()}
    return [f"--{name}={value}" for name, value in settings.items() if value is not None]


def trainer_of(folder: Path, **options: object) -> Trainer:
    return Trainer(manager.load(arguments(folder, **options)), Ranks())


def write_shards(folder: Path, tokens: int) -> None:
    """Write shards of random documents of about 1000 tokens."""
    tokenizer, random = build_tokenizer("bytes"), np.random.default_rng(0)
    folder.mkdir()
    writer = ShardWriter(folder, tokenizer.vocab_size)
    while writer.tokens < tokens:
        writer.write(random.integers(0, 256, random.integers(1, 2000)))
    writer.finish(tokenizer=tokenizer.fingerprint, tokenizer_path="bytes")


# 1


class BareLoop:
    """A hand-written loop over the trainer's model, optimizer and data, without output."""

    def __init__(self, folder: Path):
        config = manager.load(arguments(folder))
        plan = ResolvedJob(config).layout.dims
        (self.model,) = ModelBuilder(ResolvedJob(config)).model(plan.build_mesh("cpu"), torch.device("cpu")).parts
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=8e-4, weight_decay=0.1, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.batches = iter(JobDatasets(ResolvedJob(config)).training_loader(ResolvedJob(config).tokenizer(), 0))

    def step(self) -> None:
        batch = next(self.batches)
        logits = self.model(batch["tokens"])
        F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()


def loop_overhead(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """Compare a training step with a bare loop, and count host waits between logged steps."""
    trainer = trainer_of(folder, training__steps=steps(options.pairs, options.repeats))
    bare = BareLoop(folder)
    if options.aa:
        turns = take_turns(bare.step, BareLoop(folder).step, options.pairs, options.repeats)
    else:
        trainer.loader = guest = Guest(trainer.loader, bare.step, options.pairs, options.repeats)
        trainer.train()
        turns = guest.turns
    note = f"{1e3 * turns.median(turns.cpu, 'A'):.1f} / {1e3 * turns.median(turns.cpu, 'B'):.1f} ms"
    yield row(
        "1 trainer step / bare loop, CPU time", turns.ratios(turns.cpu), Goal("<=", 1.03).unless(options.aa), note
    )
    if options.aa:
        return
    count = 5
    trainer = trainer_of(folder, training__steps=count + 2, metrics__log_freq=100)
    trainer.step(trainer.fetch())  # this step is logged
    with HostSyncs() as syncs:
        for _ in range(count):
            trainer.step(trainer.fetch())
    expected = sum(syncs.callers[name] for name in ON_HOST)
    other_waits = (syncs.callers.total() - expected) / count
    note = f"and {expected / count:.0f} for values that are on the host ({', '.join(sorted(syncs.callers))})"
    yield row("1 host waits of a step between logged ones", [other_waits], Goal("<=", 0), note)


class HostSyncs(TorchDispatchMode):
    """Count host waits for a value, by the torchtitan function that causes them."""

    def __init__(self) -> None:
        super().__init__()
        self.callers: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            frame = sys._getframe(1)
            while frame is not None and not frame.f_code.co_filename.startswith(str(ROOT / "torchtitan")):
                frame = frame.f_back
            self.callers[frame.f_code.co_name if frame is not None else "torch"] += 1
        return func(*args, **(kwargs or {}))


# 2


def first_step(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """Compare the time to the first step with a bare script's, on one rank and two."""
    bare = str(ROOT / "scripts/bench_bare.py")
    for ranks in (1, 2):
        job = arguments(
            folder,
            model__overrides="{}",
            training__local_batch_size=8,
            training__steps=1,
            metrics__disable_color_printing="true",
        )
        ours = [sys.executable, "-m", "torchtitan.launch", str(ranks), *job]
        pair = [ours if not options.aa else torchrun(ranks, bare), torchrun(ranks, bare)]
        seconds: list[list[float]] = [[], []]
        for turn in range(options.launches):
            for program in (0, 1) if turn % 2 == 0 else (1, 0):
                seconds[program].append(seconds_to_first_step(pair[program], THREADS))
        a, b = seconds
        note = f"{median(a):.2f} / {median(b):.2f} s"
        ratios = [x / y for x, y in zip(a, b, strict=True)]
        yield row(
            f"2 time to the first step / bare script, {ranks} rank(s)",
            ratios,
            Goal("<=", 1.25).unless(options.aa),
            note,
        )


# 3


def loading(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """Compare the loader with slicing a memory map, and report the time that steps wait for data."""
    batch, seq_len = 8, 2048
    batches_per_turn = 16 if options.quick else 256  # batches in a turn
    floor = MemoryMap(folder / "shards", batch, seq_len)
    loader = iter(shuffled(folder / "shards", batch, seq_len))

    def read_batches(batches: Iterator[object]) -> Callable[[], None]:
        return lambda: [None for _ in islice(batches, batches_per_turn)] and None

    turns = take_turns(
        read_batches(iter(floor) if options.aa else loader), read_batches(iter(floor)), options.pairs, options.repeats
    )
    speed = [batch * seq_len * batches_per_turn / turns.median(turns.cpu, side) / 1e6 for side in "AB"]
    note = f"{speed[0]:.0f} / {speed[1]:.0f} million tokens/s"
    ratios = turns.ratios(turns.cpu, "B", "A")
    yield row("3 loader / memory-map slice and copy, tokens/s", ratios, Goal(">=", 0.5).unless(options.aa), note)
    if options.aa:
        return
    text = {
        "training__dataset": "python_stdlib",
        "training__dataset_path": None,
        "model__tokenizer_path": ROOT / "tests/assets/tokenizer/tiktoken.model",
    }
    for name, more in (("prepared shards", {}), ("text, tokenized in the trainer", text)):
        shares = [waiting_share(folder, options.quick, more) for _ in range(options.repeats)]
        yield row(f"3 share of a step spent waiting for {name}", shares, Goal("<=", 0.01), digits=4)


def shuffled(shards: Path, batch: int, seq_len: int, document_mask: bool = False) -> Iterable[Any]:
    """Build the loader of a job on prepared shards, in the trainer's process."""
    options = LoaderOptions(seq_len=seq_len, local_batch_size=batch, document_mask=document_mask)
    return build_loader([WeightedSource("tokens", TokenShards(shards))], build_tokenizer("bytes"), options)


class MemoryMap:
    """The minimum that a loader has to do: copy slices of a memory map into int64 batches of tokens and labels."""

    def __init__(self, folder: Path, batch: int, seq_len: int):
        self.ids = np.asarray(np.memmap(folder / "shard-00000.bin", dtype="<u2", mode="r"))
        self.batch, self.seq_len = batch, seq_len

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        random = np.random.default_rng(0)
        while True:
            tokens, labels = np.empty((2, self.batch, self.seq_len), dtype=np.int64)
            for index, start in enumerate(random.integers(0, len(self.ids) - self.seq_len, self.batch).tolist()):
                tokens[index] = self.ids[start : start + self.seq_len]
                labels[index] = self.ids[start + 1 : start + self.seq_len + 1]
            yield torch.from_numpy(tokens), torch.from_numpy(labels)


def waiting_share(folder: Path, quick: bool, options: dict[str, object]) -> float:
    """Return the share of a step that the debug job, on one thread, waits for data."""
    length = {"training__steps": 4 if quick else 20, "model__overrides": "{n_layers=1}" if quick else "{}"}
    settings = {"training__mixed_precision_param": "bfloat16", "metrics__log_freq": 1}
    trainer = trainer_of(folder, **(settings | length | options))
    # A text is tokenized at once, so the first batches of a lane cost most: 0.1 s over the first 40 batches. They are
    # read in the first step, which is marked and left out below.
    trainer.loader = Later(trainer.loader, 4 if quick else 64)
    trainer.train()
    trainer.metrics.close()
    records = [record for record in read_records(trainer.metrics.path) if "marked" not in record]
    return sum(record["data_seconds"] for record in records) / sum(record["step_seconds"] for record in records)


# 4


def saves_in_turn(
    folder: Path, overrides: str, modes: tuple[str, ...], saves: int
) -> tuple[list[Trainer], list[list[float]]]:
    """Create a trainer for each `checkpoint.async_mode` and let them save in turn; return the trainers and the seconds
    that each save blocked the loop. A background save ends before the next turn.
    """
    trainers = [
        trainer_of(
            folder,
            job__dump_folder=folder / f"saves-{index}",
            model__overrides=overrides,
            training__seq_len=16,
            training__local_batch_size=1,
            checkpoint__enable="true",
            checkpoint__async_mode=mode,
            checkpoint__keep_latest_k=2,
        )
        for index, mode in enumerate(modes)
    ]
    for trainer in trainers:
        trainer.step(trainer.fetch())
    savers = [trainer.checkpointer for trainer in trainers]
    blocked: list[list[float]] = [[] for _ in modes]
    for step in range(1, saves + 1):
        for index in range(len(modes)) if step % 2 else reversed(range(len(modes))):
            saver = savers[index]
            trainers[index].state.step = 2 * step + 1
            saver.interval = 2 * step + 1  # first a step without a save, as in a run: it allocates the buffers
            saver.maybe_save(2 * step)
            if saver.staging and saver.staging.preparing:
                saver.staging.preparing.join()
            started = time.perf_counter()
            saver.maybe_save(2 * step + 1)
            blocked[index].append(time.perf_counter() - started)
            saver.finish()
    return trainers, blocked


def megabytes_of_state(trainer: Trainer) -> float:
    """Return the size of parameters and AdamW's two moments in float32."""
    return sum(p.numel() for p in dict(trainer.model.named_parameters()).values()) * 12 / 1e6


def saving(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """Compare the stall of an asynchronous save with a synchronous one."""
    sizes = "{dim=64, n_layers=2, n_heads=4}" if options.quick else "{dim=576, n_layers=12, n_heads=9}"
    modes = ("disabled", "disabled") if options.aa else ("async", "disabled")
    trainers, (a, b) = saves_in_turn(folder, sizes, modes, options.saves)
    note = f"{median(a):.3f} / {median(b):.3f} s, {megabytes_of_state(trainers[0]):.0f} MB of state"
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    yield row("4 asynchronous save's stall / synchronous save", ratios, Goal("<=", 0.1).unless(options.aa), note)


# 5


def flops(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """Compare the printed FLOPs with torch's count."""
    jobs = {"llama3": "{n_layers=4}", "llama3.2": "{n_layers=3, n_kv_heads=4}"}  # the second has a tied head
    for name, overrides in jobs.items():
        trainer = trainer_of(folder, model__name=name, model__overrides=overrides)
        batch = next(iter(trainer.loader))
        # torch has no formula for the CPU's fused attention; the plain kernel is counted without a mask
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            trainer.model.parts[0](**trainer.preparer.to_device(batch)).backward()
        ratio = trainer.metrics.full * batch["tokens"].numel() / counter.get_total_flops()
        yield row(f"5 printed FLOPs / FlopCounterMode, {name}", [ratio], Goal("=", 1.0, 0.001), digits=6)


BENCHMARKS = {1: loop_overhead, 2: first_step, 3: loading, 4: saving, 5: flops}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--aa", action="store_true", help="compare each reference with itself: the noise")
    parser.add_argument("--pairs", type=int, default=40, help="turns of each side in a repeat (default: 40)")
    parser.add_argument("--repeats", type=int, default=5, help="(default: 5)")
    parser.add_argument("--launches", type=int, default=7, help="starts of each program for 2 (default: 7)")
    parser.add_argument("--saves", type=int, default=7, help="saves of each kind for 4 (default: 7)")
    parser.add_argument("--quick", action="store_true", help="only to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.pairs = options.repeats = options.launches = options.saves = 1
    torch.set_num_threads(THREADS)
    throw_lines_away()
    print(heading(threads=THREADS), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shards(folder / "shards", 100_000 if options.quick else 20_000_000)
        for number in options.only:
            for line in BENCHMARKS[number](folder, options):
                print(line, flush=True)


if __name__ == "__main__":
    main()
