"""Measure the cost of adapters: a step of LoRA relative to full training, of QLoRA to LoRA, and the time of a merge.

One device, float32, the debug Llama with 8 samples of 256 tokens; both kinds take turns in one process. Frozen matrices
save their gradients, a third of a step's matrix products, and most of AdamW; A and B add a little. `--quick` makes one
repeat of two pairs, with one sample and a tiny model.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench_timing import Goal, row, take_turns
from torchtitan.adapters.interface import Adapter
from torchtitan.assembly import parts
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.config.manager import load
from torchtitan.core.random_draws import initialize
from torchtitan.core.tensor_storage import draw_stores
from torchtitan.job import ResolvedJob
from torchtitan.optimizers.build import build_optimizers

TOKENS = 256
TARGETS = {"": [], ", attention alone": ['--adapter.target=["*attention*"]']}
"""Name in a row -> arguments of the job."""
SIZES: list[str] = []
"""Arguments of the job that change the debug model's sizes."""
TINY = "--model.overrides={dim=64, n_layers=2, n_heads=4}"
SHARED = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def build_model(kind: str, rank: int, arguments: Sequence[str] = ()) -> tuple[nn.Module, Adapter | None]:
    """Build the debug model under an adapter, with initial weights; `kind` none is full training."""
    argv = ["--model.tokenizer_path=bytes", *SIZES, f"--adapter.kind={kind}", *arguments]
    model, _, adapter = ModelBuilder(
        ResolvedJob(load(argv + [f"--adapter.rank={rank}"] * (kind != "none")))
    ).adapted_model()
    model.to_empty(device="cpu")
    initialize(model, 0, model.init_rule)
    draw_stores(model, 0, model.init_rule)
    return model, adapter


def build_step(kind: str, rank: int, samples: int, arguments: Sequence[str] = ()) -> Callable[[], None]:
    """Build a training step of a model under an adapter, on one batch of `samples` sequences."""
    model, _ = build_model(kind, rank, arguments)
    optimizer = build_optimizers([model], name="AdamW", lr=1e-4, weight_decay=0.1, shared=SHARED)
    tokens = torch.randint(0, 2048, (samples, TOKENS + 1), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        (model(tokens[:, :-1], labels=tokens[:, 1:]) / (samples * TOKENS)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def flops_ratio(rank: int, arguments: Sequence[str] = ()) -> float:
    """Return the FLOPs of a LoRA step relative to a full step, attention included: the lower bound of its time."""
    config = load(["--model.tokenizer_path=bytes", *SIZES])
    args, (_, adapter) = ResolvedJob(config).model.args, build_model("lora", rank, arguments)
    plain = parts.model_spec(ResolvedJob(config).model).flops_per_token(args, TOKENS)
    return adapter.flops_per_token(plain, args.num_matmul_parameters, TOKENS).causal / plain.causal


def merge_seconds(rank: int) -> list[float]:
    """Measure merging in seconds per 1e9 bytes of merged matrices, five times."""
    model, adapter = build_model("lora", rank)
    size = (
        sum(t.nbytes for name, t in model.state_dict().items() if name in adapter.frozen_parameters and ".w" in name)
        / 1e9
    )
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        for value in adapter.merged_tensors([model]).values():
            value.detach()
        seconds.append((time.perf_counter() - started) / size)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of adapters, as ratios of CPU time within one process.")
    parser.add_argument("--quick", action="store_true", help="one repeat of two pairs of a tiny model")
    parser.add_argument("--rank", type=int, nargs="+", default=[16], help="of the low-rank matrices (default 16)")
    options = parser.parse_args()
    pairs, repeats, samples = (2, 1, 1) if options.quick else (4, 5, 8)
    SIZES.extend([TINY] * options.quick)
    for rank in options.rank:
        for label, arguments in TARGETS.items():
            turns = take_turns(
                build_step("lora", rank, samples, arguments), build_step("none", rank, samples), pairs, repeats
            )
            print(row(f"lora / full step, rank {rank}{label}", turns.ratios(turns.cpu), Goal("<=", 0.75), "CPU time"))
            print(row("  operations of matrix products", [flops_ratio(rank, arguments)], None))
    first = options.rank[0]
    for kind in ("dora", "qlora", "lora_int8"):
        turns = take_turns(build_step(kind, first, samples), build_step("lora", first, samples), pairs, repeats)
        print(row(f"{kind} / lora step, rank {first}", turns.ratios(turns.cpu), None, "CPU time"))
    print(row(f"folding in, seconds a GB, rank {first}", merge_seconds(first), None))


if __name__ == "__main__":
    main()
