"""The model of a job: its sizes, its task, and the types of its numbers."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.config.options import show
from torchtitan.config.sections.field_types import Precision
from torchtitan.config.sections.model import Adapter, Model
from torchtitan.config.sections.training import Task, Training
from torchtitan.core.errors import JobError, LimitError
from torchtitan.datasets.record_format import LabelledFields
from torchtitan.job.overrides import checked_sizes
from torchtitan.losses.tasks import TaskSpec, task_of
from torchtitan.models import CONFIG_CONVERTERS, FROM_HF, SIZES, converter_of, family_for_model_type, resolve_sizes
from torchtitan.models.family import ConfigConverter
from torchtitan.models.hf.config import CONFIG, end_token_ids, read_json
from torchtitan.models.hf.wrappers import text_part

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
    def sizes(self) -> Any:
        """The flavor's sizes, before overrides. KeyError if it is unknown, LimitError if its folder has no sizes."""
        model, key = self.model, "model.hf_folder"
        if model.flavor == FROM_HF and model.hf_folder is None:
            raise LimitError(key, show(None), f'a folder with config.json, with flavor "{FROM_HF}"', "set it")
        try:
            return resolve_sizes(model.name, model.flavor, model.hf_folder, {}, model.ignore_config_keys)
        except JobError as error:
            allowed = f"a folder with the config.json of a {model.name} model"
            raise LimitError(key, show(model.hf_folder), allowed, f"{error}{self._other_family()}") from None

    def _other_family(self) -> str:
        """Return a remedy if the folder holds a model of another family, else ""."""
        try:
            model_type = text_part(read_json(Path(str(self.model.hf_folder), CONFIG))).get("model_type")
        except JobError:
            return ""
        if model_type in CONFIG_CONVERTERS[self.model.name].model_types:
            return ""
        family = family_for_model_type(model_type)
        return f'; set model.name = "{family}"' if family else f"; families are {', '.join(SIZES)}"

    @cached_property
    def args(self) -> Any:
        """The model's sizes with the job's overrides. Raises LimitError for a wrong one, and as `sizes` does."""
        return checked_sizes(self.model.name, self.sizes, self.model.overrides)

    def share_sizes(self, other: "JobModel") -> None:
        """Take over what has been derived from the section `model`, which both have."""
        self.__dict__.update({name: other.__dict__[name] for name in ("sizes", "args") if name in other.__dict__})

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
    def experts(self) -> int:
        """Experts in a layer; 0 if no layer has any."""
        return self.args.n_experts if self.has_experts else 0

    @property
    def source_folder(self) -> str | None:
        """The Hugging Face folder that the model came from, if it has a config.json."""
        sources = (self.model.hf_folder, self.initial_load_path)
        return next((path for path in sources if path and Path(path, CONFIG).is_file()), None)

    def end_ids(self, weights: Path | None = None) -> frozenset[int]:
        """Return the tokens that end a text by the folder of the weights, or by the one that the model came from.

        An export of the run lists the same (`hf_extra_files` in assembly/parts.py).
        """
        source = self.generation_folder(weights)
        return frozenset() if source is None else end_token_ids(source, self.model.ignore_config_keys)

    def generation_folder(self, weights: Path | None = None) -> Path | None:
        """Return the folder whose files say how to generate: that of the weights, or where the model came from."""
        folder = None if weights is None else weights.parent if weights.is_file() else weights
        source = folder if folder is not None and (folder / CONFIG).is_file() else self.source_folder
        return None if source is None else Path(source)

    # Task

    @property
    def spec(self) -> TaskSpec:
        """The task. KeyError if task.kind is unknown."""
        return task_of(self.task.kind)

    @property
    def learns_classes(self) -> bool:
        return self.spec.labels == "classes"

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
        classes = getattr(self.args, "n_classes", 0) if self.learns_classes else 0
        if classes < 2:
            return None
        return LabelledFields.from_task(self.task, classes, end_tokens=not self.args.causal)

    # Types

    @property
    def compute_dtype(self) -> Precision:
        """The type of computed values: weights in bfloat16 are always computed with in bfloat16."""
        return "bfloat16" if self.training.dtype == "bfloat16" else self.training.mixed_precision_param
