"""What a tracker is, and what it knows of the run that it opens."""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torchtitan.core.files import read_file

ID_FILE = "{}_run_id"
LONGEST_ID = 1000
"""Bytes."""
Scalar = bool | int | float | str


@dataclass(frozen=True)
class Run:
    folder: Path
    """The job's."""
    events: Path
    """For event files of this rank."""
    resume_step: int | None
    """The step that it resumes at, of a run that was tracked before."""
    name: str
    job: Mapping[str, Any]

    def kept_id(self, tracker: str) -> str | None:
        """By what the tracker calls this run, if it goes on."""
        file = self._id_file(tracker)
        return read_file(file, LONGEST_ID).decode().strip() if self.resume_step is not None and file.exists() else None

    def keep_id(self, tracker: str, number: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._id_file(tracker).write_text(number)

    def _id_file(self, tracker: str) -> Path:
        return self.folder / ID_FILE.format(tracker)

    @property
    def tags(self) -> list[str]:
        """Those of the job."""
        return list(self.job.get("job", {}).get("tags", []))

    def options(self) -> dict[str, Scalar]:
        """Of the job, by dotted name; lists are left out."""
        return dict(_scalars(self.job))


def _scalars(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Scalar]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float | str):
            yield prefix + key, value


@dataclass(frozen=True)
class Histogram:
    """Of a tensor's values, in buckets of equal width."""

    minimum: float
    maximum: float
    number: int
    sum: float
    sum_of_squares: float
    limits: Sequence[float]
    """The upper end of each bucket."""
    counts: Sequence[int]


class Tracker(ABC):
    """Made with the run that it opens. `log` gets a logged step's values by their tags. It may raise and block, as it
    works in a thread of its own (metrics/async_tracker.py)."""

    name: ClassVar[str]
    """As people call it."""
    package: ClassVar[str]
    """What it needs to have installed."""
    leaves: ClassVar[tuple[str, ...]] = ()
    """What it puts at the top of the job's folder, beside the id that `keep_id` keeps for its package."""
    of_every_rank: ClassVar[bool] = False
    """Whether metrics.save_for_all_ranks means it too."""

    @abstractmethod
    def __init__(self, run: Run) -> None: ...

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def histograms(self, found: Mapping[str, Histogram], step: int) -> None:  # noqa: B027
        """Those of weights and gradients; a tracker that has none does nothing."""

    def go_back(self, step: int) -> None:  # noqa: B027
        """The run is at the state after `step` again: later steps are logged once more. A tracker that takes what comes
        last, or knows no way back, does nothing."""

    @abstractmethod
    def close(self) -> None: ...

    @classmethod
    def obstacle(cls) -> tuple[str, str] | None:
        """Why it cannot start here, as what is allowed and what to do."""
        if importlib.util.find_spec(cls.package) is None:
            remedy = f"pip install 'torchtitan-toml[{cls.package}]', or leave it out"
            return f"with the {cls.package} package only, which is not installed", remedy
        return None
