"""The tracker interface, and the description of a run that a tracker opens."""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torchtitan.core.files import read_file

ID_FILE = "{}_run_id"
LONGEST_ID = 1000
"""Largest id file in bytes."""
Scalar = bool | int | float | str


@dataclass(frozen=True)
class Run:
    folder: Path
    """The job's folder."""
    events: Path
    """Folder for this rank's event files."""
    resume_step: int | None
    """The step at which a run resumes; None for a new run."""
    name: str
    job: Mapping[str, Any]

    def kept_id(self, tracker: str) -> str | None:
        """Return the tracker's id of this run if the run resumes, else None."""
        file = self._id_file(tracker)
        return read_file(file, LONGEST_ID).decode().strip() if self.resume_step is not None and file.exists() else None

    def keep_id(self, tracker: str, number: str) -> None:
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

    Methods may raise and block, because they run in a separate thread (metrics/async_tracker.py)."""

    name: ClassVar[str]
    """The product's name, for messages."""
    package: ClassVar[str]
    """The Python package that it needs."""
    leaves: ClassVar[tuple[str, ...]] = ()
    """Names that it creates at the top of the job's folder, in addition to the id file that `keep_id` writes."""
    of_every_rank: ClassVar[bool] = False
    """True if metrics.save_for_all_ranks also applies to this tracker."""

    @abstractmethod
    def __init__(self, run: Run) -> None: ...

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def histograms(self, found: Mapping[str, Histogram], step: int) -> None:  # noqa: B027
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
            return f"with the {cls.package} package only, which is not installed", remedy
        return None
