"""The job, its environment and the values derived from both, which the rules read. Each value is computed once."""

import dataclasses
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torchtitan.checkpoint.base_weights import adapter_save, frozen_dtype, schedule_start
from torchtitan.checkpoint.tokenization import tokenization_version
from torchtitan.config.batch_shape import padding_multiple, rows_per_sample, sequence_needs, split_by_tensor_parallel
from torchtitan.config.job import JobConfig, sources_of
from torchtitan.config.options import Fault, describe, fits, hint, option_at, show
from torchtitan.config.sections.field_types import Precision
from torchtitan.config.sections.training import DataSource
from torchtitan.core.cadence import with_end
from torchtitan.core.constraints import LimitError
from torchtitan.core.errors import JobError
from torchtitan.datasets import open_source
from torchtitan.datasets.record_format import LabelledFields, RecordReader, record_reader
from torchtitan.datasets.sample_packing import samples_in_budget, samples_in_epochs, steps_for
from torchtitan.datasets.token_shards import TokenShards
from torchtitan.datasets.tokenizer import Tokenizer, TokenizerError, build_tokenizer
from torchtitan.losses.tasks import TASKS, TaskSpec
from torchtitan.lr_schedules import LRSchedule, schedule_of
from torchtitan.models import apply_overrides, resolve_sizes, table_type
from torchtitan.models.hf.config import find_config, untrained_token_ids
from torchtitan.parallelisms.degrees import expert_pool_size, resolve_shard_degree
from torchtitan.parallelisms.pipeline.actions import ScheduleTableError, Table, load_schedule_csv

Device = Literal["cpu", "cuda"]
Rule = Callable[["Facts"], Iterator[Fault]]


@dataclasses.dataclass(frozen=True)
class Facts:
    """The job, its ranks and device, and the values derived from them."""

    config: JobConfig
    world_size: int
    device: Device
    said_by: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The file or command line that set an option, by option. For all other options, faults name the job's files."""
    notice: str = ""
    """How the schedule of a trial run was shortened, see loading.py."""

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
        """Yield the fault for the `LimitError` that `check` (core/constraints.py or degrees.py) raises, if any."""
        try:
            check(*args, **kwargs)
        except LimitError as error:
            yield self.refused(error)

    @cached_property
    def shard_or_error(self) -> int | LimitError:
        """Data-parallel shards, with -1 resolved, or the error if the degrees do not fit the ranks."""
        degree = self.config.parallelism.data_parallel_shard_degree
        try:
            return resolve_shard_degree(
                self.world_size, degree, dp_replicate=self.replicas, cp=self.cp, tp=self.tp, pp=self.pp
            )
        except LimitError as error:
            return error

    @property
    def shard(self) -> int | None:
        """Data-parallel shards; None where the degrees do not fit the ranks."""
        return None if isinstance(self.shard_or_error, LimitError) else self.shard_or_error

    @property
    def replicas(self) -> int:
        return self.config.parallelism.data_parallel_replicate_degree

    @property
    def tp(self) -> int:
        return self.config.parallelism.tensor_parallel_degree

    @property
    def cp(self) -> int:
        return self.config.parallelism.context_parallel_degree

    @property
    def pp(self) -> int:
        return self.config.parallelism.pipeline_parallel_degree

    @property
    def ep(self) -> int:
        return self.config.parallelism.expert_parallel_degree

    @cached_property
    def lenders(self) -> int | None:
        """Ranks with different tokens in a replica and stage, from which expert parallel borrows."""
        return self.shard and expert_pool_size(self.shard, self.cp, self.tp)

    @cached_property
    def fsdp_shards(self) -> int | None:
        """Ranks over which fully_shard spreads parameters; the ranks of a sequence are among them."""
        return self.shard and self.shard * self.cp

    @property
    def lengths(self) -> dict[str, int]:
        """Sample lengths in tokens, by the option that sets them."""
        training, validation = self.config.training.seq_len, self.config.validation
        validation_length = (
            {"validation.seq_len": validation.seq_len} if validation.enable and validation.seq_len else {}
        )
        return {"training.seq_len": training} | validation_length

    def needs_of_a_sequence(self, split: bool) -> dict[str, int]:
        """Return the divisors of a sequence length by reason. `split`: sequence parallel also splits it."""
        return sequence_needs(self.config, split)

    @cached_property
    def microbatches(self) -> int | None:
        """Pipeline microbatches in a local batch; None if it does not divide."""
        local, size = self.config.training.local_batch_size, self.config.parallelism.pipeline_parallel_microbatch_size
        return local // size if local % size == 0 else None

    @cached_property
    def schedule_table(self) -> Table | ScheduleTableError | None:
        """The schedule of the job's CSV file, or its error; None without one, or without a number of microbatches."""
        degrees = self.config.parallelism
        if self.pp == 1 or degrees.pipeline_parallel_schedule_csv is None or self.microbatches is None:
            return None
        stage_modules = degrees.module_fqns_per_model_part
        num_stages = None if stage_modules is None else len(stage_modules)
        try:
            return load_schedule_csv(degrees.pipeline_parallel_schedule_csv, self.pp, num_stages, self.microbatches)
        except ScheduleTableError as error:
            return error

    @property
    def sequence_parallel(self) -> bool:
        return split_by_tensor_parallel(self.config)

    @property
    def compiles_model(self) -> bool:
        return self.config.compile.enable and "model" in self.config.compile.components

    @cached_property
    def samples(self) -> int | None:
        """Samples (or pairs) of a forward pass over all data-parallel ranks."""
        dp = self.shard and self.shard * self.replicas
        return dp and dp * self.config.training.local_batch_size

    @property
    def step_samples(self) -> int | None:
        """Samples (or pairs) of an optimizer step over all ranks."""
        batch_size = self.config.training.global_batch_size
        return batch_size if batch_size > 0 else self.samples

    @cached_property
    def sizes_or_error(self) -> Any | JobError | None:
        """The flavor's sizes before overrides, or the error of its folder; None if the family or flavor is unknown."""
        model = self.config.model
        try:
            return resolve_sizes(model.name, model.flavor, model.hf_folder, {}, model.ignore_config_keys)
        except KeyError:
            return None
        except JobError as error:
            return error

    @property
    def sizes(self) -> Any | None:
        """The flavor's sizes, before overrides; None where name, flavor or folder are wrong."""
        return None if isinstance(self.sizes_or_error, JobError) else self.sizes_or_error

    @cached_property
    def wrong_overrides(self) -> list[tuple[str, str, str]]:
        """(allowed, remedy, given) of each override that is wrong by itself."""
        model = self.config.model
        return list(wrong_overrides(model.name, self.sizes, model.overrides)) if self.sizes else []

    @cached_property
    def args_or_error(self) -> Any | JobError | None:
        """The model's sizes, or the error if they do not fit together; None if their source or an override is wrong."""
        if self.sizes is None or self.wrong_overrides:
            return None
        try:
            args = apply_overrides(self.sizes, self.config.model.overrides)
            return args if args.num_parameters else None
        except JobError as error:
            return error
        except OverflowError:  # an infinite width
            return None

    @property
    def args(self) -> Any | None:
        """The model's sizes; None where name, flavor, folder or overrides are wrong."""
        return None if isinstance(self.args_or_error, JobError) else self.args_or_error

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

    @property
    def expert_layers(self) -> int:
        """Layers with experts; 0 where the model's sizes are wrong."""
        return getattr(self.args, "expert_layers", 0)

    @property
    def padding_multiple(self) -> int:
        """Multiple that batch lengths are rounded up to; 0 if all are training.seq_len."""
        return padding_multiple(self.config, self.device, self.expert_layers > 0)

    @property
    def experts(self) -> int:
        """Experts in a layer; 0 if no layer has any."""
        return self.args.n_experts if self.expert_layers else 0

    @property
    def task(self) -> TaskSpec | None:
        """The task of the job; None if task.kind is unknown."""
        return TASKS.get(self.config.task.kind)

    @property
    def packs(self) -> bool:
        """True if samples are packed from whole records."""
        return self.task is not None and self.task.whole_records

    @property
    def tells_classes(self) -> bool:
        """True if the task learns the classes of records."""
        return self.task is not None and self.task.labels == "classes"

    @property
    def fields(self) -> LabelledFields | None:
        """The fields that hold a record's class; None if the task learns no classes, or the model is wrong."""
        classes = getattr(self.args, "n_classes", 0)
        if not self.tells_classes or classes < 2:
            return None
        return LabelledFields.from_task(self.config.task, classes, end_tokens=not self.args.causal)

    @cached_property
    def sources(self) -> dict[str, DataSource]:
        """All data sources that the job reads, by their place in the config."""
        validation_has_sources = self.config.validation.enable and self.config.validation.split is None
        return sources_of(self.config, "training") | (
            sources_of(self.config, "validation") if validation_has_sources else {}
        )

    def reading(self, source: DataSource) -> RecordReader:
        """Return the reader of a source's records. LimitError for a wrong format, field or template."""
        pairs = self.task is not None and self.task.rows_per_sample > 1
        return record_reader(source, self.config.data.default_system, self.packs, pairs)

    @cached_property
    def tokenizer(self) -> Tokenizer | OSError | TokenizerError:
        try:
            version = tokenization_version(self.config.data, self.config.checkpoint, self.config.job)
            ignored_keys = self.config.model.ignore_config_keys
            return build_tokenizer(self.config.model.tokenizer_path, version=version, ignored_keys=ignored_keys)
        except (OSError, TokenizerError) as error:
            return error

    @cached_property
    def steps(self) -> int | None:
        """Number of optimizer steps; None if it depends on data that are not tokenized yet, or wrong."""
        training = self.config.training
        if training.epochs is None and training.tokens is None:
            return training.steps
        return None if self.last_step_of_data is None else self.config_with_end.training.steps

    @property
    def config_with_end(self) -> JobConfig:
        """The job with its number of steps set (see `with_end`); unchanged if that number is not known."""
        return with_end(self.config, self.last_step_of_data)

    @cached_property
    def last_step_of_data(self) -> int | None:
        """The last step of training.epochs or training.tokens; None if it is not known, or if neither is set."""
        training, batch = self.config.training, self.step_samples
        batch = batch and batch * rows_per_sample(self.config)
        if self.packs or (training.epochs is None and training.tokens is None):
            return None  # packing needs the lengths of all records
        if training.tokens is not None:
            return batch and steps_for(samples_in_budget(training.tokens, training.seq_len), batch)
        source_configs = sources_of(self.config, "training").values()
        try:
            sources = [
                open_source(source.dataset, source.dataset_path, self.reading(source)) for source in source_configs
            ]
            if batch is None or not all(isinstance(source, TokenShards) for source in sources):
                return None
            return steps_for(samples_in_epochs(sources, training.seq_len, training.epochs or 1), batch)
        except (OSError, JobError):
            return None

    @cached_property
    def adapter_save(self) -> Literal["whole", "alone"]:
        """The contents of checkpoints, see `base_weights.adapter_save`."""
        return adapter_save(self.config.adapter, self.config.checkpoint, self.config.job.dump_folder)

    @cached_property
    def frozen_dtype(self) -> Precision | None:
        """The type that frozen weights are stored in, see `base_weights.frozen_dtype`."""
        config = self.config
        return frozen_dtype(config.training, config.adapter, config.checkpoint, config.job.dump_folder)

    @property
    def begins_anew(self) -> bool:
        """True if the run folder is emptied before the run."""
        return self.config.job.clean_start == "always"

    @cached_property
    def schedule_start(self) -> int:
        """The first step of the schedule: not 0 if the run continues the step count of its initial weights."""
        return schedule_start(self.config.job.dump_folder, self.config.checkpoint)

    @cached_property
    def schedule(self) -> LRSchedule | None:
        """The learning-rate schedule; None if the number of steps is not known. Raises ScheduleError."""
        shape, training = self.config_with_end.lr_scheduler, self.config.training
        of_itself = shape.total_steps is not None or (shape.t_max is not None and shape.t_max_unit == "step")
        if isinstance(shape.warmup_steps, str) and (self.steps is None or training.epochs is None):
            return None
        if self.steps is None and not of_itself:
            return None
        steps, start = self.steps or 0, self.schedule_start
        if not of_itself and steps <= start:
            return None
        return schedule_of(shape, training, steps, self.config.adapter.relora, start)


def wrong_overrides(name: str, sizes: Any, overrides: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (allowed, remedy, given) for each override that is unknown to family `name` or of a wrong type or range."""
    hints, zero = typing.get_type_hints(type(sizes)), getattr(sizes, "may_be_zero", ())
    types = {field.name: hints[field.name] for field in dataclasses.fields(sizes)}
    for field, value in overrides.items():
        setting = f"{field} = {show(value)}"
        if field not in types:
            yield f"sizes of {name}: {', '.join(types)}", hint(field, types), field
        elif table := table_type(type(sizes), field):
            yield from _wrong_parts(field, table, value)
        elif not fits(types[field], value):
            yield f"{field} = {describe(types[field])}", "", setting
        elif isinstance(value, str):
            continue
        elif value < 0 or value == 0 and value is not False and field not in zero:
            yield (f"{field} >= 0" if field in zero else f"{field} > 0"), "", setting


def _wrong_parts(name: str, table: type, value: Any) -> Iterator[tuple[str, str, str]]:
    """Yield the errors of an override that must be a table of positive numbers, or false."""
    hints = typing.get_type_hints(table)
    part_names = [field.name for field in dataclasses.fields(table)]
    parts = value if isinstance(value, dict) else {}
    if value is not False and not isinstance(value, dict):
        yield f"{name} = false, or a table of {', '.join(part_names)}", "", f"{name} = {show(value)}"
    for part, number in parts.items():
        if part not in part_names:
            yield f"parts of {name}: {', '.join(part_names)}", hint(part, part_names), f"{name} = {{{part}}}"
        elif not fits(hints[part], number):
            allowed = f"{name} = {{{part} = {describe(hints[part])}}}"
            yield allowed, "", f"{name} = {{{part} = {show(number)}}}"
        elif not isinstance(number, str) and number <= 0:
            yield f"{name} = {{{part} > 0}}", "", f"{name} = {{{part} = {show(number)}}}"
