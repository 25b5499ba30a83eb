"""`torchtitan train`: load the job, refuse what cannot work, train, close.

Under torchrun this is every rank's program. The job is checked before torch is imported, so a typo costs no more than
a second; hence the one late import of the trainer.
"""

import logging
import signal
import sys
import time
from collections.abc import Callable

from torchtitan import config_manager
from torchtitan.checkpoint import CheckpointError
from torchtitan.config import JobConfig
from torchtitan.leaving import exit_with
from torchtitan.options import ConfigError
from torchtitan.ranks import Ranks, likely_device, read_ranks, set_up_logging
from torchtitan.rules import check, with_faults_of_the_rest

logger = logging.getLogger(__name__)

REFUSED, NOT_LOADED, NON_FINITE, NOT_SAVED, INTERRUPTED = 2, 3, 4, 7, 130
PATIENCE_SECONDS = 3


def load_job(argv: list[str], world_size: int, explain: bool = True) -> JobConfig | None:
    """The checked job, or None after its faults have been printed to stderr, one line each."""
    try:
        config = config_manager.load(argv)
        faults = check(config, world_size, likely_device())
    except ConfigError as error:
        faults = with_faults_of_the_rest(error, world_size, likely_device())
    if not faults:
        return config
    if explain:
        print("\n".join(map(str, faults)), file=sys.stderr)
        print(f"{len(faults)} fault{'s' if len(faults) > 1 else ''} in the job; nothing was started", file=sys.stderr)
    return None


def main(argv: list[str]) -> int:
    ranks = read_ranks()
    config = load_job(argv, ranks.world_size, explain=ranks.local_rank == 0)  # each machine has files of its own
    if config is None:
        if ranks.local_rank:
            time.sleep(PATIENCE_SECONDS)  # let the one that explains speak
        return REFUSED
    set_up_logging(ranks)
    if config.job.print_config and ranks.is_main:
        print(config_manager.to_toml(config))
    return run(config, ranks)


def run(config: JobConfig, ranks: Ranks) -> int:
    """Train the job on this rank; the process's exit code (README, "Exit codes")."""
    stopped_by: list[int] = []
    trainer = None

    def request_stop(number: int, frame: object) -> None:
        stopped_by.append(number)
        if len(stopped_by) > 1 or trainer is None:  # a second request, or nothing to save yet
            raise KeyboardInterrupt
        trainer.stop_requested = True
        logger.info("stopping after this step (once more to stop at once)")

    signal.signal(signal.SIGINT, request_stop)
    signal.signal(signal.SIGTERM, request_stop)
    from torchtitan import trainer as training

    try:
        trainer = training.Trainer(config, ranks)
        finished = trainer.train()
        trainer.close()
    except KeyboardInterrupt:
        return 128 + stopped_by[-1] if stopped_by else INTERRUPTED
    except training.PeerStopped:
        time.sleep(2 * PATIENCE_SECONDS)  # the launcher ends all ranks when the first leaves: let the other one speak
        return REFUSED
    except (ValueError, training.NonFiniteError) as error:
        if not ranks.is_main:
            # what went wrong on all ranks is said by the first alone: its end ends this wait
            time.sleep(PATIENCE_SECONDS)
        logger.error("%s", error)
        if isinstance(error, CheckpointError):
            return NOT_LOADED if trainer is None else NOT_SAVED
        return NON_FINITE if isinstance(error, training.NonFiniteError) else REFUSED
    return 0 if finished or not stopped_by else 128 + stopped_by[0]


def quietly(command: Callable[[list[str]], int], argv: list[str]) -> int:
    """The command's exit code; Ctrl-C needs no traceback."""
    try:
        return command(argv)
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    exit_with(lambda: quietly(main, sys.argv[1:]))
