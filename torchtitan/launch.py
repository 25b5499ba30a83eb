"""Start the ranks of one machine: torchrun, with the ranks' own exit codes and without its banners.

`python -m torchtitan.launch NUM_RANKS [arguments of torchtitan train]`. torchrun turns every failure into exit code 1
and a page of traceback; a refused job (2) or a stop by Ctrl-C (130) has already said what there is to say.
"""

import logging
import os
import sys

from torchtitan import train
from torchtitan.leaving import exit_with
from torchtitan.ranks import set_default

EXPLAINED = {train.REFUSED, train.NOT_LOADED, train.NON_FINITE, train.NOT_SAVED, train.INTERRUPTED, 143}
SHUTDOWN_SECONDS = 300
"""Longest wait, after Ctrl-C, for ranks that save their state, before they are killed."""


def main(argv: list[str]) -> int:
    if not argv or not argv[0].isdigit() or int(argv[0]) < 1:
        given = f"given {argv[0]!r}" if argv else "not given"
        told = f"the number of ranks (NGPU): {given}; allowed: 1 or more; e.g. NGPU=2 ./run_llama_train.sh"
        print(told, file=sys.stderr)
        return train.REFUSED
    num_ranks, arguments = int(argv[0]), argv[1:]
    if num_ranks == 1:
        return train.main(arguments)
    # here, before any rank exists: in two seconds and once, not from every rank
    if train.load_job(arguments, num_ranks) is None:
        return train.REFUSED
    set_default("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    return launch(num_ranks, arguments)


def launch(num_ranks: int, arguments: list[str]) -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in list(logging.root.manager.loggerDict):  # each has a level and a handler of its own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    options = ["--standalone", f"--nproc-per-node={num_ranks}", f"--shutdown-timeout={SHUTDOWN_SECONDS}"]
    try:
        run.run(run.parse_args([*options, "-m", "torchtitan.train", *arguments]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        if code not in EXPLAINED:
            print(f"rank {rank} ended with exit code {code}; its output above tells why", file=sys.stderr)
        return code
    except SignalException as stop:
        return 128 + stop.sigval
    return 0


if __name__ == "__main__":
    exit_with(lambda: train.quietly(main, sys.argv[1:]))
