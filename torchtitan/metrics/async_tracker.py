"""Run a tracker in a separate thread, so that its errors and delays do not affect the run. metrics.jsonl has every
record in any case.
"""

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial

from torchtitan.metrics.trackers.interface import Histogram, Tracker

logger = logging.getLogger(__name__)

LONGEST_QUEUE = 1000
"""Maximum number of records that wait for a tracker. Further records are dropped and counted."""
CLOSE_SECONDS = 30.0
"""Longest wait at the end of the run for a tracker that still has records to send."""
PAUSES = (1.0, 5.0, 30.0, 60.0)
"""Seconds before each retry. The last value applies to all further ones."""


class PatientTracker:
    """A tracker in a separate thread that retries after errors.

    `make` opens the tracker, also in the thread, because it may wait minutes for a service that cannot be reached.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        pauses: tuple[float, ...] = PAUSES,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self.name, self.make, self.pauses, self.close_seconds = name, make, pauses, close_seconds
        self.dropped = 0
        self._waiting: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(LONGEST_QUEUE)
        self._leaving = threading.Event()
        self._tracker: Tracker | None = None
        # a daemon, so that a blocked tracker does not keep the process alive
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._have(lambda tracker: tracker.log(values, step))

    def histograms(self, found: Mapping[str, Histogram], step: int) -> None:
        self._have(lambda tracker: tracker.histograms(found, step))

    def go_back(self, step: int) -> None:
        self._have(lambda tracker: tracker.go_back(step))

    def _have(self, done: Callable[[Tracker], None]) -> None:
        try:
            self._waiting.put_nowait(done)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                logger.warning("%s does not keep up: records are dropped, the run goes on", self.name)

    def close(self) -> None:
        """Wait up to `close_seconds` for the tracker to write the remaining records."""
        self._leaving.set()
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            self.dropped += 1
        self._thread.join(self.close_seconds)
        if self._thread.is_alive():
            logger.warning("%s is left behind after %g s with records unwritten", self.name, self.close_seconds)
        elif self.dropped:
            logger.warning("%s lacks %d records; metrics.jsonl has them all", self.name, self.dropped)

    def _work(self) -> None:
        while (write := self._waiting.get()) is not None:
            if not self._try(partial(self._do, write)):
                self.dropped += 1
            if self._leaving.is_set() and self._waiting.empty():
                break
        if self._tracker is not None:
            self._try(self._tracker.close)

    def _do(self, write: Callable[[Tracker], None]) -> None:
        write(self._open())

    def _open(self) -> Tracker:
        if self._tracker is None:
            self._tracker = self.make()
        return self._tracker

    def _try(self, action: Callable[[], None]) -> bool:
        """Call `action` until it succeeds (True) or the run ends while it fails (False)."""
        tries = 0
        while True:
            try:
                action()
            except Exception as error:  # a tracker's library may raise any type
                if tries == 0:
                    text = f"{type(error).__name__}: {error}"
                    logger.warning("%s fails (%s): the run goes on, and it is tried again", self.name, text)
                if self._leaving.wait(self.pauses[min(tries, len(self.pauses) - 1)]):
                    return False
                tries += 1
                continue
            if tries:
                logger.warning("%s works again after %d tries", self.name, tries)
            return True
