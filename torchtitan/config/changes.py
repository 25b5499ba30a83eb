"""Compare the job of a checkpoint with the job that resumes it. Imports no torch.

Each option has a class. "refused": a change alters the loss curve, so it must be allowed in
checkpoint.allow_config_change or undone. "told": a change is logged; it affects how the run is computed or how long it
is, or the position in the data checks it. "quiet": a change affects only how the run is logged and saved.

Options of other dialects of a job, which plugins and installed packages know, are needed in every parse: a name that
is no option of today may be one that has moved, and a flag by its older name takes no value on the command line.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torchtitan.config.job import JobConfig, as_dict
from torchtitan.config.options import options, show
from torchtitan.core.plugins import DIALECTS, SECTIONS, missing_plugin, plugin_entries
from torchtitan.core.registry import Registry
from torchtitan.losses.tasks import rows_per_sample

T = TypeVar("T")
Kind = Literal["refused", "told", "quiet"]

KINDS: dict[str, Kind] = {
    "job": "quiet",
    "profiling": "quiet",
    "metrics": "quiet",
    "checkpoint": "quiet",
    "comm": "quiet",
    "memory": "quiet",
    "guard": "told",
    "early_stop": "told",
    "callbacks": "told",
    "model": "refused",
    "model.flavor": "told",  # its sizes are compared one by one
    "model.hf_folder": "told",  # its sizes are compared too
    "model.ignore_config_keys": "told",  # as above
    "model.tokenizer_path": "told",  # its content is checked with the position in the data
    "model.attention_backend": "told",
    "task": "refused",
    "adapter": "refused",
    "qat": "refused",
    "optimizer": "refused",
    "optimizer.implementation": "told",
    "lr_scheduler": "refused",
    "lr_scheduler.total_steps": "told",
    "lr_scheduler.t_max": "told",
    "lr_scheduler.t_max_unit": "told",
    "data": "told",  # options that decide the samples are checked with the position in the data
    "data.cache_dir": "quiet",
    "data.num_proc": "quiet",
    "data.tokenization_version": "quiet",  # a run goes on with the one that it began with
    "dpo": "refused",
    "dpo.reference": "told",  # the run stores its log-probabilities, and the model that they come from
    "training": "refused",
    "training.dataset": "told",
    "training.dataset_path": "told",
    "training.text_field": "told",
    "training.format": "told",
    "training.fields": "told",
    "training.template": "told",
    "training.sources": "told",
    "training.mixing": "told",
    "training.shuffle": "told",
    "training.seq_len": "told",
    "training.on_bad_data": "told",
    "training.local_batch_size": "told",  # the samples of a step are compared instead
    "training.steps": "told",
    "training.epochs": "told",
    "training.tokens": "told",
    "training.loss_chunks": "told",
    "training.enable_cpu_offload": "told",
    "training.gc_freq": "quiet",
    "training.gc_debug": "quiet",
    "training.dataloader": "quiet",
    "parallelism": "told",
    "activation_checkpoint": "told",
    "compile": "told",
    "validation": "told",
    "debug": "told",
}
"""Of sections, and of the options in them that are of another class."""
for _place, _entry in plugin_entries(SECTIONS).items():
    KINDS |= {f"{_place}.{_name}": "told" for _name in _entry.load().TOLD}
PLAN = {
    "parallelism": True,
    "parallelism.fsdp_quantized_gather": False,
    "parallelism.fsdp_quantized_reduce": False,
    "activation_checkpoint": True,
    "activation_checkpoint.preserve_rng_state": False,
    "compile": True,
    "model.attention_backend": True,
    "optimizer.implementation": True,
    "training.local_batch_size": True,
    "training.loss_chunks": True,
    "training.enable_cpu_offload": True,
    "validation.local_batch_size": True,
}
"""True for sections and options of the plan: a run with other values has the same results, up to rounding."""

TRAINED = ("training.unfrozen", "adapter.train_fully", "adapter.train_dense_rest")
"""Which parameters an optimizer has a state of: a checkpoint has none for what was frozen in its run."""
CASTING = frozenset((*TRAINED, "training.frozen_dtype"))
"""Options that decide the types of weights: where their change is allowed, a resume casts saved weights."""
DEFAULTS = {"adapter.save": "whole", "training.frozen_dtype": "float32"}
"""Values of options in jobs from before they had them, where that is not today's default."""
CLASSES = "model.overrides.n_classes"
"""Key of a change from words to classes or back: loading weights alone, the head starts from its initial values."""
SIZES, SAMPLES = "model.overrides", "training.global_batch_size"
ROWS_PER_SAMPLE = "rows_per_sample"
"""A key of `kept_job`; checkpoints without it have batch sizes that counted each answer of a pair."""
BATCH_SIZES = (
    *("training.local_batch_size", SAMPLES, "validation.local_batch_size", "validation.samples"),
    "parallelism.pipeline_parallel_microbatch_size",
)


@dataclass(frozen=True)
class Change:
    """One difference between a checkpoint's job and the current one, with both values as text."""

    key: str
    before: str
    now: str
    note: str = ""
    """Further advice for whoever has to bring the option back."""

    @property
    def kind(self) -> Kind:
        return kind_of(self.key)

    def __str__(self) -> str:
        return f"{self.key} {self.before} -> {self.now}"


def kind_of(key: str) -> Kind:
    """Return the class of the longest prefix in KINDS. Options without one are refused."""
    return _of_longest_prefix(KINDS, key, default="refused")


def _of_longest_prefix(values: Mapping[str, T], key: str, default: T) -> T:
    parts = key.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((values[name] for name in names if name in values), default)


def is_of_plan(key: str) -> bool:
    """Return the value of the longest prefix in PLAN; False without one."""
    return _of_longest_prefix(PLAN, key, default=False)


def refusable() -> list[str]:
    """Return the options that a resume refuses to change unless they are allowed by name."""
    return [key for key in options() if kind_of(key) == "refused"]


def kept_job(config: JobConfig, sizes: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """Return the record of a job in a checkpoint, for JSON: options, model sizes, samples per step, rows per sample."""
    parts = {"job": as_dict(config), "sizes": dict(sizes), "samples": samples}
    return parts | {ROWS_PER_SAMPLE: rows_per_sample(config.task.kind)}


def changes(saved: Mapping[str, Any], now: Mapping[str, Any], model_only: bool = False) -> list[Change]:
    """Return the changes from one `kept_job` to another, without the quiet ones.

    `model_only`: compare only the model's sizes, as only its weights are loaded. Empty for checkpoints without a job.
    """
    if not isinstance(saved.get("job"), dict):
        return []
    saved, note = _counted_in_samples(saved, now[ROWS_PER_SAMPLE])
    size_changes = [change for change in _changed_sizes(saved, now) if not (model_only and change.key == CLASSES)]
    return (
        size_changes
        if model_only
        else size_changes + [change for change in _changed_options(saved, now, note) if change.kind != "quiet"]
    )


def refused(differences: list[Change], allowed: list[str]) -> list[Change]:
    """Return the changes that are refused and not allowed by name."""
    return [change for change in differences if change.kind == "refused" and change.key not in allowed]


def remedy(change: Change) -> str:
    extra = ', together with checkpoint.exclude_from_loading = ["optimizer"]' if change.key in TRAINED else ""
    return (
        f'{change.note}undo the change, or allow it by checkpoint.allow_config_change = ["{change.key}"]{extra}, '
        "or start from scratch in another job.dump_folder"
    )


def _known_before(before: Any, now: Any) -> Any:
    """Return a size, of a table only what an older checkpoint's has."""
    return (
        {key: now[key] for key in now if key in before} if isinstance(before, dict) and isinstance(now, dict) else now
    )


def _changed_sizes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    before = saved.get("sizes", {})
    for name in before.keys() & now["sizes"].keys():  # older checkpoints lack newer sizes
        if _known_before(before[name], now["sizes"][name]) != before[name]:
            key = CLASSES if name == "n_classes" and not (before[name] and now["sizes"][name]) else SIZES
            size, size_now = f"{name} = {show(before[name])}", f"{name} = {show(now['sizes'][name])}"
            # a folder may be read otherwise than by the version with which the run began, though no option has changed
            is_option = key == SIZES and isinstance(before[name], int | float | str)
            note = f"write {SIZES} = {{{size}}} to go on as the run began; else " if is_option else ""
            yield Change(key, size, size_now, note)


def _counted_in_samples(saved: Mapping[str, Any], per_sample: int) -> tuple[Mapping[str, Any], str]:
    """Convert batch sizes that count rows of pairs to pairs. Also return advice on how to change the job."""
    if ROWS_PER_SAMPLE in saved or per_sample == 1:
        return saved, ""
    job = {name: dict(section) if isinstance(section, dict) else section for name, section in saved["job"].items()}
    sizes = {}
    for key in BATCH_SIZES:
        section, name = key.split(".")
        size = job[section].get(name) if isinstance(job.get(section), dict) else None
        if isinstance(size, int) and size > 0:
            sizes[key] = job[section][name] = -(-size // per_sample)
    samples = saved.get("samples")
    saved = {**saved, "job": job, "samples": samples // per_sample if isinstance(samples, int) else samples}
    advice = " and ".join(f"{key} = {sizes[key]}" for key in BATCH_SIZES[:2] if key in sizes)
    return saved, f"the checkpoint's job counted answers, and batch sizes count pairs now: write {advice}; else "


def _changed_options(saved: Mapping[str, Any], now: Mapping[str, Any], note: str) -> Iterator[Change]:
    for key, option in options().items():
        if key == SIZES:
            continue
        default = DEFAULTS.get(key, option.default)
        before, today = saved_value(saved["job"], key, default), saved_value(now["job"], key, default)
        if key == SAMPLES:
            if today == default:
                note += f"it follows from the number of ranks: give as many, or set it to {saved.get('samples')}; else "
            before, today = saved.get("samples"), now["samples"]
        if before != today:
            yield Change(key, show(before), show(today), note * (key == SAMPLES))


def saved_value(job: Mapping[str, Any], key: str, default: Any) -> Any:
    """Return an option's value from nested tables, or its default if it is unset or newer than the checkpoint."""
    value: Any = job
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return default
        value = value[part]
    return value


OLDER_TORCHTITAN = "older_torchtitan"


@dataclass(frozen=True)
class Moved:
    to: str
    translate: Callable[[Any], Any] = lambda value: value
    """Old value to new. Raises JobError with the way out where that takes a person."""


@dataclass(frozen=True)
class Removed:
    reason: str
    harmless: tuple[Any, ...] | None = ()
    """Values at which the option changed nothing, so that a translation may leave it out; None: any value."""


@dataclass(frozen=True)
class Dialect:
    """Options that another dialect had, by dotted name. `advice`: on a model's name in today's job; "" without any."""

    options: Mapping[str, Moved | Removed]
    advice: Callable[[str], str]


_DIALECTS: Registry[Dialect] = Registry(DIALECTS, {}, Dialect)


def renamed(key: str) -> Moved | Removed | None:
    return next((dialect.options[key] for dialect in _DIALECTS.values() if key in dialect.options), None)


def old_section(name: str) -> bool:
    """Return True if another dialect has options in this section."""
    return any(key.startswith(f"{name}.") for dialect in _DIALECTS.values() for key in dialect.options)


def advice(model: str) -> str:
    """Return advice on a model's name of another dialect in a current job; empty for other names."""
    return next(filter(None, (dialect.advice(model) for dialect in _DIALECTS.values())), "")


def missing_dialect() -> str:
    """Return a remedy for unknown options where the plugin that knows older ones is missing; empty where it is not."""
    remedy = missing_plugin(OLDER_TORCHTITAN)
    return remedy and f"if this is a job of PyTorch's torchtitan, {remedy}"
