"""The job as the rules read it: its records, the faults of its options, and what it finds in files and data."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtitan.config.job import JobConfig
from torchtitan.config.options import Fault, option_at, show
from torchtitan.core.errors import JobError, LimitError
from torchtitan.datasets import open_source
from torchtitan.datasets.sample_packing import samples_in_budget, samples_in_epochs, steps_for
from torchtitan.datasets.token_shards import TokenShards
from torchtitan.datasets.tokenizer import Tokenizer, TokenizerError, build_tokenizer
from torchtitan.job import ResolvedJob
from torchtitan.job.data import JobData
from torchtitan.job.layout import JobLayout
from torchtitan.job.model import JobModel
from torchtitan.job.saving import JobSaving
from torchtitan.job.schedule import JobSchedule
from torchtitan.lr_schedules import LRSchedule, schedule_of
from torchtitan.models.hf.config import find_config, untrained_token_ids
from torchtitan.parallelisms.pipeline.actions import ScheduleTableError, Table, count_stages, load_schedule_csv

Device = str
"""Kind of device, "cpu" or "cuda"."""
Rule = Callable[["Facts"], Iterator[Fault]]


@dataclasses.dataclass(frozen=True)
class Facts:
    """A job and its faults.

    What cannot be computed raises a LimitError where it is read. One rule reports it, the others end there.
    """

    job: ResolvedJob
    said_by: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The file or command line that set an option, by option. For all other options, faults name the job's files."""
    notice: str = ""
    """How the schedule of a trial run was shortened, see loading.py."""

    # The job

    @property
    def config(self) -> JobConfig:
        return self.job.config

    @property
    def layout(self) -> JobLayout:
        return self.job.layout

    @property
    def model(self) -> JobModel:
        return self.job.model

    @property
    def data(self) -> JobData:
        return self.job.data

    @property
    def schedule(self) -> JobSchedule:
        return self.job.schedule

    @property
    def saving(self) -> JobSaving:
        return self.job.saving

    # Faults

    def fault(self, key: str, allowed: str, remedy: str, value: str = "") -> Fault:
        """Return a fault of the option `key`.

        `value`: text to show as the given value; default: the option's value in the job. `key` may index a
        list of tables: "training.sources[0]" or "training.sources[0].weight".
        """
        option_value: Any = self.config
        for name, number in re.findall(r"(\w+)|\[(\d+)\]", key):
            option_value = getattr(option_value, name) if name else option_value[int(number)]
        files = " + ".join(self.config.job.config_file) or "the job"
        return Fault(self.said_by.get(option_at(key), files), key, value or show(option_value), allowed, remedy)

    def refused(self, error: LimitError) -> Fault:
        return self.fault(error.option, error.allowed, error.remedy, error.given)

    def judged(self, check: Callable[..., object], *args: object, **kwargs: object) -> Iterator[Fault]:
        """Yield the fault for the `LimitError` that `check` (core/errors.py or degrees.py) raises, if any."""
        try:
            check(*args, **kwargs)
        except LimitError as error:
            yield self.refused(error)

    # Files and data

    @cached_property
    def schedule_table(self) -> Table | ScheduleTableError | None:
        """The pipeline schedule of the job's CSV file, or its error; None without one."""
        degrees = self.config.parallelism
        if self.layout.pp == 1 or degrees.pipeline_parallel_schedule_csv is None:
            return None
        stage_modules, microbatches = degrees.module_fqns_per_model_part, self.layout.microbatches
        num_stages = None if stage_modules is None else len(stage_modules)
        try:
            return load_schedule_csv(degrees.pipeline_parallel_schedule_csv, self.layout.pp, num_stages, microbatches)
        except ScheduleTableError as error:
            return error

    @property
    def layers_by_stage(self) -> list[int]:
        """The number of layers of each stage of a pipeline. The job must have no faults."""
        table = self.schedule_table
        assert not isinstance(table, ScheduleTableError)
        return self.layout.layers_by_stage(self.model.args.n_layers, None if table is None else count_stages(table))

    @cached_property
    def untrained_tokens(self) -> list[int]:
        """Ids of tokens that have no trained rows in the initial weights yet."""
        options = self.config.checkpoint
        if options.initial_load_path is None:
            return []
        try:
            return untrained_token_ids(find_config(Path(options.initial_load_path)) or {})
        except (OSError, JobError):  # _initial_load in rules/checkpoint.py reports it
            return []

    @cached_property
    def tokenizer(self) -> Tokenizer | OSError | TokenizerError:
        try:
            version, ignored_keys = self.saving.tokenization_version, self.config.model.ignore_config_keys
            return build_tokenizer(self.config.model.tokenizer_path, version=version, ignored_keys=ignored_keys)
        except (OSError, TokenizerError) as error:
            return error

    @cached_property
    def steps(self) -> int | None:
        """Number of optimizer steps; None if it depends on data that are not tokenized yet, or wrong."""
        training = self.config.training
        if training.epochs is None and training.tokens is None:
            return training.steps
        return None if self.last_step_of_data is None else self.job_with_end.schedule.steps

    @property
    def job_with_end(self) -> ResolvedJob:
        """The job with its number of steps set; unchanged if that number is not known."""
        return self.job.ending_at(self.last_step_of_data)

    @cached_property
    def last_step_of_data(self) -> int | None:
        """The last step of training.epochs or training.tokens; None if it is not known, or if neither is set."""
        training = self.config.training
        if self.model.spec.whole_records or (training.epochs is None and training.tokens is None):
            return None  # packing needs the lengths of all records
        try:
            rows = self.layout.rows
            if training.tokens is not None:
                return steps_for(samples_in_budget(training.tokens, training.seq_len), rows)
            sources = [
                open_source(source.dataset, source.dataset_path, self.data.reader(source), slices=source.slice)
                for source in self.data.sources("training").values()
            ]
            if not all(isinstance(source, TokenShards) for source in sources):
                return None
            return steps_for(samples_in_epochs(sources, training.seq_len, training.epochs or 1), rows)
        except (OSError, JobError):  # other rules report it
            return None

    @cached_property
    def learning_rate(self) -> LRSchedule | None:
        """The learning-rate schedule; None if the number of steps is not known. Raises ScheduleError."""
        shape, training = self.job_with_end.config.lr_scheduler, self.config.training
        of_itself = shape.total_steps is not None or (shape.t_max is not None and shape.t_max_unit == "step")
        if isinstance(shape.warmup_steps, str) and (self.steps is None or training.epochs is None):
            return None
        if self.steps is None and not of_itself:
            return None
        steps, start = self.steps or 0, self.job.schedule.start
        if not of_itself and steps <= start:
            return None
        return schedule_of(shape, training, steps, self.config.adapter.relora, start)
