"""Handle signals to the launcher: the first makes all ranks save and stop, the second does nothing, the third kills
them.

A scheduler, a shell and a parent launcher may each forward the same signal, so one request can arrive several times
within moments. These count as one.
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
    """Counts stop requests. Used by the launcher and, without one, by the rank itself."""

    def __init__(self) -> None:
        self.first: int | None = None
        """The signal of the first request."""
        self.count = 0
        self._last = 0.0

    def add(self, number: int) -> bool:
        """Return True if this signal is a new request and not a copy of the last one."""
        now = time.monotonic()
        if self.first is not None and now - self._last < ONE_REQUEST_SECONDS:
            return False
        self.first = self.first or number
        self.count += 1
        self._last = now
        return True


class SignalQueue:
    """Collects stop signals, and wakes its `wait` for them and for the end of a child."""

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
        """Do nothing. A signal without a handler would not end the wait."""

    def wait(self, seconds: float, also: Sequence[socket.socket] = ()) -> list[int]:
        """Return the stop signals received so far.

        Waits at most `seconds` for one, or until a socket in `also` is readable.
        """
        if not self._came:
            select.select([self._read, *(connection.fileno() for connection in also)], [], [], max(0.0, seconds))
        while True:
            try:
                if not os.read(self._read, 4096):
                    break
            except BlockingIOError:
                break
        received, self._came = self._came, []
        return received

    def close(self) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)
