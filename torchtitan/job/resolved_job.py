"""The resolved job: what its options are, on how many ranks, on which kind of device, and all that follows from these.

Facts are properties of five records. Each is derived where it is first read, from the sections of the job that the
record holds: a rule that reads one fact does not depend on the options behind another one. What cannot be computed
raises a JobError where it is read.
"""

import dataclasses
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtitan.config.changes import kept_job
from torchtitan.config.job import JobConfig, as_dict
from torchtitan.config.sections.model import Parallelism
from torchtitan.core.cadence import with_end
from torchtitan.core.errors import JobError
from torchtitan.datasets.tokenizer import Tokenizer, build_tokenizer
from torchtitan.datasets.tokenizer.chat_templates import resolve_template
from torchtitan.job.data import JobData
from torchtitan.job.layout import JobLayout
from torchtitan.job.model import JobModel
from torchtitan.job.saving import JobSaving
from torchtitan.job.schedule import JobSchedule


@dataclasses.dataclass(frozen=True, eq=False)
class ResolvedJob:
    """A job on `world_size` ranks, each with a device of this type ("cpu" or "cuda").

    Equal if options, ranks and device are. A pickle leaves out what has been derived.
    """

    config: JobConfig
    world_size: int = 1
    device_type: str = "cpu"

    # Records

    @cached_property
    def layout(self) -> JobLayout:
        job = self.config
        return JobLayout(job.parallelism, job.training, job.validation, job.task, job.compile, self.world_size)

    @cached_property
    def model(self) -> JobModel:
        job = self.config
        return JobModel(job.model, job.task, job.training, job.adapter, job.checkpoint.initial_load_path)

    @cached_property
    def data(self) -> JobData:
        job, folder = self.config, Path(self.config.job.dump_folder)
        return JobData(job.data, job.training, job.validation, self.model, self.layout, self.device_type, folder)

    @cached_property
    def schedule(self) -> JobSchedule:
        job, folder = self.config, self.config.job.dump_folder
        return JobSchedule(
            job.training, job.lr_scheduler, job.adapter, job.metrics, job.validation, job.checkpoint, folder
        )

    @cached_property
    def saving(self) -> JobSaving:
        job = self.config
        return JobSaving(job.job, job.checkpoint, job.adapter, job.training, job.data)

    # Facts of several records

    @property
    def tokenizer_kwargs(self) -> dict[str, Any]:
        """The arguments of build_tokenizer after the path."""
        return {
            "chat_template": self.config.data.chat_template,
            "version": self.saving.tokenization_version,
            "ignored_keys": self.config.model.ignore_config_keys,
        }

    def tokenizer(self) -> Tokenizer:
        return build_tokenizer(self.config.model.tokenizer_path, **self.tokenizer_kwargs)

    def stored_part(self) -> dict[str, Any]:
        """Return the part of the job that a checkpoint stores and a resume compares."""
        return kept_job(self.portable().config, dataclasses.asdict(self.model.args), self.layout.samples)

    # Related jobs

    def with_options(self, changes: Mapping[str, Any]) -> "ResolvedJob":
        """Return the job with other values of some options, as in {"training.seq_len": 512}."""
        return self._with(**_changed_sections(self.config, changes))

    def on_ranks(self, world_size: int, device_type: str | None = None) -> "ResolvedJob":
        """Return the job on this number of ranks, each with a device of this type (default: unchanged)."""
        return self._sharing_sizes(ResolvedJob(self.config, world_size, device_type or self.device_type))

    def _with(self, **sections: Any) -> "ResolvedJob":
        config = dataclasses.replace(self.config, **sections)
        return self._sharing_sizes(dataclasses.replace(self, config=config))

    def _sharing_sizes(self, job: "ResolvedJob") -> "ResolvedJob":
        """Return `job` with the sizes of this one, if both have the same section [model]: they take long to check."""
        if "model" in self.__dict__ and job.config.model is self.config.model:
            job.model.share_sizes(self.model)
        return job

    def ending_at(self, last_step_of_data: int | None) -> "ResolvedJob":
        """Return the job with its final number of steps, see `with_end`."""
        return dataclasses.replace(self, config=with_end(self.config, last_step_of_data))

    def portable(self) -> "ResolvedJob":
        """Return the job as saved with a run: absolute paths, its template's text, the rules of its tokenization."""
        paths = {name: getattr(self.config.model, name) for name in ("tokenizer_path", "hf_folder")}
        changes: dict[str, Any] = {
            f"model.{name}": str(Path(path).resolve()) for name, path in paths.items() if path and Path(path).exists()
        }
        template = self.config.data.chat_template
        changes["data.chat_template"] = template and resolve_template(template)
        changes["data.tokenization_version"] = self.saving.tokenization_version
        return self.with_options(changes)

    def with_lasting_options(self) -> "ResolvedJob":
        """Return the job with adapter.save and training.frozen_dtype set, which a resumed run keeps."""
        saving = self.saving
        return self.with_options({"adapter.save": saving.adapter_save, "training.frozen_dtype": saving.frozen_dtype})

    def without_noise(self) -> "ResolvedJob":
        return self.with_options({"training.neftune_alpha": 0})

    def reference(self) -> "ResolvedJob":
        """Return the job of the reference model of preference pairs: no adapter and no noise."""
        return self.without_noise()._with(adapter=type(self.config.adapter)())

    def restarted(self) -> "ResolvedJob":
        """Return the job for a restart after a crash, which resumes its newest checkpoint.

        The first start has already applied load_step and exclude_from_loading.
        """
        return self.with_options({"checkpoint.load_step": -1, "checkpoint.exclude_from_loading": []})

    def on_one_rank(self) -> "ResolvedJob":
        """Return the job without parallelism and gradient accumulation, for commands that inspect its data or model."""
        job = self.with_options({"training.global_batch_size": -1})._with(parallelism=Parallelism())
        return job.on_ranks(1)

    # Identity

    def _key(self) -> tuple[str, int, str]:
        return json.dumps(as_dict(self.config), sort_keys=True), self.world_size, self.device_type

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ResolvedJob) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def _changed_sections(options: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a dataclass that changes of dotted options concern, with the new values. JobError for an
    unknown option.
    """
    option_names = {field.name for field in dataclasses.fields(options)}
    if unknown := [name for name in changes if name.partition(".")[0] not in option_names]:
        raise JobError(f"no option {unknown[0]}; allowed: {', '.join(sorted(option_names))}")
    nested: dict[str, dict[str, Any]] = {}
    values: dict[str, Any] = {}
    for name, value in changes.items():
        first, _, option = name.partition(".")
        if option:
            nested.setdefault(first, {})[option] = value
        else:
            values[first] = value
    for first, parts in nested.items():
        section = getattr(options, first)
        values[first] = dataclasses.replace(section, **_changed_sections(section, parts))
    return values
