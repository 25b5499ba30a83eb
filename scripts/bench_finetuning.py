"""Measure fine-tuning on whole records: fill and time of sample packing, training speed packed and padded, and the
bytes of a frozen weight in 4 bits.

Record lengths follow instruction data (log-normal, half of them up to 90 tokens, one in a hundred above 580). Steps are
of the debug Llama on one device in float32; both kinds take turns in one process, and CPU time is compared.
`--quick` makes one repeat of two pairs, with few records.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench_adapters import SHARED, build_model
from scripts.bench_timing import Goal, row, take_turns
from torchtitan.core.tensor_storage import packed_names
from torchtitan.datasets.sample_packing import best_fit
from torchtitan.datasets.samples import next_token_arrays
from torchtitan.optimizers.build import build_optimizers

SEQ_LEN, WORDS = 512, 2048


def lengths(count: int, longest: int) -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(np.log(90), 0.8, count)
    return drawn.astype(int).clip(4, longest)


def measure_packing(count: int, window: int) -> tuple[float, float]:
    """Return the fill of packs of 2,049 tokens, and the seconds of packing 100,000 records."""
    sizes, packs = lengths(count, 2049), 0
    started = time.perf_counter()
    for first in range(0, count, window):
        packs += int(best_fit(sizes[first : first + window], 2049).max()) + 1
    return sizes.sum() / (packs * 2049), (time.perf_counter() - started) * 100_000 / count


def batch(packed: bool, samples: int) -> tuple[dict[str, torch.Tensor], int]:
    """Build a batch of records, [samples, SEQ_LEN] each tensor; return it and its number of record tokens."""
    room = SEQ_LEN + 1
    sizes = lengths(400, room)
    packs = best_fit(sizes, room) if packed else np.arange(len(sizes))
    ids, trained = np.zeros((samples, room), dtype=np.int64), np.zeros((samples, room), dtype=bool)
    rows, columns = [], []
    for line in range(samples):
        filled = 0
        for size in sizes[packs == line]:
            ids[line, filled : filled + size] = np.random.default_rng(line).integers(0, WORDS, size)
            trained[line, filled : filled + size] = True
            rows, columns, filled = [*rows, line], [*columns, filled], filled + size
        if filled < room:
            rows, columns = [*rows, line], [*columns, filled]
    arrays = next_token_arrays(ids, (np.array(rows), np.array(columns)), True, WORDS, trained)
    names = ("tokens", "labels", "document_ids", "positions")
    return {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)}, int(trained.sum())


def build_step(packed: bool, samples: int) -> tuple[Callable[[], None], int]:
    """Build a training step; return it and the number of record tokens that it trains on."""
    model, _ = build_model("none", 1)
    optimizer = build_optimizers([model], name="AdamW", lr=1e-4, weight_decay=0.1, shared=SHARED)
    batch_tensors, tokens = batch(packed, samples)

    def step() -> None:
        (model(**batch_tensors) / tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, tokens


def bytes_per_frozen_weight(kind: str) -> float:
    """Measure the bytes per element of the matrices that an adapter freezes, scales included."""
    model, _ = build_model(kind, 16)
    plain, _ = build_model("lora", 16)
    packed = packed_names(model)
    frozen = {name for name, p in plain.named_parameters() if not p.requires_grad and p.ndim == 2}
    matrices = frozen - {name for name, _ in model.named_parameters()} if packed else frozen
    stored = [p for name, p in model.named_parameters() if (name in packed if packed else name in matrices)]
    return sum(p.nbytes for p in stored) / sum(plain.get_parameter(name).numel() for name in matrices)


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of fine-tuning: packs, padding, a base in 4 bits.")
    parser.add_argument("--quick", action="store_true", help="one repeat of two pairs, with few records")
    options = parser.parse_args()
    count, pairs, repeats, samples = (2000, 2, 1, 1) if options.quick else (100_000, 4, 5, 4)
    for window in (100, 1000, count):
        full, seconds = measure_packing(count, window)
        note = f"{seconds:.2f} s for 100,000 records"
        print(row(f"packs of 2,049 tokens, windows of {window}: full", [full], None, note))
    (packed, more), (padded, few) = build_step(True, samples), build_step(False, samples)
    turns = take_turns(packed, padded, pairs, repeats)
    gained = [more / few / ratio for ratio in turns.ratios(turns.cpu)]
    print(row("tokens of records, packed / padded", gained, Goal(">=", 2.0), "CPU time"))
    for kind in ("lora", "qlora"):
        print(row(f"bytes of a frozen weight, {kind}", [bytes_per_frozen_weight(kind)], None))


if __name__ == "__main__":
    main()
