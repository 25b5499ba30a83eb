"""The checkpoints of a job, and what a resumed run keeps from the run that began."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from torchtitan.checkpoint import base_weights
from torchtitan.checkpoint.base_weights import tokenization_version
from torchtitan.checkpoint.folders import Metric
from torchtitan.config.sections.field_types import Precision
from torchtitan.config.sections.model import Adapter
from torchtitan.config.sections.run import Checkpoint
from torchtitan.config.sections.run import Job as Run
from torchtitan.config.sections.training import Data, Training


@dataclass(frozen=True)
class JobSaving:
    """The checkpoints of a job with these sections."""

    run: Run
    checkpoint: Checkpoint
    adapter: Adapter
    training: Training
    data: Data

    @property
    def folder(self) -> Path:
        """The folder of the checkpoints."""
        return Path(self.run.dump_folder, self.checkpoint.folder)

    @property
    def begins_anew(self) -> bool:
        """True if the run folder is emptied before the run."""
        return self.run.clean_start == "always"

    @cached_property
    def adapter_save(self) -> Literal["whole", "alone"]:
        """The contents of checkpoints, see `base_weights.adapter_save`."""
        return base_weights.adapter_save(self.adapter, self.checkpoint, self.run.dump_folder)

    @property
    def saves_adapter_alone(self) -> bool:
        return self.adapter.kind != "none" and self.adapter_save == "alone"

    @cached_property
    def frozen_dtype(self) -> Precision | None:
        """The type that frozen weights are stored in, see `base_weights.frozen_dtype`."""
        return base_weights.frozen_dtype(self.training, self.adapter, self.checkpoint, self.run.dump_folder)

    @cached_property
    def tokenization_version(self) -> int:
        """The version of the rules of tokenization, see checkpoint/base_weights.py."""
        return tokenization_version(self.data, self.checkpoint, self.run)

    @property
    def best_metric(self) -> Metric | None:
        """The metric that selects the best checkpoint; None without one."""
        name = self.checkpoint.best_metric
        return None if name is None else Metric.of(name, self.checkpoint.best_mode)
