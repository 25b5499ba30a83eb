"""Compare loss and gradients of random legal plans with one device.

    python scripts/fuzz_plans.py --seed 1 --count 50 [--ranks 4]

Plans cover all families, odd degrees, uneven cuts, all schedules and context-parallel methods, recompute, adapters,
products in float8 and quantized collectives. Each passes `torchtitan check` and runs on CPU ranks in float64. Gathers
in int8 get weights that they do not change, and reductions in int4 exact messages, because they are lossy. Prints the
arguments of each plan that differs or fails, for `torchtitan check`; then the exit code is 1. A seed and a number give
the same plans everywhere.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.pool import RankFailed, run_ranks
from tests.support.random_plans import differences, on_ranks, plans


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4, help="at most")
    options = parser.parse_args()
    num_different = 0
    for number, (ranks, arguments) in enumerate(plans(options.seed, options.count, options.ranks)):
        try:
            problems = differences(arguments, ranks, run_ranks(ranks, on_ranks, arguments))
        except RankFailed as error:
            problems = str(error).splitlines()[-1:]
        num_different += bool(problems)
        print(f"{number}: {ranks} ranks, {'; '.join(problems[:3]) or 'equal'}", flush=True)
        if problems:
            print(f"   {' '.join(arguments)}", flush=True)
    print(f"{num_different} of {options.count} plans differ")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
