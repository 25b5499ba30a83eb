"""Compare the trainer with a plain loop of torch's own parts, for the debug model on two cores.

    python scripts/bench_debug.py [--ranks 1 2] [--only NAME ...] [--aa] [--quick]
    python scripts/bench_debug.py --plans [NAME ...]

dim 256, 6 layers, 16 heads, vocabulary 2048, sequences of 256, 8 of them per rank, AdamW. The plain loop is set up as
torchtitan is by default: fully_shard (on one rank too) with bfloat16 parameters, every second layer recomputed, the
CPU's bfloat16 attention, fused AdamW, clipping. Each of our settings runs in a separate process (or two ranks), where
the real trainer and the plain loop take turns step by step. For "replicas", a model of 30 million parameters on two
ranks, the plain loop is DistributedDataParallel in float32, and neither side recomputes anything. --plans times jobs
that split the same 8 sequences over ranks (a model with experts among them), in float32, each by itself.
docs/benchmarks.md has the details.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import bench_bare
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_timing import (
    ROOT,
    Goal,
    Guest,
    heading,
    row,
    seconds_to_first_step,
    steps,
    take_turns,
    throw_lines_away,
    torchrun,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from torchtitan.config import manager
from torchtitan.metrics.json_lines import read_records
from torchtitan.parallelisms.sequence_layout import Tokens
from torchtitan.process.exit import exit_with
from torchtitan.process.ranks import read_ranks
from torchtitan.training.trainer import Trainer


def pipeline(schedule: str) -> dict[str, str]:
    degree = {"parallelism.pipeline_parallel_degree": "2"}
    return degree | {"parallelism.pipeline_parallel_schedule": schedule}


SIZES = bench_bare.Sizes()
REPLICA_SIZES = bench_bare.Sizes(dim=512, hidden=1536, layers=8, heads=8, batch=4)
QUICK = bench_bare.Sizes(dim=64, hidden=256, layers=4, heads=4, seq_len=32, batch=8)
JOB = {
    "job.config_file": "train_configs/debug_model.toml",
    "validation.enable": "false",
    "checkpoint.enable": "false",
    "metrics.plot": "false",
}
COMPILED = {"compile.enable": "true"}
REPLICAS = "replicas"
SETTINGS = {
    "same settings": {
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "2",
        "activation_checkpoint.early_stop": "true",  # torch's default, and the plain loop's
    },
    "shipped": {},
    "compiled blocks": COMPILED,
    "compiled model": COMPILED | {"compile.scope": "model"},
    REPLICAS: {
        "parallelism.data_parallel_replicate_degree": "2",
        "training.mixed_precision_param": "float32",
        "activation_checkpoint.mode": "none",
    },
}
RANKS = {"compiled model": [1], REPLICAS: [2]}
"""The numbers of ranks of settings that do not run on one and on two."""
TP, EP = ({f"parallelism.{axis}_parallel_degree": "2"} for axis in ("tensor", "expert"))
NONE, SECOND, FULL, KEEP_COMM = (
    {"activation_checkpoint.mode": mode} for mode in ("none", "selective", "full", "full_keep_comm")
)
OVERLAP = {"parallelism.pipeline_parallel_expert_parallel_overlap": "true"}
MOE = {"model.name": "deepseek"}
MOE_SIZES = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "bias_rate": 0.001,
}
"""Sizes of the debug model with experts of PyTorch's torchtitan v0.2.2 that differ from ours; the two are compared."""
PLANS: dict[str, tuple[int, int, dict[str, str]]] = {
    "one rank": (1, 1, SECOND),
    "FSDP 2": (2, 2, SECOND),
    "TP 2": (2, 1, TP | SECOND),
    "PP 2 Interleaved1F1B": (2, 1, pipeline("Interleaved1F1B") | SECOND),
    "PP 2 ZBVZeroBubble": (2, 1, pipeline("ZBVZeroBubble") | SECOND),
    "PP 2 DualPipeV": (2, 1, pipeline("DualPipeV") | SECOND),
    "TP 2 x PP 2 DualPipeV": (4, 1, TP | pipeline("DualPipeV") | SECOND),
    "MoE, one rank": (1, 1, MOE | NONE),
    "MoE, EP 2": (2, 2, MOE | EP | NONE),
    "MoE, PP 2 DualPipeV, full": (2, 1, MOE | pipeline("DualPipeV") | FULL),
    "MoE, PP 2 x EP 2 DualPipeV": (4, 2, MOE | EP | pipeline("DualPipeV") | NONE),
    "MoE, the same, full": (4, 2, MOE | EP | pipeline("DualPipeV") | FULL),
    "MoE, the same, overlap": (4, 2, MOE | EP | pipeline("DualPipeV") | OVERLAP | NONE),
    "MoE, the same, overlap, keep_comm": (4, 2, MOE | EP | pipeline("DualPipeV") | OVERLAP | KEEP_COMM),
    "MoE, the same, overlap, full": (4, 2, MOE | EP | pipeline("DualPipeV") | OVERLAP | FULL),
}
"""Ranks, data-parallel ranks and options of --plans. "selective" recomputes every second layer, as torchtitan does."""
GOALS = {"same settings": 1.0, "shipped": 1.45, "compiled blocks": 1.65, "compiled model": 1.9, REPLICAS: 1.0}


def arguments(sizes: bench_bare.Sizes, folder: Path, **options: object) -> list[str]:
    numbers = {"dim": sizes.dim, "n_layers": sizes.layers, "n_heads": sizes.heads}
    if options.get("model.name") == "deepseek":
        numbers |= MOE_SIZES
    shape = {
        "model.overrides": "{" + ", ".join(f"{name}={number}" for name, number in numbers.items()) + "}",
        "training.local_batch_size": sizes.batch,
        "training.seq_len": sizes.seq_len,
    }
    settings = JOB | shape | {"job.dump_folder": folder} | options
    return [f"--{name}={value}" for name, value in settings.items()]


def sizes_of(name: str, options: argparse.Namespace) -> bench_bare.Sizes:
    """Return the model's sizes for a setting."""
    return QUICK if options.quick else REPLICA_SIZES if name == REPLICAS else SIZES


# One rank of a comparison


class PlainLoop:
    def __init__(self, sizes: bench_bare.Sizes, batches: list[dict[str, torch.Tensor]], replicas: bool):
        torch.manual_seed(0)
        self.model: nn.Module = bench_bare.Llama(sizes)
        if replicas:
            self.model = DistributedDataParallel(self.model)
        else:
            for index in range(0, sizes.layers, 2):
                self.model.layers[index] = checkpoint_wrapper(self.model.layers[index])
            bench_bare.shard(self.model, torch.bfloat16)
        self.optimizer = bench_bare.build_optimizer(self.model)
        self.batches = cycle(batches)

    def step(self) -> None:
        batch = next(self.batches)
        bench_bare.step(self.model, self.optimizer, batch["tokens"], batch["labels"])


class PlainAttention(nn.Module):
    """The CPU's attention kernel in the dtype of its input, for "same settings"."""

    def prepare(self, queries: Tokens, keys: Tokens | None = None) -> None:
        assert queries.documents is None and keys is None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def compare(options: argparse.Namespace) -> None:
    """Run one rank of a comparison; rank 0 writes the measurements to the folder."""
    ranks = read_ranks()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    throw_lines_away()
    sizes = sizes_of(options.worker, options)
    job = SETTINGS[options.worker] | {"training.steps": steps(options.pairs, options.repeats)}
    trainer = Trainer(manager.load(arguments(sizes, options.folder / "run", **job)), ranks)
    if options.worker == "same settings":
        trainer.model.parts[0].set_attention_kernels([PlainAttention()])
    batches = list(islice(iter(trainer.loader), 8))
    plain = PlainLoop(sizes, batches, options.worker == REPLICAS)
    if options.aa:
        other = PlainLoop(sizes, batches, options.worker == REPLICAS)
        turns = take_turns(plain.step, other.step, options.pairs, options.repeats)
    else:
        trainer.loader = guest = Guest(trainer.loader, plain.step, options.pairs, options.repeats)
        trainer.train()
        turns = guest.turns
    cpu = torch.tensor([turns.median(turns.cpu, "A"), turns.median(turns.cpu, "B")])
    dist.all_reduce(cpu)
    if ranks.is_main:
        measured = {
            "wall": turns.ratios(turns.wall, "B", "A"),
            "cpu": turns.ratios(turns.cpu, "B", "A"),
            "step_seconds": [turns.median(turns.wall, side) for side in "AB"],
            "cpu_seconds": cpu.tolist(),
        }
        (options.folder / "measured.json").write_text(json.dumps(measured))
    dist.destroy_process_group()


# The table


def comparison_rows(name: str, ranks: int, options: argparse.Namespace) -> str:
    """Return the two rows of one setting: by wall time, and by CPU time, which other processes disturb less."""
    with tempfile.TemporaryDirectory() as folder:
        worker = [str(Path(__file__).resolve()), "--worker", name, "--folder", folder]
        worker += ["--pairs", str(options.pairs), "--repeats", str(options.repeats), *(["--aa"] if options.aa else [])]
        worker += ["--quick"] if options.quick else []
        environment = os.environ | {"OMP_NUM_THREADS": str(max(1, options.threads // ranks))}
        subprocess.run(torchrun(ranks, *worker), cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        measured = json.loads((Path(folder) / "measured.json").read_text())
    sizes = sizes_of(name, options)
    tokens = sizes.batch * sizes.seq_len * ranks
    speed = [tokens / seconds for seconds in measured["step_seconds"]]
    ours, plain = measured["cpu_seconds"]
    rates = f"{speed[0]:,.0f} / {speed[1]:,.0f} tok/s"
    cpu = f"{ours:.2f} / {plain:.2f} CPU seconds a step, all ranks"
    title, goal = f"{ranks} rank(s), {name} / plain loop", Goal(">=", GOALS[name]).unless(options.aa)
    return "\n".join(
        [
            row(f"{title}, tokens/s", measured["wall"], goal, rates, digits=2),
            row(f"{title}, CPU time", measured["cpu"], goal, cpu, digits=2),
        ]
    )


def logged_steps(folder: str) -> list[dict[str, Any]]:
    """Read the logged steps of a run, without its events."""
    return [record for record in read_records(Path(folder, "metrics.jsonl")) if "loss" in record]


def measure_job(name: str, ranks: int, options: argparse.Namespace) -> str:
    """Run a short job as a user starts it; report the time to the first step, speed and memory."""
    with tempfile.TemporaryDirectory() as folder:
        job = arguments(
            sizes_of(name, options), Path(folder), **SETTINGS[name], **{"training.steps": 3 if options.quick else 20}
        )
        command = [sys.executable, "-m", "torchtitan.launch", str(ranks), *job]
        seconds = seconds_to_first_step(command, max(1, options.threads // ranks))
        records = logged_steps(folder)
    speed = median(record["tokens_per_second"] for record in records[1:])
    memory = max(record["memory_gib"] for record in records)
    return (
        f"{ranks} rank(s), {name}: first step after {seconds:.1f} s, then {speed:,.0f} tok/s, "
        f"at most {memory:.2f} GiB resident on rank 0"
    )


def job_of_plan(name: str, sizes: bench_bare.Sizes, folder: Path, steps: int) -> tuple[int, list[str]]:
    """Return the ranks and arguments of the job that times a plan."""
    ranks, data_parallel, options = PLANS[name]
    job = {"training.mixed_precision_param": "float32", "activation_checkpoint.selective_ac_option": "2"}
    job |= options | {"training.local_batch_size": sizes.batch // data_parallel, "training.steps": steps}
    return ranks, arguments(sizes, folder, **job)


def measure_plan(name: str, options: argparse.Namespace) -> str:
    """Measure the speed of a plan, and its CPU time a step: the difference of jobs of 25 and of 5 steps."""
    few, many = (2, 4) if options.quick else (5, 25)
    spent = []
    for steps_ in (few, many):
        with tempfile.TemporaryDirectory() as folder:
            ranks, argv = job_of_plan(name, QUICK if options.quick else SIZES, Path(folder), steps_)
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            command = [sys.executable, "-m", "torchtitan.launch", str(ranks), *argv]
            seconds_to_first_step(command, max(1, options.threads // ranks))
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            speeds = [record["tokens_per_second"] for record in logged_steps(folder)]
    cpu = (spent[1] - spent[0]) / (many - few)
    return f"{name:<34} {median(speeds[1:]):8,.0f} tok/s {cpu:6.2f} CPU seconds a step, all ranks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--aa", action="store_true", help="compare the plain loop with itself: the noise")
    parser.add_argument("--pairs", type=int, default=10, help="turns of each side in a repeat (default: 10)")
    parser.add_argument("--repeats", type=int, default=5, help="(default: 5)")
    parser.add_argument("--threads", type=int, default=2, help="of all ranks together (default: 2)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, only to see that it runs")
    parser.add_argument("--plans", nargs="*", choices=PLANS, help="time these plans (all) instead of the comparison")
    parser.add_argument("--worker", choices=SETTINGS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        compare(options)
        return
    if options.quick:
        options.pairs = options.repeats = 1
    print(heading(threads=options.threads), flush=True)
    if options.plans is not None:
        for name in options.plans or PLANS:
            print(measure_plan(name, options), flush=True)
        return
    if not any(ranks in RANKS.get(name, options.ranks) for name in options.only for ranks in options.ranks):
        given = " ".join(map(str, options.ranks))
        parser.error(f"--ranks {given}: none of these settings runs on as many ranks: {', '.join(options.only)}")
    for ranks in options.ranks:
        names = [name for name in options.only if ranks in RANKS.get(name, options.ranks)]
        for name in names[:1] if options.aa else names:
            print(comparison_rows(name, ranks, options), flush=True)
        if not options.aa:
            for name in names:
                print(measure_job(name, ranks, options), flush=True)


if __name__ == "__main__":
    exit_with(main)
