"""A job that ends itself: after a crash or a hang all ranks are started again and go on from the newest checkpoint.

What would only come again (a refused job, nothing loadable, a loss that is not finite) and what was asked for (a stop)
is not started again. A job that crashes without saving anything in between is given up after `job.max_restarts`
attempts; each new checkpoint makes the budget whole again.
"""

import sys
import time
from collections.abc import Callable

from torchtitan.launcher.company import QUIET_SECONDS, First, Other
from torchtitan.launcher.ends import together
from torchtitan.launcher.stops import SignalQueue
from torchtitan.launcher.watching import Watch, say
from torchtitan.leaving import CRASH_LOOP, CRASHED, HUNG
from torchtitan.ranks import Restart

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0


def supervise(
    start: Callable[[Restart | None], Watch],
    queue: SignalQueue,
    max_restarts: int,
    newest: Callable[[], int],
    company: First | None = None,
) -> int:
    """Start all ranks, again if need be; the exit code of the run. `newest()` is the step of the newest checkpoint.
    Runs on the first machine, for all."""
    company = company or First()
    saved, used, number = newest(), 0, 0
    first = saved
    restart: Restart | None = None
    faults: list[str] = []
    while True:
        watch = start(restart)
        end = together(company.gather(watch.end(watch.until_the_end()), queue))
        if end.code == HUNG:
            say(end.cause, sys.stderr)
        if company.gone:
            say(f"{', '.join(company.gone)} gone; not started again without it", sys.stderr)
        if end.is_final or company.gone or not max_restarts:
            return end.code
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
        if company.gone:
            say(f"{', '.join(company.gone)} gone; not started again without it", sys.stderr)
            return CRASHED
        has_saved = step != first or (restart is not None and restart.saved)
        restart = Restart(number, cause, end.rank, end.reached, watch.processes.began, has_saved, ended)


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


def follow(start: Callable[[int, Restart | None], Watch], queue: SignalQueue, other: Other) -> int:
    """On any other machine: start and end ranks as the first one says; the exit code of the run. `start` is given the
    port of the ranks' store."""
    patience = None
    while True:
        order = other.next_order(queue, patience)
        if order["kind"] == "leave":
            if "text" in order:
                say(order["text"], sys.stderr)
            return order["code"]
        watch = start(order["port"], Restart(**order["restart"]) if order["restart"] else None)
        other.tell("end", **watch.end(watch.until_the_end()).plain())
        patience = 2 * QUIET_SECONDS
