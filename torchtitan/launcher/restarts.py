"""Restart all ranks after a crash or a hang, from the newest checkpoint.

Deterministic failures (a refused job, no loadable checkpoint, a non-finite loss) and requested stops are not retried. A
job that crashes repeatedly without saving in between is given up after `job.max_restarts` attempts. Each new checkpoint
resets the count.
"""

import sys
import time
from collections.abc import Callable

from torchtitan.launcher.exit_report import ExitReport, combine_reports
from torchtitan.launcher.monitor import RankMonitor, print_message
from torchtitan.launcher.multi_node import QUIET_SECONDS, Coordinator, Worker
from torchtitan.launcher.nodes import Message
from torchtitan.launcher.processes import SignalQueue
from torchtitan.process.exit import CRASH_LOOP, CRASHED, HUNG, STOPPED
from torchtitan.process.ranks import Restart

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
    max_restarts: int,
    newest: Callable[[], int],
    company: Coordinator | None = None,
    rejoin_seconds: float = 0,
) -> int:
    """Start all ranks, restart them as needed, and return the exit code of the run.

    Runs on the first machine, for all. `newest()` is the step of the newest checkpoint. Lost machines are waited for
    for up to `rejoin_seconds`.
    """
    company = company or Coordinator()
    saved, attempts, num_restarts = newest(), 0, 0
    first = saved
    restart: Restart | None = None
    faults: list[str] = []
    while True:
        watch = start(restart)
        local = watch.exit_report(watch.wait())
        end = combine_reports(company.gather_reports(local, queue))
        if end.code == HUNG:
            print_message(end.cause, sys.stderr)
        if company.lost_machines and local.done:  # all saved here, so the lost machines had saved too
            print_message(f"{', '.join(company.lost_machines)} gone, after everything was saved", sys.stderr)
            return local.code
        if end.is_final or not max_restarts:
            if company.lost_machines:
                print_message(f"{', '.join(company.lost_machines)} gone; not started again", sys.stderr)
            return end.code
        if (code := _reunite(queue, company, rejoin_seconds)) is not None:
            return code
        step = newest()
        if step != saved:  # lower if the run rolled back and moved newer checkpoints aside
            saved, attempts, faults = step, 0, []
        cause, ended = end.cause.partition("; stacks")[0], time.monotonic()
        faults.append(f"step {end.reached}: {cause}")
        if attempts == max_restarts:
            print_message(
                f"crashed {attempts + 1} times without saving anything in between; given up. Its faults:", sys.stderr
            )
            print_message("\n".join(faults), sys.stderr)
            return CRASH_LOOP
        attempts, num_restarts = attempts + 1, num_restarts + 1
        pause = min(FIRST_PAUSE_SECONDS * 2 ** (attempts - 1), LONGEST_PAUSE_SECONDS)
        repeated_steps = max(0, end.reached - max(step, 0))
        print_message(
            f"restart {attempts} of {max_restarts} in {pause:g} s: {cause} after step {end.reached}; going on from "
            f"step {max(step, 0)}, so that {repeated_steps} steps are done again",
            sys.stderr,
        )
        stop = _pause(queue, pause, company)
        if stop is not None:
            return 128 + stop
        if (code := _reunite(queue, company, rejoin_seconds)) is not None:
            return code
        has_saved = step != first or (restart is not None and restart.saved)
        restart = Restart(num_restarts, cause, end.rank, end.reached, watch.processes.began, has_saved, ended)


def _reunite(queue: SignalQueue, company: Coordinator, seconds: float) -> int | None:
    """Wait until all machines are connected again. Return None, or the exit code if the run ends instead."""
    if not company.lost_machines:
        return None
    stop = company.wait_for_lost(queue, seconds, _report) if seconds else None
    if stop is not None:
        return 128 + stop
    if company.lost_machines:
        waited = f" for {seconds:.0f} s (job.rejoin_seconds)" if seconds else ""
        print_message(f"{', '.join(company.lost_machines)} gone{waited}; {_THE_END}", sys.stderr)
        return CRASHED
    return None


def _report(text: str) -> None:
    print_message(text, sys.stderr)


def _pause(queue: SignalQueue, seconds: float, company: Coordinator) -> int | None:
    """Wait before a restart.

    Return the stop signal that ended the wait, if any, or that arrived while the ends were gathered.
    """
    deadline = time.monotonic() + seconds
    while True:
        for message in company.take_orders():
            if message["kind"] == "stop":
                return message["number"]
        remaining = deadline - time.monotonic()
        if remaining <= 0 or company.lost_machines:
            return None
        for number in queue.wait(remaining, company.sockets):
            return number


def follow(
    start: Callable[[int, Restart | None], RankMonitor], queue: SignalQueue, other: Worker, rejoin_seconds: float = 0
) -> int:
    """Start and end ranks as the first machine orders, on any other machine; return the exit code of the run.

    `start` gets the port of the ranks' store. If the first machine is lost, this one tries to reconnect for up to
    `rejoin_seconds`.
    """
    patience = None
    end: ExitReport | None = None
    while True:
        order = other.next_order(queue, _report, patience)
        if order["kind"] == "lost":
            code = _find_the_first(queue, other, order, end, rejoin_seconds)
            if code is not None:
                return code
            continue
        if order["kind"] == "leave":
            if "text" in order:
                print_message(order["text"], sys.stderr)
            return order["code"]
        watch = start(order["port"], Restart(**order["restart"]) if order["restart"] else None)
        end = watch.exit_report(watch.wait())
        other.report_event("end", **end.to_fields())
        patience = 2 * QUIET_SECONDS


def _find_the_first(
    queue: SignalQueue, other: Worker, lost: Message, end: ExitReport | None, seconds: float
) -> int | None:
    """Reconnect to the first machine after the connection was lost and all ranks here have ended. Return None on
    success, or the exit code if the run ends instead. `end`: how the newest start of the ranks ended here.
    """
    if end is not None and end.asked:
        return end.code
    complete_code = end.code if end is not None and end.done else None
    if complete_code is not None:
        seconds = min(seconds, DONE_SECONDS)
    if end is None or not seconds or lost["code"] in STOPPED:
        print_message(lost["text"], sys.stderr)
        return lost["code"] if complete_code is None else complete_code
    stop = other.rejoin(queue, seconds, _report)
    if stop is not None:
        return 128 + stop
    if other.sockets:
        return None
    if complete_code is not None:
        print_message(f"{lost['text']}, after everything was saved", sys.stderr)
        return complete_code
    print_message(f"{lost['text']} for {seconds:.0f} s (job.rejoin_seconds); {_THE_END}", sys.stderr)
    return CRASHED
