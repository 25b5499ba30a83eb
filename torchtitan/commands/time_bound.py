"""Time limits for regular expressions and templates from files. Even a short one can run for years."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TooLong(Exception):
    """Raised when code exceeds its time limit."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TooLong after `seconds`, also inside a regular expression, which checks for signals while it runs.

    There is no limit outside of the main thread, because only that one receives signals. An outer limit continues
    afterwards with the time that it had left.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"no end after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    remaining, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, remaining)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def unhurried() -> Iterator[None]:
    """Suspend the surrounding time limit."""
    remaining = 0.0
    if threading.current_thread() is threading.main_thread():
        remaining, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        if remaining:
            signal.setitimer(signal.ITIMER_REAL, remaining)
