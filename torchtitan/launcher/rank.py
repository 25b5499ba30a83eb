"""This process as a rank: its start, the signals that ask it to stop, and its end. Needs no torch.

A program of a rank calls these in order, as train.py does. Only an engine announces its job: the launcher of a script
has not read it.

    ranks = start_rank()                        # before CUDA
    announce(config, ranks)                     # launcher/script.py
    stop_signals = StopSignals(ranks)           # until it has something to save, a signal raises KeyboardInterrupt
    stop_signals.on_request = request_stop      # from here on a signal calls this; it shall stop after the step
    end = RunEnd(0)                             # or training/ends.py: end_of, end_of_failure
    report_end(end, step, folder, ranks)        # then leave with end.code
"""

import faulthandler
import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from torchtitan.config.job import JobConfig
from torchtitan.core.errors import JobError
from torchtitan.launcher.hangs import respond_to_launcher
from torchtitan.launcher.processes import StopRequests
from torchtitan.launcher.run_folder import LOGS_FOLDER, empty_folder, hold_lock, this_process
from torchtitan.metrics.run_end import RunEnd, describe_last_end, record_end
from torchtitan.process.exit import die_with_parent, stop_signals
from torchtitan.process.ranks import Ranks, read_ranks, slurm_job
from torchtitan.process.run_log import set_up_logging

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 3


def start_rank() -> Ranks:
    """Return which rank this process is. Under the launcher it ends with that, and responds to its requests."""
    with suppress(OSError, RuntimeError):  # a notebook's stderr may be no file
        faulthandler.enable()  # print every thread's stack after a crash in native code
    ranks = read_ranks()
    if ranks.launcher is not None:
        die_with_parent(ranks.launcher.pid)
        respond_to_launcher(ranks.launcher)
    return ranks


@contextmanager
def begin_run(config: JobConfig, ranks: Ranks) -> Iterator[None]:
    """Log as the job wants, and hold its folder on the first rank, unless the launcher does so.

    Raises JobError if another run has the folder.
    """
    is_launched = ranks.launcher is not None and not ranks.launcher.job
    if config.job.clean_start != "never" and not is_launched and ranks.world_size > 1:
        reason = "ranks that torchrun starts do not wait until the folder is empty; start them by torchtitan train"
        raise JobError(f"job.clean_start: given {config.job.clean_start}; allowed: never under torchrun; {reason}")
    folder = Path(config.job.dump_folder)
    set_up_logging(ranks, config.metrics.log_timestamps, folder / LOGS_FOLDER if config.metrics.log_files else None)
    if not ranks.keeps_folder:
        yield
        return
    is_restart = ranks.launcher is not None and ranks.launcher.restart is not None
    with hold_lock(folder, this_process(*slurm_job())) as was_left:
        emptied = "" if is_restart else empty_folder(config, slurm_job()[1])
        for message in (emptied, describe_last_end(folder, was_left)):
            if message:
                logger.info("%s", message)
        yield


class StopSignals:
    """The stop signals of this process, handled from now on; to be created on the main thread.

    The first one calls `on_request`, in the signal handler. Without a launcher the third one raises KeyboardInterrupt;
    the launcher counts for all of its ranks, and kills them.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.requests, self.under_launcher = StopRequests(), ranks.launcher is not None
        self.on_request: Callable[[], None] | None = None
        """None while there is nothing to save: then each signal raises KeyboardInterrupt."""
        self._before = {number: signal.signal(number, self._handle) for number in stop_signals()}

    def _handle(self, number: int, frame: object) -> None:
        is_new = self.requests.add(number)
        if self.on_request is None:
            raise KeyboardInterrupt
        self.on_request()
        if not is_new or self.under_launcher:
            return
        if self.requests.count > 2:
            raise KeyboardInterrupt
        presses = "once more" if self.requests.count == 2 else "twice more"
        logger.info("stopping after this step (%s to stop at once, without saving)", presses)

    def restore(self) -> None:
        """Handle the signals as before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def wait_for_reporting_rank(ranks: Ranks, times: int = 1) -> None:
    """Give the rank that reports the failure time to do so: torchrun ends all ranks when the first one exits."""
    if ranks.launcher is None:
        time.sleep(times * PATIENCE_SECONDS)


def report_end(end: RunEnd, step: int | None, folder: Path, ranks: Ranks) -> None:
    """Pass the end of this rank on to the launcher; unless that has the job, the first rank records the run's end.

    `step`: the last completed one, None if it is not known.
    """
    if ranks.launcher is not None:
        end.pass_on(ranks.launcher.end)
    if ranks.keeps_folder and (problem := record_end(folder, replace(end, step=step))):
        logger.warning("%s", problem)
