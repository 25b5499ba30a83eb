"""A rank of bench_scaling.py, which measures the phases of a job's start, its steps and its memory.

It imports only the standard library at its top, so that imports are measured as a phase. Rank 0 writes the results to
FILE; times are in seconds, memory in GiB.

    STARTED=SECONDS bench_rank.py FILE [arguments of a job]
"""

import json
import os
import sys
import time


def main(path: str, arguments: list[str]) -> None:
    phases, last = {}, float(os.environ["STARTED"])

    def note(phase: str) -> None:
        nonlocal last
        now = time.time()  # a clock that both processes share
        phases[phase], last = phases.get(phase, 0.0) + now - last, now

    note("launch")
    import torch

    note("torch")
    from torchtitan.config import manager
    from torchtitan.process import distributed
    from torchtitan.process.exit import exit_with
    from torchtitan.process.ranks import read_ranks
    from torchtitan.training.trainer import Trainer

    note("package")
    torch.set_num_threads(1)
    before, join = resident_gib("VmRSS"), distributed.init

    def init(*args: object) -> object:
        note("build")
        device = join(*args)
        note("join")
        return device

    distributed.init = init
    trainer = Trainer(manager.load(arguments), read_ranks())
    note("build")
    steps = []
    for _ in range(trainer.config.training.steps):
        began = time.process_time()
        trainer.step(trainer.fetch())
        steps.append(time.process_time() - began)
        note("first step" if len(steps) == 1 else "later steps")
    if trainer.ranks.is_main:
        results = {"phases": phases, "steps": steps[1:], "gib": resident_gib("VmHWM") - before, "peak": matmul_gflops()}
        with open(path, "w") as file:
            json.dump(results, file)
    exit_with(lambda: 0)


def resident_gib(name: str) -> float:
    """Return the GiB of this process: VmRSS (now) or VmHWM (peak)."""
    with open("/proc/self/status") as file:
        return int(file.read().split(f"{name}:")[1].split()[0]) / 2**20


def matmul_gflops() -> float:
    """Measure the GFLOP/s of float32 matrix products of 1024 rows and columns, by the CPU time of one thread."""
    import torch

    a, b = torch.randn(2, 1024, 1024)
    seconds = []
    for _ in range(10):
        began = time.process_time()
        a @ b
        seconds.append(time.process_time() - began)
    return 2 * 1024**3 / sorted(seconds)[5] / 1e9


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
