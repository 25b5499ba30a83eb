"""`torchtitan train`: the program of one rank under the launcher or torchrun; started by a user, it launches the ranks.

A rank checks its job before it imports torch, so that a typo costs no more than a second under torchrun too. This is
why the trainer is imported late.
"""

from torchtitan import cli

if __name__ == "__main__":  # as `torchtitan train`; its --help does not wait for the imports below
    cli.run("train")

import faulthandler
import importlib
import logging
import signal
from pathlib import Path
from typing import Any

from torchtitan.config import manager
from torchtitan.config.job import JobConfig
from torchtitan.core.hub import Access, set_access
from torchtitan.launch import launch, load_job, split_ranks
from torchtitan.launcher.forks import first_rank, fork_ranks
from torchtitan.launcher.hangs import write_stacks_on_request
from torchtitan.launcher.rank import StopSignals, begin_run, report_end, start_rank, wait_for_reporting_rank
from torchtitan.metrics.run_end import RunEnd
from torchtitan.process.exit import CRASHED, REFUSED, die_with_parent
from torchtitan.process.machine import no_gc_during_imports
from torchtitan.process.ranks import Launcher, Ranks, started_as_rank

logger = logging.getLogger("torchtitan.train")


def main(argv: list[str]) -> int:
    launcher = first_rank()
    if launcher is None and not started_as_rank():
        return launch(*split_ranks(argv))
    if launcher is not None:
        import_and_fork(launcher)
    ranks = start_rank()
    if ranks.launcher is None:  # otherwise the launcher has downloaded what the job names
        set_access(Access.WAIT if ranks.local_rank else Access.DOWNLOAD)
    config = load_job(
        argv,
        ranks.world_size,
        explain=ranks.local_rank == 0,  # each machine has its own files
        notices=ranks.is_main and ranks.launcher is None,
    )
    if config is None:
        if ranks.local_rank:
            wait_for_reporting_rank(ranks)
        return REFUSED
    with begin_run(config, ranks):
        if config.job.print_config and ranks.is_main:
            print(manager.to_toml(config))
        return run(config, ranks)


def import_and_fork(launcher: Launcher) -> None:
    """Import the trainer, start neither threads nor a process group, and return in a fork for each rank."""
    faulthandler.enable()
    die_with_parent(launcher.pid)
    write_stacks_on_request(launcher)
    with no_gc_during_imports():
        for name in ("ends", "trainer"):
            importlib.import_module(f"torchtitan.training.{name}")
    fork_ranks()


def run(config: JobConfig, ranks: Ranks) -> int:
    """Train the job on this rank and return the exit code (docs/troubleshooting.md)."""
    folder = Path(config.job.dump_folder)
    trainer: Any = None
    stop_signals = StopSignals(ranks)

    def request_stop() -> None:
        trainer.stops.requested = True

    def report(end: RunEnd) -> None:
        report_end(end, None if trainer is None else trainer.current_step, folder, ranks)

    with no_gc_during_imports():
        from torchtitan.training import ends
        from torchtitan.training import trainer as training

    try:
        trainer = training.Trainer(config, ranks)
        stop_signals.on_request = request_stop
        with trainer.callbacks:  # which note an error
            finished = trainer.train()
            trainer.finish()
        end = ends.end_of(trainer, finished, stop_signals.requests)
    except KeyboardInterrupt:
        end = RunEnd(128 + (stop_signals.requests.first or signal.SIGINT))
    except Exception as error:
        failure = ends.end_of_failure(error, trainer, ranks)
        if failure is None:
            logger.debug("crashed", exc_info=True)  # to the rank's log file; Python prints it on the console
            report(RunEnd(CRASHED, reason=f"{type(error).__name__}: {error}"))
            raise
        end = failure
    report(end)
    return end.code
