"""The ends of a run: its exit code by what has happened, logged once by the rank whose task that is."""

import logging
import signal
from typing import Any

from torchtitan.checkpoint import CannotSave, CheckpointError
from torchtitan.core.errors import JobError, wrap_lines
from torchtitan.core.machine_errors import MachineError
from torchtitan.datasets.sources import DataError
from torchtitan.guards import BadStep, NothingToLearn, ReplicasDiffer
from torchtitan.launcher.processes import StopRequests
from torchtitan.launcher.rank import wait_for_reporting_rank
from torchtitan.metrics.device import describe_memory
from torchtitan.metrics.run_end import DATA, EARLY_STOP, NOTHING_LEFT, PEER_GONE, RunEnd
from torchtitan.process.exit import (
    CRASHED,
    DIFFERING,
    NON_FINITE,
    NOT_EXPORTED,
    NOT_LOADED,
    NOT_SAVED,
    OUT_OF_MEMORY,
    OUT_OF_TIME,
    REFUSED,
    ExportError,
    failure_kind,
)
from torchtitan.process.ranks import Ranks
from torchtitan.training.batches import PeerStopped

logger = logging.getLogger(__name__)

COMMON_FAILURES = BadStep | ReplicasDiffer | NothingToLearn
"""Raised by all ranks at the same step."""


def end_of(trainer: Any, finished: bool, requests: StopRequests) -> RunEnd:
    """Return the end of a run without a failure."""
    if finished:
        reason = trainer.findings.stop_reason
        if trainer.current_step == trainer.state.start_step and not reason:
            return RunEnd(0, NOTHING_LEFT)
        return RunEnd(0, EARLY_STOP if reason else "", reason)
    if trainer.stops.out_of_time and not requests.first:
        return RunEnd(OUT_OF_TIME)
    # even if only another rank got the signal, perhaps on another machine: an unfinished run must not look finished
    return RunEnd(128 + (requests.first or signal.SIGTERM))


_END = "torchtitan_end"
"""Attribute of an exception that has been logged: its end."""


def end_of_failure(error: Exception, trainer: Any, ranks: Ranks) -> RunEnd | None:
    """Log a failure, unless that is another rank's task, and return the end of the run; None for a crash, which is not
    logged.

    An engine calls this when it is left by an exception, and the program that runs the script does so again for the
    same exception: then nothing is logged. `trainer`: None if the failure ended the start. Of a trainer `model`,
    `optimizers` and `report()` are used.
    """
    if not hasattr(error, _END):
        setattr(error, _END, _log_failure(error, trainer, ranks))
    return getattr(error, _END)


def _log_failure(error: Exception, trainer: Any, ranks: Ranks) -> RunEnd | None:
    if isinstance(error, PeerStopped):
        wait_for_reporting_rank(ranks, times=2)
        return RunEnd(REFUSED, DATA)
    if isinstance(error, ExportError):
        return RunEnd(report_failed_export(error, trainer, ranks), reason=str(error))
    if isinstance(error, JobError | BadStep | ReplicasDiffer):
        if not ranks.is_main:
            # only the first rank reports a failure of all ranks: when it exits, torchrun ends this wait
            wait_for_reporting_rank(ranks)
        # the launcher does not end ranks at once, so there only a machine's first rank reports a failure of all ranks
        on_all = isinstance(error, CheckpointError | COMMON_FAILURES)
        if not on_all or ranks.launcher is None or ranks.local_rank == 0:
            logger.error("%s", wrap_lines(error))
        if isinstance(error, CheckpointError):
            is_start = trainer is None and not isinstance(error, CannotSave)
            return RunEnd(NOT_LOADED if is_start else NOT_SAVED, reason=str(error))
        if isinstance(error, ReplicasDiffer):
            return RunEnd(DIFFERING, reason=str(error))
        if isinstance(error, BadStep):
            return RunEnd(NON_FINITE, reason=str(error))
        return RunEnd(REFUSED, DATA * isinstance(error, DataError | NothingToLearn), str(error))
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
        logger.error("%s: %s", PEER_GONE, str(error).splitlines()[0])
        return RunEnd(CRASHED, reason=PEER_GONE)
    return None


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
