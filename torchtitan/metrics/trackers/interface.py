"""The tracker interface, the description of a run that a tracker opens, and the thread that a tracker runs in."""

import importlib.util
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torchtitan.core.files import read_file

logger = logging.getLogger(__name__)

ID_FILE = "{}_run_id"
LONGEST_ID = 1000
"""Largest id file in bytes."""
Scalar = bool | int | float | str


@dataclass(frozen=True)
class TrackedRun:
    folder: Path
    """The job's folder."""
    events: Path
    """Folder for this rank's event files."""
    resume_step: int | None
    """The step at which a run resumes; None for a new run."""
    name: str
    job: Mapping[str, Any]

    def saved_id(self, tracker: str) -> str | None:
        """Return the tracker's id of this run if the run resumes, else None."""
        file = self._id_file(tracker)
        return read_file(file, LONGEST_ID).decode().strip() if self.resume_step is not None and file.exists() else None

    def save_id(self, tracker: str, number: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._id_file(tracker).write_text(number)

    def _id_file(self, tracker: str) -> Path:
        return self.folder / ID_FILE.format(tracker)

    @property
    def tags(self) -> list[str]:
        """Return the job's tags."""
        return list(self.job.get("job", {}).get("tags", []))

    def options(self) -> dict[str, Scalar]:
        """Return the job's options by dotted name, without lists."""
        return dict(_scalars(self.job))


def _scalars(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Scalar]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float | str):
            yield prefix + key, value


@dataclass(frozen=True)
class Histogram:
    """A histogram of a tensor's values, with buckets of equal width."""

    minimum: float
    maximum: float
    number: int
    sum: float
    sum_of_squares: float
    limits: Sequence[float]
    """Upper end of each bucket."""
    counts: Sequence[int]


class Tracker(ABC):
    """An interface to a service or file format for metrics. `log` gets a logged step's values by tag.

    Methods may raise and block, because they run in a separate thread (TrackerThread)."""

    name: ClassVar[str]
    """The product's name, for messages."""
    package: ClassVar[str]
    """The Python package that it needs."""
    entries: ClassVar[tuple[str, ...]] = ()
    """Names that it creates at the top of the job's folder, in addition to the id file that `save_id` writes."""
    runs_on_all_ranks: ClassVar[bool] = False
    """True if metrics.save_for_all_ranks also applies to this tracker."""

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None: ...

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def histograms(self, histograms: Mapping[str, Histogram], step: int) -> None:  # noqa: B027
        """Log histograms of weights and gradients; does nothing unless overridden."""

    def go_back(self, step: int) -> None:  # noqa: B027
        """Return to the state after `step`; later steps are logged once more. Does nothing unless overridden."""

    @abstractmethod
    def close(self) -> None: ...

    @classmethod
    def obstacle(cls) -> tuple[str, str] | None:
        """Return why the tracker cannot start here, as (allowed, remedy); None if it can."""
        if importlib.util.find_spec(cls.package) is None:
            remedy = f"pip install 'torchtitan-toml[{cls.package}]', or leave it out"
            return f"only with the package {cls.package}, which is not installed", remedy
        return None


LONGEST_QUEUE = 1000
"""Maximum number of records that wait for a tracker. Further records are dropped and counted."""
CLOSE_SECONDS = 30.0
"""Longest wait at the end of the run for a tracker that still has records to send."""
PAUSES = (1.0, 5.0, 30.0, 60.0)
"""Seconds before each retry. The last value applies to all further ones."""


class TrackerThread:
    """A tracker in a separate thread, so that its errors and delays do not affect the run. It retries after errors.

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
        self._closing = threading.Event()
        self._tracker: Tracker | None = None
        # a daemon, so that a blocked tracker does not keep the process alive
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._enqueue(lambda tracker: tracker.log(values, step))

    def histograms(self, histograms: Mapping[str, Histogram], step: int) -> None:
        self._enqueue(lambda tracker: tracker.histograms(histograms, step))

    def go_back(self, step: int) -> None:
        self._enqueue(lambda tracker: tracker.go_back(step))

    def _enqueue(self, done: Callable[[Tracker], None]) -> None:
        try:
            self._waiting.put_nowait(done)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                logger.warning("%s does not keep up: records are dropped, the run continues", self.name)

    def close(self) -> None:
        """Wait up to `close_seconds` for the tracker to write the remaining records."""
        self._closing.set()
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            self.dropped += 1
        self._thread.join(self.close_seconds)
        if self._thread.is_alive():
            logger.warning("%s is abandoned after %g s with unwritten records", self.name, self.close_seconds)
        elif self.dropped:
            logger.warning("%s lacks %d records; metrics.jsonl has them all", self.name, self.dropped)

    def _work(self) -> None:
        while (write := self._waiting.get()) is not None:
            if not self._try(partial(self._apply, write)):
                self.dropped += 1
            if self._closing.is_set() and self._waiting.empty():
                break
        if self._tracker is not None:
            self._try(self._tracker.close)

    def _apply(self, write: Callable[[Tracker], None]) -> None:
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
                    logger.warning("%s fails (%s): the run continues, and it is tried again", self.name, text)
                if self._closing.wait(self.pauses[min(tries, len(self.pauses) - 1)]):
                    return False
                tries += 1
                continue
            if tries:
                logger.warning("%s works again after %d tries", self.name, tries)
            return True
