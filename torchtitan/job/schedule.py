"""The steps of a job: their number, the learning rate over them, and what happens between them."""

from dataclasses import dataclass
from functools import cached_property

from torchtitan.checkpoint.base_weights import schedule_start
from torchtitan.config.sections.model import Adapter
from torchtitan.config.sections.run import Checkpoint, Metrics
from torchtitan.config.sections.training import LRScheduler, Training, Validation
from torchtitan.core.cadence import Cadence, cadence_of
from torchtitan.core.errors import check_measured_saves
from torchtitan.lr_schedules import LRSchedule, schedule_of


@dataclass(frozen=True)
class JobSchedule:
    """Steps and cadences of a job with these sections, whose number of steps is known."""

    training: Training
    lr_scheduler: LRScheduler
    adapter: Adapter
    metrics: Metrics
    validation: Validation
    checkpoint: Checkpoint
    folder: str
    """The run's folder."""

    @property
    def steps(self) -> int:
        return self.training.steps

    @cached_property
    def start(self) -> int:
        """The first step of the schedule: not 0 if the run continues the step count of its initial weights."""
        return schedule_start(self.folder, self.checkpoint)

    def learning_rate(self, start: int = 0) -> LRSchedule:
        """Return the learning-rate schedule that begins at step `start` of the run. Raises ScheduleError."""
        return schedule_of(self.lr_scheduler, self.training, self.steps, self.adapter.relora, start)

    @property
    def cadence(self) -> Cadence:
        """The intervals in steps. LimitError if best_metric is set and a save has no validation."""
        intervals = cadence_of(self, self.steps)
        if self.checkpoint.best_metric is not None:
            check_measured_saves(intervals.save, intervals.validate)
        return intervals
