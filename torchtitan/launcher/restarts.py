"""Restart all ranks after a crash or a hang, from the newest checkpoint.

Deterministic failures (a refused job, no loadable checkpoint, a non-finite loss) and requested stops are not retried. A
job that crashes repeatedly without saving in between is given up after `job.max_restarts` attempts. Each new checkpoint
resets the count.
"""

import time
from collections.abc import Callable

from torchtitan.core.machine_errors import MachineError
from torchtitan.launcher.hangs import ExitReport, combine_reports
from torchtitan.launcher.messages import Ended, Leave, Start, Stop
from torchtitan.launcher.monitor import RankMonitor
from torchtitan.launcher.multi_node import QUIET_SECONDS, Coordinator, Lost, Worker
from torchtitan.launcher.processes import SignalQueue
from torchtitan.metrics.run_end import RunEnd
from torchtitan.process.exit import CRASH_LOOP, CRASHED, HUNG, STOPPED
from torchtitan.process.ranks import Restart
from torchtitan.process.run_log import print_error

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
DONE_SECONDS = 90.0
"""Longest wait for the first machine where all ranks had reached their end. If the first machine lost this one before
it received that report, it notices within half a minute and restarts all ranks.
"""
_THE_END = "the run ends. Start all machines again to resume from the newest checkpoint"


def supervise(
    start: Callable[[Restart | None], RankMonitor],
    queue: SignalQueue,
    max_restarts: Callable[[], int],
    newest: Callable[[], int | None],
    coordinator: Coordinator | None = None,
    rejoin_seconds: float = 0,
) -> RunEnd:
    """Start all ranks, restart them as needed, and return the end of the run.

    Runs on the first machine, for all. `max_restarts()` and `newest()`, the step of the newest checkpoint, are asked
    after each start; None for a script that is not known to have one. Lost machines are waited for for up to
    `rejoin_seconds`.
    """
    coordinator = coordinator or Coordinator()
    saved_step, attempts, num_restarts = newest(), 0, 0
    first_step = saved_step
    restart: Restart | None = None
    faults: list[str] = []
    reached = None
    while True:
        monitor = start(restart)
        local_report = monitor.exit_report(monitor.wait())
        report = combine_reports(coordinator.gather_reports(local_report, queue), monitor.folder)
        reached = report.reached or reached
        if report.code == HUNG:
            print_error(report.cause)
        if coordinator.lost_machines and local_report.done:  # all saved here, so the lost machines had saved too
            print_error(f"{', '.join(coordinator.lost_machines)} gone, after everything was saved")
            return _end(local_report, reached)
        most = max_restarts()
        if report.is_final or not most:
            if coordinator.lost_machines:
                print_error(f"{', '.join(coordinator.lost_machines)} gone; not started again")
            return _end(report, reached)
        if (code := _wait_for_lost(queue, coordinator, rejoin_seconds)) is not None:
            return _end(report, reached, code)
        step = _newest_or(saved_step, newest)
        if step != saved_step:  # lower if the run rolled back and moved newer checkpoints aside
            saved_step, attempts, faults = step, 0, []
        cause, failed_at = report.cause.partition("; stacks")[0], time.monotonic()
        faults.append(f"step {report.reached}: {cause}")
        if attempts == most:
            print_error(f"crashed {attempts + 1} times without saving anything in between; given up. Its faults:")
            print_error("\n".join(faults))
            return _end(report, reached, CRASH_LOOP)
        attempts, num_restarts = attempts + 1, num_restarts + 1
        pause = min(FIRST_PAUSE_SECONDS * 2 ** (attempts - 1), LONGEST_PAUSE_SECONDS)
        print_error(f"restart {attempts} of {most} in {pause:g} s: {cause}{_consequence(step, report.reached)}")
        stop_signal = _pause(queue, pause, coordinator)
        if stop_signal is not None:
            return _end(report, reached, 128 + stop_signal)
        if (code := _wait_for_lost(queue, coordinator, rejoin_seconds)) is not None:
            return _end(report, reached, code)
        has_saved = step != first_step or (restart is not None and restart.saved)
        restart = Restart(
            num_restarts, cause, report.rank, report.reached, monitor.processes.started_at, has_saved, failed_at
        )


def _end(report: ExitReport, reached: int | None, code: int | None = None) -> RunEnd:
    """Return the end of a run whose ranks ended as reported. `code`: another exit code than theirs."""
    reason = f"{report.end_by}: {report.end_reason}" if report.end_by else report.end_reason
    reason = reason or (report.cause if report.code not in STOPPED else "")
    if code is None or code == report.code:
        return RunEnd(report.code, report.end_cause, reason, reached)
    return RunEnd(code, reason=reason, step=reached)


def _consequence(step: int | None, reached: int) -> str:
    """Describe from where a restart goes on. `step`: of the newest checkpoint; `reached`: the last completed one."""
    if step is None:
        return "; the script starts again"
    repeated_steps = max(0, reached - max(step, 0))
    return f" after step {reached}; going on from step {max(step, 0)}, so that {repeated_steps} steps are done again"


def _newest_or(step: int | None, newest: Callable[[], int | None]) -> int | None:
    """Return the step of the newest checkpoint; `step` if the machine cannot read them now, so that ranks are restarted
    all the same: they meet the error too, and it may be gone by then.
    """
    try:
        return newest()
    except MachineError as error:
        print_error(str(error))
        return step


def _wait_for_lost(queue: SignalQueue, coordinator: Coordinator, seconds: float) -> int | None:
    """Wait until all machines are connected again. Return None, or the exit code if the run ends instead."""
    if not coordinator.lost_machines:
        return None
    stop_signal = coordinator.wait_for_lost(queue, seconds, print_error) if seconds else None
    if stop_signal is not None:
        return 128 + stop_signal
    if coordinator.lost_machines:
        waited = f" for {seconds:.0f} s (job.rejoin_seconds)" if seconds else ""
        print_error(f"{', '.join(coordinator.lost_machines)} gone{waited}; {_THE_END}")
        return CRASHED
    return None


def _pause(queue: SignalQueue, seconds: float, coordinator: Coordinator) -> int | None:
    """Wait before a restart.

    Return the stop signal that ended the wait, if any, or that arrived while the ends were gathered.
    """
    deadline = time.monotonic() + seconds
    while True:
        for message in coordinator.take_orders():
            if isinstance(message, Stop):
                return message.number
        remaining = deadline - time.monotonic()
        if remaining <= 0 or coordinator.lost_machines:
            return None
        for number in queue.wait(remaining, coordinator.sockets):
            return number


def follow_coordinator(
    start: Callable[[Start], RankMonitor], queue: SignalQueue, worker: Worker, rejoin_seconds: float = 0
) -> int:
    """Start and end ranks as the first machine orders, on any other machine; return the exit code of the run.

    `start` gets the order. If the first machine is lost, this one tries to reconnect for up to
    `rejoin_seconds`.
    """
    timeout = None
    report: ExitReport | None = None
    while True:
        order = worker.next_order(queue, print_error, timeout)
        if isinstance(order, Lost):
            code = _reconnect(queue, worker, order, report, rejoin_seconds)
            if code is not None:
                return code
            continue
        if isinstance(order, Leave):
            if order.text:
                print_error(order.text)
            return order.code
        monitor = start(order)
        report = monitor.exit_report(monitor.wait())
        worker.report_event(Ended(report=report))
        timeout = 2 * QUIET_SECONDS


def _reconnect(queue: SignalQueue, worker: Worker, lost: Lost, report: ExitReport | None, seconds: float) -> int | None:
    """Reconnect to the first machine after the connection was lost and all ranks here have ended. Return None on
    success, or the exit code if the run ends instead. `report`: how the newest start of the ranks ended here.
    """
    if report is not None and report.asked:
        return report.code
    complete_code = report.code if report is not None and report.done else None
    if complete_code is not None:
        seconds = min(seconds, DONE_SECONDS)
    if not seconds or lost.code in STOPPED:
        print_error(lost.text)
        return lost.code if complete_code is None else complete_code
    stop_signal = worker.rejoin(queue, seconds, print_error)
    if stop_signal is not None:
        return 128 + stop_signal
    if worker.sockets:
        return None
    if complete_code is not None:
        print_error(f"{lost.text}, after everything was saved")
        return complete_code
    print_error(f"{lost.text} for {seconds:.0f} s (job.rejoin_seconds); {_THE_END}")
    return CRASHED
