"""A bound on the time that what a file says may take: a pattern or a template of a few letters can go on for years."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TooLong(Exception):
    """Of what did not end in its time."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """TooLong behind `seconds`, also out of a regular expression, which looks for signals as it goes on. No bound
    outside of the main thread, which alone hears them. What was left of another's time is left of it behind this one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"no end after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def unhurried() -> Iterator[None]:
    """Time that does not count for a bound around it."""
    left = 0.0
    if threading.current_thread() is threading.main_thread():
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        if left:
            signal.setitimer(signal.ITIMER_REAL, left)
