"""A job that ends itself: after a crash or a hang all ranks are started again and go on from the newest checkpoint.

What would only come again (a refused job, nothing loadable, a loss that is not finite) and what was asked for (a stop)
is not started again. A job that crashes without saving anything in between is given up after `job.max_restarts`
attempts; each new checkpoint makes the budget whole again.
"""

import sys
import time
from collections.abc import Callable

from torchtitan.launcher.connection import Message
from torchtitan.launcher.exit_report import End, together
from torchtitan.launcher.monitor import Watch, say
from torchtitan.launcher.multi_node import QUIET_SECONDS, First, Other
from torchtitan.launcher.signals import SignalQueue
from torchtitan.process.exit import CRASH_LOOP, CRASHED, HUNG, STOPPED
from torchtitan.process.ranks import Restart

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
DONE_SECONDS = 90.0
"""Longest wait for the first machine where all ranks had come to their end: it notices in half a minute if it lost this
machine before it was told so, and then starts all again."""
_THE_END = "the run ends. Start all machines again to resume from the newest checkpoint"


def supervise(
    start: Callable[[Restart | None], Watch],
    queue: SignalQueue,
    max_restarts: int,
    newest: Callable[[], int],
    company: First | None = None,
    rejoin_seconds: float = 0,
) -> int:
    """Start all ranks, again if need be; the exit code of the run. `newest()` is the step of the newest checkpoint.
    Runs on the first machine, for all, and waits for machines that are gone for up to `rejoin_seconds`."""
    company = company or First()
    saved, used, number = newest(), 0, 0
    first = saved
    restart: Restart | None = None
    faults: list[str] = []
    while True:
        watch = start(restart)
        local = watch.end(watch.until_the_end())
        end = together(company.gather(local, queue))
        if end.code == HUNG:
            say(end.cause, sys.stderr)
        if company.gone and local.done:  # every rank here has ended, all saved: the others were no further behind
            say(f"{', '.join(company.gone)} gone, after everything was saved", sys.stderr)
            return local.code
        if end.is_final or not max_restarts:
            if company.gone:
                say(f"{', '.join(company.gone)} gone; not started again", sys.stderr)
            return end.code
        if (code := _reunite(queue, company, rejoin_seconds)) is not None:
            return code
        step = newest()
        if step != saved:  # also a lower one, of a run that went back and has moved the newer ones away
            saved, used, faults = step, 0, []
        cause, ended = end.cause.partition("; stacks")[0], time.monotonic()
        faults.append(f"step {end.reached}: {cause}")
        if used == max_restarts:
            say(f"crashed {used + 1} times without saving anything in between; given up. Its faults:", sys.stderr)
            say("\n".join(faults), sys.stderr)
            return CRASH_LOOP
        used, number = used + 1, number + 1
        pause = min(FIRST_PAUSE_SECONDS * 2 ** (used - 1), LONGEST_PAUSE_SECONDS)
        again = max(0, end.reached - max(step, 0))
        say(
            f"restart {used} of {max_restarts} in {pause:g} s: {cause} after step {end.reached}; going on from "
            f"step {max(step, 0)}, so that {again} steps are done again",
            sys.stderr,
        )
        stop = _pause(queue, pause, company)
        if stop is not None:
            return 128 + stop
        if (code := _reunite(queue, company, rejoin_seconds)) is not None:
            return code
        has_saved = step != first or (restart is not None and restart.saved)
        restart = Restart(number, cause, end.rank, end.reached, watch.processes.began, has_saved, ended)


def _reunite(queue: SignalQueue, company: First, seconds: float) -> int | None:
    """Wait until all machines are there again; None, or the exit code of a run that ends instead."""
    if not company.gone:
        return None
    stop = company.rejoin(queue, seconds, _report) if seconds else None
    if stop is not None:
        return 128 + stop
    if company.gone:
        waited = f" for {seconds:.0f} s (job.rejoin_seconds)" if seconds else ""
        say(f"{', '.join(company.gone)} gone{waited}; {_THE_END}", sys.stderr)
        return CRASHED
    return None


def _report(text: str) -> None:
    say(text, sys.stderr)


def _pause(queue: SignalQueue, seconds: float, company: First) -> int | None:
    """The stop signal that ended it, if any, or that was heard while the ends came in."""
    until = time.monotonic() + seconds
    while True:
        for message in company.look():
            if message["kind"] == "stop":
                return message["number"]
        left = until - time.monotonic()
        if left <= 0 or company.gone:
            return None
        for number in queue.wait(left, company.sockets):
            return number


def follow(
    start: Callable[[int, Restart | None], Watch], queue: SignalQueue, other: Other, rejoin_seconds: float = 0
) -> int:
    """On any other machine: start and end ranks as the first one says; the exit code of the run. `start` is given the
    port of the ranks' store. If the first machine is gone, it is looked for for up to `rejoin_seconds`."""
    patience = None
    end: End | None = None
    while True:
        order = other.next_order(queue, _report, patience)
        if order["kind"] == "lost":
            code = _find_the_first(queue, other, order, end, rejoin_seconds)
            if code is not None:
                return code
            continue
        if order["kind"] == "leave":
            if "text" in order:
                say(order["text"], sys.stderr)
            return order["code"]
        watch = start(order["port"], Restart(**order["restart"]) if order["restart"] else None)
        end = watch.end(watch.until_the_end())
        other.tell("end", **end.plain())
        patience = 2 * QUIET_SECONDS


def _find_the_first(queue: SignalQueue, other: Other, lost: Message, end: End | None, seconds: float) -> int | None:
    """After the connection to the first machine was lost, and all ranks here have ended: None once it is there again,
    or the exit code of a run that ends instead. `end`: how the newest start of the ranks ended here."""
    if end is not None and end.asked:
        return end.code
    complete_code = end.code if end is not None and end.done else None
    if complete_code is not None:
        seconds = min(seconds, DONE_SECONDS)
    if end is None or not seconds or lost["code"] in STOPPED:
        say(lost["text"], sys.stderr)
        return lost["code"] if complete_code is None else complete_code
    stop = other.rejoin(queue, seconds, _report)
    if stop is not None:
        return 128 + stop
    if other.sockets:
        return None
    if complete_code is not None:
        say(f"{lost['text']}, after everything was saved", sys.stderr)
        return complete_code
    say(f"{lost['text']} for {seconds:.0f} s (job.rejoin_seconds); {_THE_END}", sys.stderr)
    return CRASHED
