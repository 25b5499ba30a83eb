"""Signals to the launcher: the first asks all ranks to stop, saved; the second changes nothing; the third kills them.

A scheduler, a shell and a launcher above us may each send the same signal on, so that one request arrives several times
within moments; those count as one.
"""

import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from types import FrameType

from torchtitan.process.exit import stop_signals

ONE_REQUEST_SECONDS = 0.5


class Requests:
    """Counts requests to stop. Used by launcher and, where there is none, by the rank itself."""

    def __init__(self) -> None:
        self.first: int | None = None
        """The signal that asked first."""
        self.count = 0
        self._last = 0.0

    def add(self, number: int) -> bool:
        """Whether this signal is a request of its own."""
        now = time.monotonic()
        if self.first is not None and now - self._last < ONE_REQUEST_SECONDS:
            return False
        self.first = self.first or number
        self.count += 1
        self._last = now
        return True


class SignalQueue:
    """Stop signals as they come, and a wait that ends early with one or with the end of a child."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._came: list[int] = []
        handlers = {number: self._remember for number in stop_signals()} | {signal.SIGCHLD: self._wake}
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)

    def _wake(self, number: int, frame: FrameType | None) -> None:
        """Nothing; but a signal that has no handler would not end the wait."""

    def wait(self, seconds: float, also: Sequence[socket.socket] = ()) -> list[int]:
        """The stop signals that came until now, after `seconds` at most, or once there is something to read `also`."""
        if not self._came:
            select.select([self._read, *(each.fileno() for each in also)], [], [], max(0.0, seconds))
        while True:
            try:
                if not os.read(self._read, 4096):
                    break
            except BlockingIOError:
                break
        came, self._came = self._came, []
        return came

    def close(self) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)
