"""Measure a verified save next to torch's own save of the same tensors, in turns, and the bytes that it moves.

    python scripts/bench_saves.py [--gigabytes 1] [--turns 3] [--folder FOLDER]

The tensors are matrices of 17 MB and vectors, as in a Llama with its two moments. Both end on the disk (fsync). A turn
is torch's save, ours without and with `checkpoint.verify`, and the same in reverse. Bytes are those of
this process's reads and writes (/proc/self/io).
"""

import argparse
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed.checkpoint as dcp
from bench_timing import ROOT, heading

from torchtitan.checkpoint.agreement import Peers
from torchtitan.checkpoint.saving import SaveOptions, Snapshot, save
from torchtitan.process.exit import exit_with


def state(gigabytes: float) -> dict[str, torch.Tensor]:
    """Return float32 tensors [1024, 4096] and smaller ones, of about as many GB."""
    count = max(1, round(gigabytes * 1e9 / (4 * 1024 * 4096)))
    matrices = {f"model.{index}": torch.randn(1024, 4096) for index in range(count)}
    return matrices | {f"model.norm.{index}": torch.ones(1024) for index in range(count)}


def bytes_moved() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def measured(action: Callable[[], object], folder: Path) -> tuple[float, float, float, float]:
    """Return wall and CPU seconds, and GB read and written."""
    before, started, cpu = bytes_moved(), time.perf_counter(), time.process_time()
    action()
    seconds, cpu, after = time.perf_counter() - started, time.process_time() - cpu, bytes_moved()
    shutil.rmtree(folder)
    os.sync()
    return seconds, cpu, (after["rchar"] - before["rchar"]) / 1e9, (after["wchar"] - before["wchar"]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs/bench_saves")
    options = parser.parse_args()
    tensors, folder, peers = state(options.gigabytes), options.folder / "step-00000001", Peers("saves")
    options.folder.mkdir(parents=True, exist_ok=True)

    def ours(verify: bool) -> object:
        return save(Snapshot("full", 1, tensors), folder, None, peers, SaveOptions(verify=verify))

    actions = {
        "torch": lambda: dcp.save(tensors, checkpoint_id=folder, no_dist=True),
        "not verified": lambda: ours(False),
        "verified": lambda: ours(True),
    }
    results: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in actions}
    for turn in range(options.turns):
        for name in actions if turn % 2 == 0 else reversed(actions):
            results[name].append(measured(actions[name], folder))
    print(heading(threads=torch.get_num_threads()))
    for name, rows in results.items():
        seconds, cpu, bytes_read, bytes_written = (median(column) for column in zip(*rows, strict=True))
        ratio = median(row[0] / other[0] for row, other in zip(rows, results["torch"], strict=True))
        moved = f"read {bytes_read:.2f}, wrote {bytes_written:.2f} GB"
        print(f"{name:13}{seconds:6.2f} s, CPU {cpu:5.2f} s, {ratio:.2f} of torch's; {moved}")


if __name__ == "__main__":
    exit_with(main)
