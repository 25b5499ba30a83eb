"""A job that ends itself: after a crash or a hang all ranks are started again and go on from the newest checkpoint.

What would only come again (a refused job, nothing loadable, a loss that is not finite) and what was asked for (a stop)
is not started again. A job that crashes without saving anything in between is given up after `job.max_restarts`
attempts; each new checkpoint makes the budget whole again.
"""

import sys
import time
from collections.abc import Callable

from torchtitan.launcher.stops import SignalQueue
from torchtitan.launcher.watching import Watch, say
from torchtitan.leaving import CRASH_LOOP, EXPLAINED
from torchtitan.ranks import Restart

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0


def supervise(
    start: Callable[[Restart | None], Watch], queue: SignalQueue, max_restarts: int, newest: Callable[[], int]
) -> int:
    """Start all ranks, again if need be; the exit code of the run. `newest()` is the step of the newest checkpoint."""
    saved, used, number = newest(), 0, 0
    first = saved
    restart: Restart | None = None
    faults: list[str] = []
    while True:
        watch = start(restart)
        code = watch.until_the_end()
        if code == 0 or code in EXPLAINED or watch.requests.count or watch.all_is_done() or not max_restarts:
            return code
        step = newest()
        if step != saved:  # also a lower one, of a run that went back and has moved the newer ones away
            saved, used, faults = step, 0, []
        fault = watch.fault()
        faults.append(f"step {fault.reached}: {fault.cause}")
        if used == max_restarts:
            say(f"crashed {used + 1} times without saving anything in between; given up. Its faults:", sys.stderr)
            say("\n".join(faults), sys.stderr)
            return CRASH_LOOP
        used, number = used + 1, number + 1
        pause = min(FIRST_PAUSE_SECONDS * 2 ** (used - 1), LONGEST_PAUSE_SECONDS)
        again = max(0, fault.reached - max(step, 0))
        say(
            f"restart {used} of {max_restarts} in {pause:g} s: {fault.cause} after step {fault.reached}; going on from "
            f"step {max(step, 0)}, so that {again} steps are done again",
            sys.stderr,
        )
        stop = _pause(queue, pause)
        if stop is not None:
            return 128 + stop
        has_saved = step != first or (restart is not None and restart.saved)
        restart = Restart(number, fault.cause, fault.rank, fault.reached, watch.processes.began, has_saved)


def _pause(queue: SignalQueue, seconds: float) -> int | None:
    """The stop signal that ended it, if any."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for number in queue.wait(until - time.monotonic()):
            return number
    return None
