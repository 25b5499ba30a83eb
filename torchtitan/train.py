"""`torchtitan train`: the program of one rank under the launcher or torchrun; started by a user, it launches one rank.

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
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan.checkpoint import CannotSave, CheckpointError
from torchtitan.config import manager
from torchtitan.config.job import JobConfig
from torchtitan.core.errors import JobError, wrap_lines
from torchtitan.core.machine_errors import MachineError
from torchtitan.launch import launch, load_job
from torchtitan.launcher.forks import first_rank, fork_ranks
from torchtitan.launcher.hangs import respond_to_launcher, write_stacks_on_request
from torchtitan.launcher.lock import hold_lock, this_process
from torchtitan.launcher.processes import StopRequests
from torchtitan.launcher.run_folder import LOGS_FOLDER, empty_folder
from torchtitan.metrics.run_end import DATA, EARLY_STOP, NOTHING_LEFT, RunEnd, describe_last_end, record_end
from torchtitan.process.exit import (
    CRASHED,
    DIFFERING,
    INTERRUPTED,
    NON_FINITE,
    NOT_EXPORTED,
    NOT_LOADED,
    NOT_SAVED,
    OUT_OF_MEMORY,
    OUT_OF_TIME,
    REFUSED,
    ExportError,
    die_with_parent,
    failure_kind,
    stop_signals,
)
from torchtitan.process.machine import no_gc_during_imports
from torchtitan.process.ranks import Launcher, Ranks, read_ranks, slurm_job, started_as_rank
from torchtitan.process.run_log import set_up_logging

logger = logging.getLogger("torchtitan.train")

PATIENCE_SECONDS = 3


def main(argv: list[str]) -> int:
    launcher = first_rank()
    if launcher is None and not started_as_rank():
        return launch(1, argv)
    faulthandler.enable()  # print every thread's stack after a crash in native code
    if launcher is not None:
        import_and_fork(launcher)
    ranks = read_ranks()
    if ranks.launcher is not None:
        die_with_parent(ranks.launcher.pid)
        respond_to_launcher(ranks.launcher)
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
    if config.job.clean_start != "never" and ranks.launcher is None and ranks.world_size > 1:
        reason = "ranks that torchrun starts do not wait until the folder is empty; start them by torchtitan train"
        raise JobError(f"job.clean_start: given {config.job.clean_start}; allowed: never under torchrun; {reason}")
    logs = Path(config.job.dump_folder, LOGS_FOLDER) if config.metrics.log_files else None
    set_up_logging(ranks, config.metrics.log_timestamps, logs)
    if config.job.print_config and ranks.is_main:
        print(manager.to_toml(config))
    if ranks.launcher is not None or not ranks.is_main:  # the launcher holds the folder for all of its ranks
        return run(config, ranks)
    folder = Path(config.job.dump_folder)
    with hold_lock(folder, this_process(*slurm_job())) as was_left:
        for message in (empty_folder(config, slurm_job()[1]), describe_last_end(folder, was_left)):
            if message:
                logger.info("%s", message)
        return run(config, ranks)


def import_and_fork(launcher: Launcher) -> None:
    """Import the trainer, start neither threads nor a process group, and return in a fork for each rank."""
    die_with_parent(launcher.pid)
    write_stacks_on_request(launcher)
    with no_gc_during_imports():
        importlib.import_module("torchtitan.training.trainer")
    fork_ranks()


def wait_for_reporting_rank(ranks: Ranks, times: int = 1) -> None:
    """Give the rank that reports the failure time to do so: torchrun ends all ranks when the first one exits."""
    if ranks.launcher is None:
        time.sleep(times * PATIENCE_SECONDS)


def run(config: JobConfig, ranks: Ranks) -> int:
    """Train the job on this rank and return the exit code (docs/troubleshooting.md)."""
    requests, folder = StopRequests(), Path(config.job.dump_folder)
    trainer = None

    def request_stop(number: int, frame: object) -> None:
        is_new = requests.add(number)
        if trainer is None:  # nothing to save yet
            raise KeyboardInterrupt
        trainer.stops.requested = True
        if not is_new or ranks.launcher is not None:  # it counts for all ranks, and kills at the third
            return
        if requests.count > 2:
            raise KeyboardInterrupt
        presses = "once more" if requests.count == 2 else "twice more"
        logger.info("stopping after this step (%s to stop at once, without saving)", presses)

    for number in stop_signals():
        signal.signal(number, request_stop)
    with no_gc_during_imports():
        from torchtitan.training import trainer as training

    try:
        trainer = training.Trainer(config, ranks)
        finished = trainer.train()
        trainer.close()
        end = end_of(trainer, finished, requests)
    except KeyboardInterrupt:
        end = RunEnd(128 + requests.first if requests.first else INTERRUPTED)
    except Exception as error:
        failure = end_of_failure(error, trainer, ranks)
        if failure is None:
            logger.debug("crashed", exc_info=True)  # to the rank's log file; Python prints it on the console
            report_end(RunEnd(CRASHED, reason=f"{type(error).__name__}: {error}"), trainer, folder, ranks)
            raise
        end = failure
    report_end(end, trainer, folder, ranks)
    return end.code


def end_of(trainer: Any, finished: bool, requests: StopRequests) -> RunEnd:
    """Return the end of a run without a failure."""
    if finished:
        reason = trainer.findings.stop_reason
        if trainer.step == trainer.state.start_step and not reason:
            return RunEnd(0, NOTHING_LEFT)
        return RunEnd(0, EARLY_STOP if reason else "", reason)
    if trainer.stops.out_of_time and not requests.first:
        return RunEnd(OUT_OF_TIME)
    # even if only another rank got the signal, perhaps on another machine: an unfinished run must not look finished
    return RunEnd(128 + (requests.first or signal.SIGTERM))


def end_of_failure(error: Exception, trainer: Any, ranks: Ranks) -> RunEnd | None:
    """Log a failure, unless that is another rank's task, and return the end of the run; None for a crash."""
    from torchtitan.metrics.device import describe_memory
    from torchtitan.training import trainer as training

    if isinstance(error, training.PeerStopped):
        wait_for_reporting_rank(ranks, times=2)
        return RunEnd(REFUSED, DATA)
    if isinstance(error, ExportError):
        return RunEnd(report_failed_export(error, trainer, ranks), reason=str(error))
    if isinstance(error, JobError | training.BadStep | training.ReplicasDiffer):
        if not ranks.is_main:
            # only the first rank reports a failure of all ranks: when it exits, torchrun ends this wait
            wait_for_reporting_rank(ranks)
        # the launcher does not end ranks at once, so there only a machine's first rank reports a failure of all ranks
        on_all = isinstance(error, CheckpointError | training.COMMON_FAILURES)
        if not on_all or ranks.launcher is None or ranks.local_rank == 0:
            logger.error("%s", wrap_lines(error))
        if isinstance(error, CheckpointError):
            is_start = trainer is None and not isinstance(error, CannotSave)
            return RunEnd(NOT_LOADED if is_start else NOT_SAVED, reason=str(error))
        if isinstance(error, training.ReplicasDiffer):
            return RunEnd(DIFFERING, reason=str(error))
        if isinstance(error, training.BadStep):
            return RunEnd(NON_FINITE, reason=str(error))
        return RunEnd(REFUSED, DATA * isinstance(error, training.DataError | training.NothingToLearn), str(error))
    if isinstance(error, MachineError):
        if not error.on_all_ranks or (ranks.is_main if ranks.launcher is None else ranks.local_rank == 0):
            logger.error("%s", wrap_lines(error))
        if error.on_all_ranks and not ranks.is_main:
            wait_for_reporting_rank(ranks)
        return RunEnd(CRASHED, reason=str(error))
    kind = failure_kind(error)
    if kind == "memory":
        memory = (
            describe_memory(trainer.model.device, trainer.model.named_parameters(), trainer.optimizers)
            if trainer
            else "  in the start of the run"
        )
        logger.error("out of memory: %s\n%s", error, memory)
        return RunEnd(OUT_OF_MEMORY, reason=str(error))
    if kind == "peer":  # that rank and the launcher report its end
        logger.error("another rank is gone: %s", str(error).splitlines()[0])
        return RunEnd(CRASHED, reason="another rank is gone")
    return None


def report_end(end: RunEnd, trainer: Any, folder: Path, ranks: Ranks) -> None:
    """Pass the end of this rank on to the launcher; without one, the first rank records the end of the run."""
    if ranks.launcher is not None:
        end.pass_on(ranks.launcher.end)
    elif ranks.is_main:
        end = replace(end, step=None if trainer is None else trainer.step)
        if problem := record_end(folder, end):
            logger.warning("%s", problem)


def report_failed_export(error: Exception, trainer: Any, ranks: Ranks) -> int:
    """Report a run that is complete except for its export. The launcher does not restart it."""
    on_all = isinstance(error.__cause__, CheckpointError)
    if not on_all or ranks.local_rank == 0:
        ours = error.__cause__ if not isinstance(error.__cause__, JobError | OSError) else None
        logger.error("%s", error, exc_info=ours)
    try:
        trainer.report()
    except Exception as another:  # from a tracker or the plot: the exit code stays
        logger.warning("the run's outputs were not closed: %s: %s", type(another).__name__, another)
    if not ranks.is_main:
        wait_for_reporting_rank(ranks)
    return NOT_EXPORTED
