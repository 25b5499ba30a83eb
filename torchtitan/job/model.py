"""The model of a job: its sizes, its task, and the types of its numbers."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.config.sections.adapter import Adapter
from torchtitan.config.sections.field_types import Precision
from torchtitan.config.sections.model import Model
from torchtitan.config.sections.training import Task, Training
from torchtitan.datasets.record_format import LabelledFields
from torchtitan.losses.tasks import TaskSpec, task_of
from torchtitan.models import converter_of, sizes_of
from torchtitan.models.family import ConfigConverter
from torchtitan.models.hf.config import CONFIG

if TYPE_CHECKING:
    from torchtitan.datasets.samples import Labels


@dataclass(frozen=True)
class JobModel:
    """Sizes, task and types of a job with these sections."""

    model: Model
    task: Task
    training: Training
    adapter: Adapter
    initial_load_path: str | None

    @cached_property
    def args(self) -> Any:
        """The model's sizes with the job's overrides. Raises JobError or KeyError, see `resolve_sizes`."""
        return sizes_of(self.model)

    def args_for_weights(self, weights: str | Path) -> Any:
        """Return the sizes to read foreign weights with."""
        return self.converter.args_for_weights(weights, self.args, self.model.overrides)

    @property
    def converter(self) -> ConfigConverter:
        return converter_of(self.model)

    @property
    def has_experts(self) -> bool:
        """True if at least one layer is a mixture of experts."""
        return getattr(self.args, "expert_layers", 0) > 0

    @property
    def source_folder(self) -> str | None:
        """The Hugging Face folder that the model came from, if it has a config.json."""
        sources = (self.model.hf_folder, self.initial_load_path)
        return next((path for path in sources if path and Path(path, CONFIG).is_file()), None)

    # Task

    @property
    def spec(self) -> TaskSpec:
        """The task. KeyError if task.kind is unknown."""
        return task_of(self.task.kind)

    @property
    def label_kind(self) -> "Labels":
        """The kind of labels. A bidirectional model classifies by its first token, a causal one by its last."""
        kind = self.spec.labels
        if kind != "classes":
            return kind
        return "last" if self.args.causal else "first"

    @property
    def labelled_fields(self) -> LabelledFields | None:
        """The fields that hold a record's class; None if the task learns no classes, or the model has none."""
        classes = getattr(self.args, "n_classes", 0)
        if self.spec.labels != "classes" or classes < 2:
            return None
        return LabelledFields.from_task(self.task, classes, end_tokens=not self.args.causal)

    # Types

    @property
    def compute_dtype(self) -> Precision:
        """The type of computed values: weights in bfloat16 are always computed with in bfloat16."""
        return "bfloat16" if self.training.dtype == "bfloat16" else self.training.mixed_precision_param

    @property
    def trains_all(self) -> bool:
        """True if no weights are frozen."""
        return self.adapter.kind == "none" and not self.training.unfrozen
