"""Compare the memory that the formula predicts with rehearsals, on random legal plans of models of published widths.

    python scripts/compare_memory.py --count 200 [--seed 1] [--kinds dense|experts|all|families|adapters|optimizers]

Prints each plan that differs by more than 3 % of the rehearsed peak, and how many do. Takes about 2 s a plan.
"""

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tests.support.memory_plans import FAMILIES, MODELS, adapter_plan, memory_plan, optimizer_plan
from torchtitan.config.manager import load
from torchtitan.job import ResolvedJob
from torchtitan.planner.estimate import predict, worst
from torchtitan.planner.memory.closed_form import predict_memory

GIB, TOLERANCE = 2**30, 0.03
KINDS = {
    "dense": partial(memory_plan, models=MODELS[:6]),
    "experts": partial(memory_plan, models=MODELS[6:]),
    "all": memory_plan,
    "families": partial(memory_plan, models=FAMILIES),
    "adapters": adapter_plan,
    "optimizers": optimizer_plan,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--kinds", choices=KINDS, default="all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    errors = []
    plan = KINDS[options.kinds]
    for number in range(options.count):
        ranks, arguments = plan(options.seed, number)
        job = ResolvedJob(load(arguments), ranks, "cuda")
        predicted, rehearsed = predict_memory(job).total, worst(predict(job))
        errors.append(predicted / rehearsed.peak - 1)
        if abs(errors[-1]) > TOLERANCE:
            sizes = f"{predicted / GIB:.2f} GiB by the formula, {rehearsed.peak / GIB:.2f} rehearsed"
            print(f"{number}: {errors[-1]:+.1%}, {sizes}\n   {' '.join(arguments)}", flush=True)
    absolute = sorted(map(abs, errors))
    within = sum(error <= TOLERANCE for error in absolute)
    print(f"{within} of {len(errors)} plans within {TOLERANCE:.0%}; median {statistics.median(absolute):.1%}", end=", ")
    print(f"largest {absolute[-1]:.1%}")
    return 0 if within == len(errors) else 1


if __name__ == "__main__":
    sys.exit(main())
