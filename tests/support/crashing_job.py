"""Run `python -m torchtitan.launch` with forked ranks, and kill the last one once: before the step after STEP.

Usage: crashing_job.py STEP RANKS ARGUMENTS. It recovers from its last save, as by any crash.
"""

import os
import signal
import sys
from typing import Any

from tests.support.forked_job import fork_ranks
from torchtitan import launch
from torchtitan.launcher import restarts
from torchtitan.process.exit import exit_with
from torchtitan.training.trainer import Trainer


def crash_once(step: int) -> None:
    """Let the last rank of a job that this process launches be killed before the step after `step`."""
    make_step = Trainer.step

    def killed(trainer: Trainer, batch: Any) -> Any:
        ranks = trainer.ranks
        if trainer.current_step == step and ranks.rank == ranks.world_size - 1 and not ranks.launcher.restart:
            os.kill(os.getpid(), signal.SIGKILL)
        return make_step(trainer, batch)

    Trainer.step = killed  # type: ignore[method-assign]


if __name__ == "__main__":
    restarts.FIRST_PAUSE_SECONDS = 0.01
    crash_once(int(sys.argv.pop(1)))
    fork_ranks()
    exit_with(lambda: launch.main(sys.argv[1:]))
