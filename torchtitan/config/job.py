"""The job: its sections, one dataclass per table of the TOML file (`sections/`, by subject).

Pure data, so nothing here imports torch or the rest of the project. The text under a field is its help (`torchtitan
check --help-config` prints it). Types and ranges that one field can check by itself are checked there; what takes
several fields, files or the model's sizes is checked in `rules/`.

The JSON schema of a job, with which an editor completes and checks TOML (`torchtitan check --schema`).
"""

import json
from dataclasses import field, fields, is_dataclass
from typing import Any

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from torchtitan.config.sections.field_types import STRICT
from torchtitan.config.sections.model import ActivationCheckpoint, Adapter, Compile, Model, Parallelism, Qat
from torchtitan.config.sections.run import (
    Callbacks,
    Checkpoint,
    Comm,
    Debug,
    EarlyStop,
    Guard,
    Job,
    Memory,
    Metrics,
    Profiling,
)
from torchtitan.config.sections.training import (
    Data,
    Dpo,
    LRScheduler,
    Optimizer,
    Task,
    Training,
    Validation,
)
from torchtitan.core.hub import as_source


@dataclass(config=STRICT, kw_only=True)
class JobConfig:
    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    task: Task = field(default_factory=Task)
    adapter: Adapter = field(default_factory=Adapter)
    qat: Qat = field(default_factory=Qat)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    data: Data = field(default_factory=Data)
    dpo: Dpo = field(default_factory=Dpo)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    comm: Comm = field(default_factory=Comm)
    memory: Memory = field(default_factory=Memory)
    guard: Guard = field(default_factory=Guard)
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    callbacks: Callbacks = field(default_factory=Callbacks)
    validation: Validation = field(default_factory=Validation)
    debug: Debug = field(default_factory=Debug)


def trackers_of(options: Metrics) -> dict[str, str]:
    """Return the names of a job's trackers, by the option that sets them."""
    flags = {"metrics.enable_tensorboard": "tensorboard"} if options.enable_tensorboard else {}
    flags |= {"metrics.enable_wandb": "wandb"} if options.enable_wandb else {}
    trackers_by_option = {f"metrics.trackers[{number}]": name for number, name in enumerate(options.trackers)}
    return {place: name for place, name in trackers_by_option.items() if name not in flags.values()} | flags


def as_dict(config: Any) -> dict[str, Any]:
    """Convert to nested dictionaries, in the order of the fields, without unset (None) fields, as TOML has no null.

    A folder of the hub's cache is written as the source that it came from, which is the same on every machine.
    """
    return {f.name: _plain(value) for f in fields(config) if (value := getattr(config, f.name)) is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return as_dict(value) if is_dataclass(value) else as_source(value) if isinstance(value, str) else value


def job_schema() -> str:
    schema = TypeAdapter(JobConfig).json_schema()
    schema |= {"$schema": "http://json-schema.org/draft-07/schema#", "title": "torchtitan job"}
    names = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    help = "Jobs that this one builds on: a file name or a list of them, relative to this file."
    schema["properties"] = {"extends": names | {"description": help}} | schema["properties"]
    schema["$defs"]["Job"]["properties"].pop("config_file")  # of the command line only
    return json.dumps(schema, indent=1).replace("#/$defs/", "#/definitions/").replace('"$defs"', '"definitions"')
