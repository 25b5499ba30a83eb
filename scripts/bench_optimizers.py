"""Measure optimizers: bytes of state per parameter, a step relative to torch's fused AdamW, and the share of GaLore's
basis refreshes in a step.

Matrices of a Llama's layers and an embedding, float32, random gradients. Each optimizer takes turns with fused AdamW in
one process (ABBA); with `--ranks 2` both are sharded by FSDP2 over gloo. The cost of a refresh is the additional time
of steps with one, divided by the gap. `--quick` makes one repeat of two pairs.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench_timing import row, take_turns
from torchtitan.checkpoint.tensors import local_part, optimizer_state
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.optimizers.build import Optimizers, build_optimizers

SHARED = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
GAP = 200
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW, again": ("AdamW", {}),
    "AdamW8bit": ("AdamW8bit", {}),
    "AdamWBF16, kahan": ("AdamWBF16", {}),
    "Adafactor": ("Adafactor", {}),
    "Lion": ("Lion", {}),
    "Muon": ("Muon", {}),
    "APOLLO": ("APOLLO", {}),
    "GaLore": ("GaLore", {"update_gap": 10**9}),
    "GaLore, 8 bits": ("GaLore", {"update_gap": 10**9, "inner": "adamw_8bit"}),
}


class Matrices(nn.ModuleDict):
    def forward(self) -> None:
        """Do nothing; fully_shard requires a forward."""


def build_model_and_optimizers(
    kind: str, options: dict[str, Any], width: int, ranks: int
) -> tuple[nn.Module, Optimizers]:
    """Build the matrices of two layers and an embedding, with random gradients, and take one step."""
    dtype = torch.bfloat16 if kind == "AdamWBF16" else torch.float32
    wide = 11 * width // 4
    model = Matrices(
        {f"attention_{layer}_{n}": nn.Linear(width, width, bias=False) for layer in range(2) for n in range(4)}
        | {f"feed_forward_{layer}_{n}": nn.Linear(width, wide, bias=False) for layer in range(2) for n in range(2)}
        | {f"feed_forward_{layer}_down": nn.Linear(wide, width, bias=False) for layer in range(2)}
        | {"tok_embeddings": nn.Embedding(4 * width, width)}
    ).to(dtype)
    if ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    shared = SHARED if OPTIMIZERS[kind].shared else {}
    options = options | ({"rank": width // 8} if "rank" in OPTIMIZERS[kind].options else {})
    optimizers = build_optimizers([model], name=kind, lr=1e-4, weight_decay=0.1, shared=shared, options=options)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
        local_part(parameter.grad).normal_()
    optimizers.step()
    return model, optimizers


def bytes_per_parameter(model: nn.Module, optimizers: Optimizers, ranks: int) -> float:
    """Return the bytes of this rank's state per parameter of its equal share of the model."""
    tensors, _ = optimizer_state([model], optimizers)
    return ranks * sum(local_part(t).nbytes for t in tensors.values()) / sum(p.numel() for p in model.parameters())


def time_refreshes(width: int, ranks: int, basis: str, repeats: int) -> tuple[list[float], list[float]]:
    """Return, for each repeat, the seconds of refreshing all bases, and their percentage of a step at gap GAP."""
    model, optimizers = build_model_and_optimizers("GaLore", {"update_gap": 10**9, "basis": basis}, width, ranks)
    seconds, shares = [], []
    for _ in range(repeats):
        timed = {}
        for due in (False, True):
            for optimizer in optimizers:
                for state in optimizer.state.values():
                    if due and "refresh_at" in state:
                        state["refresh_at"] = 0
            started = time.perf_counter()
            optimizers.step()
            timed[due] = time.perf_counter() - started
        seconds.append(timed[True] - timed[False])
        shares.append(100 * seconds[-1] / GAP / (timed[False] + seconds[-1] / GAP))
    return seconds, shares


def step_ratios(function: Callable[[], Any], other: Callable[[], Any], pairs: int, repeats: int) -> list[float]:
    """Return the ratios of two functions' wall times, which take turns."""
    timings = take_turns(function, other, pairs, repeats)
    return timings.ratios(timings.wall)


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of optimizers, as ratios within one process.")
    parser.add_argument("--quick", action="store_true", help="one repeat of two pairs, small matrices")
    parser.add_argument("--ranks", type=int, default=1, help="number of gloo ranks to shard over (default 1)")
    parser.add_argument("--width", type=int, default=512, help="of the matrices (default 512)")
    options = parser.parse_args()
    if options.ranks > 1:
        torch.multiprocessing.spawn(measure, (options,), nprocs=options.ranks)
    else:
        measure(0, options)


def measure(rank: int, options: argparse.Namespace) -> None:
    """Measure all optimizers on one rank; rank 0 prints the rows."""
    torch.set_num_threads(1)
    pairs, repeats, width = (2, 1, 64) if options.quick else (4, 5, options.width)
    if options.ranks > 1:
        store = dist.TCPStore("127.0.0.1", 29_577, options.ranks, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    report = print if rank == 0 else lambda *args: None
    report(f"matrices of {width} columns, {options.ranks} rank(s), one thread each, rank {width // 8}")
    reference_model, reference = build_model_and_optimizers("AdamW", {}, width, options.ranks)
    report(
        f"{'AdamW, fused':20} {bytes_per_parameter(reference_model, reference, options.ranks):6.3f} bytes a parameter"
    )
    for name, (kind, more) in KINDS.items():
        model, optimizers = build_model_and_optimizers(kind, more, width, options.ranks)
        size = bytes_per_parameter(model, optimizers, options.ranks)
        ratios = step_ratios(optimizers.step, reference.step, pairs, repeats)
        report(row(f"{name:20} {size:6.3f} bytes a parameter; step / AdamW's", ratios, None))
    for basis in ("gram", "svd", "rsvd", "power"):
        seconds, shares = time_refreshes(width, options.ranks, basis, repeats)
        report(
            row(
                f"bases by {basis}: percent of an optimizer step at gap {GAP}",
                shares,
                None,
                f"{statistics.median(seconds):.3f} s",
            )
        )
    if options.ranks > 1:
        dist.barrier()  # gloo may abort a rank whose peer is still connecting
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
