"""Translate a job in a dialect of PyTorch's torchtitan: options that moved, and defaults and models that have changed.

Three eras are supported: the flat dialect of July 2024; v0.1.0 to August 2025; v0.2.0 to v0.2.2 (February 2026). An
era is recognized by options that only it had; a job with none of them is read as v0.2.2.
"""

from dataclasses import dataclass, field
from typing import Any

from torchtitan.config.dialects import Removed, renamed
from torchtitan.config.layers import Values
from torchtitan.core.errors import JobError
from torchtitan.plugins.dialects.models import JULY_2024, V0_1, V0_2_2, current_model
from torchtitan.plugins.dialects.renames import FLOAT8, VALUES, translate_float8

ERAS = {"july-2024": JULY_2024, "v0.1": V0_1, "v0.2": V0_2_2}
"""By the words of --from."""
TODAY = "today"
_OURS = ("training.shuffle", "model.overrides", "training.text_field", "training.loss_chunks", "metrics.plot")
"""Options that no old dialect had. Every translation writes the first."""

_ALL = {
    "lr_scheduler.warmup_steps": 200,
    "lr_scheduler.min_lr_factor": 0.0,
    "training.dataset": "c4_test",
    "training.shuffle": False,  # documents came in the order of the data set
}
_LATER = {
    "checkpoint.last_save_model_only": True,
    "validation.dataset": "c4_validation",
    "validation.seq_len": 2048,
}
DEFAULTS: dict[str, Values] = {
    JULY_2024: _ALL
    | {
        "job.dump_folder": "./torchtitan/outputs",
        "metrics.disable_color_printing": True,
        "model.tokenizer_path": "./torchtitan/datasets/tokenizer/tokenizer.model",
        "training.dataset": "c4_mini",
        "optimizer.implementation": "foreach",
        "checkpoint.keep_latest_k": 0,
    },
    V0_1: _ALL
    | _LATER
    | {
        "job.dump_folder": "./torchtitan/outputs",
        "model.tokenizer_path": "./torchtitan/datasets/tokenizer/tokenizer.model",
    },
    V0_2_2: _ALL | _LATER | {"model.tokenizer_path": "./tests/assets/tokenizer"},
}
"""Defaults of the old dialects where ours are others: a translation writes them out."""

SAMPLES = {"c4_mini": "./torchtitan/datasets/c4_mini", "c4_test": "./tests/assets/c4_test"}
"""Datasets in the repository of PyTorch's torchtitan, and their folders."""

_ONLY_JULY: tuple[str, ...] = (
    "metrics.enable_color_printing",
    "metrics.rank_0_only",
    "optimizer.fused",
    "training.warmup_steps",
)
_ONLY_JULY += ("training.data_parallel_degree", "training.enable_loss_parallel", "training.compile")
_BEFORE_V0_2: tuple[str, ...] = (
    "checkpoint.enable_checkpoint",
    "checkpoint.last_save_model_weights_only",
    "lr_scheduler.lr_min",
)
_BEFORE_V0_2 += ("checkpoint.initial_load_model_weights_only", "training.compile", "training.batch_size")
_BEFORE_V0_2 += ("validation.enabled", "memory_estimation.enabled", "parallelism.pipeline_parallel_split_points")
_BEFORE_V0_2 += ("model.use_flex_attn", "model.attn_mask_type")


@dataclass
class Upgrade:
    """An old job in today's options."""

    era: str
    values: Values = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What was moved, left out or written out, one line each."""
    stuck: list[tuple[str, Any, str]] = field(default_factory=list)
    """Option, value and reason of what cannot be translated."""


def era_of(old: Values, values: Values) -> str:
    """Recognize the era: July 2024 if it has only options up to then; TODAY if it has only current ones."""
    later = any(key.split(".")[0] in ("lr_scheduler", "parallelism", "compile") for key in (*old, *values))
    if not old and set(_OURS) & set(values):
        return TODAY
    if not later and set(_ONLY_JULY) & set(old):
        return JULY_2024
    before = set(_BEFORE_V0_2) & set(old) or any(key.startswith(("float8.", "mx.")) for key in old)
    return V0_1 if before else V0_2_2


def upgrade(old: Values, values: Values, era: str | None = None) -> Upgrade:
    """Translate a job from `old`, options of older dialects, and `values`, options that still exist."""
    result = Upgrade(era or era_of(old, values))
    if result.era == TODAY:
        result.values = values
        result.notes.append("nothing to translate: it has options of today, and none of an older dialect")
        return result
    if "training.dataset_path" not in values:
        dataset = values.get("training.dataset", DEFAULTS[result.era]["training.dataset"])
        if dataset in SAMPLES:
            values = values | {"training.dataset_path": SAMPLES[dataset]}
            result.notes.append(f"written out, as {dataset} lay there: training.dataset_path")
    values = {key: VALUES[key](value) if key in VALUES else value for key, value in values.items()}
    result.notes += [
        f"left out, because it is the default now: {key}" for key, value in values.items() if value is None
    ]
    values = {key: value for key, value in values.items() if value is not None}
    old = _combined(dict(old), values, result)
    for key, value in old.items():
        rename = renamed(key)
        if isinstance(rename, Removed):
            if rename.harmless is None or value in rename.harmless:
                result.notes.append(f"left out, changed nothing: {key} ({rename.reason})")
            else:
                result.stuck.append((key, value, rename.reason))
            continue
        try:
            new = rename.translate(value)
        except JobError as error:
            result.stuck.append((key, value, f"{rename.to}: {error}"))
            continue
        result.notes.append(f"moved: {key} -> {rename.to}")
        if new is not None:
            values.setdefault(rename.to, new)
    values = _with_old_defaults(values, result)
    _schedule(values, result)
    _async_tensor_parallel(values, result)
    result.values = _with_old_model(values, result)
    return result


def _combined(old: Values, values: Values, result: Upgrade) -> Values:
    """Translate options that depend on each other. Returns the other entries of `old`."""
    kind = old.pop("training.data_parallel_type", "fsdp")
    if kind == "ddp":
        degree = old.pop("training.data_parallel_degree", -1)
        values["parallelism.data_parallel_shard_degree"] = 1
        if degree == -1:
            reason = "it replicated over all ranks: give data_parallel_degree as their number"
            result.stuck.append(("training.data_parallel_type", kind, reason))
        else:
            values["parallelism.data_parallel_replicate_degree"] = degree
            result.notes.append("moved: training.data_parallel_type -> parallelism.data_parallel_replicate_degree")
    elif kind != "fsdp":
        result.stuck.append(("training.data_parallel_type", kind, 'known are "fsdp" and "ddp"'))
    loads = values.get("checkpoint.enable", old.get("checkpoint.enable_checkpoint"))
    for key in [] if loads else [key for key in values if key.startswith("checkpoint.initial_load")]:
        del values[key]  # today it is read even if checkpoints are off
        result.notes.append(f"left out, changed nothing: {key} (allowed: nothing where checkpoints are off)")
    if loads and values.get("checkpoint.initial_load_in_hf") and not values.get("checkpoint.initial_load_path"):
        # weights were read from the tokenizer's folder; the older of its two options took precedence
        default = DEFAULTS[V0_2_2]["model.tokenizer_path"]  # only this dialect had these options
        folder = values.get("model.tokenizer_path") or old.get("model.hf_assets_path", default)
        values["checkpoint.initial_load_path"] = folder
        result.notes.append("written out, as weights lay beside the tokenizer: checkpoint.initial_load_path")
    validates = values.get("validation.enable", old.get("validation.enabled"))
    if validates and values.get("validation.steps", -1) == -1:
        reason = "-1, the default then, was to the data's end; give the number of batches, or validation.samples"
        result.stuck.append(("validation.steps", values.pop("validation.steps", None), reason))
    elif values.get("validation.steps") == -1:
        del values["validation.steps"]
        result.notes.append("left out, changed nothing: validation.steps (validation is off)")
    _overlap(values, result)
    translate_float8(old, values, result.notes, result.stuck)
    return old


def _with_old_defaults(values: Values, result: Upgrade) -> Values:
    for key, default in DEFAULTS[result.era].items():
        section = key.split(".")[0]
        switched_off = section in ("checkpoint", "validation") and not values.get(f"{section}.enable")
        if key not in values and not switched_off:
            values[key] = VALUES[key](default) if key in VALUES else default
            result.notes.append(f"written out, as the default was another: {key}")
    return values


def _schedule(values: Values, result: Upgrade) -> None:
    """Translate the learning rate: its floor came one step after the last, and settings that were too long were cut."""
    warmup, ratio, total = "lr_scheduler.warmup_steps", "lr_scheduler.decay_ratio", "lr_scheduler.total_steps"
    run_steps = values.get("training.steps", 10000)
    steps = values.get(total, run_steps)
    if not all(isinstance(count, int) and count >= 0 for count in (steps, run_steps, values[warmup])) or steps < 1:
        return  # reported as faults
    if result.era == JULY_2024:  # (s + 1) / (W + 1) in the warmup, and decay from the step after it
        values[warmup] += 1
        values[total] = max(steps, values[warmup]) + 1
        result.notes.append(
            f"written out, as warmup was a step longer and the floor came after the last step: {warmup}, {total}; "
            "change both along with training.steps"
        )
        return
    values["lr_scheduler.convention"] = "torchtitan"
    result.notes.append("written out, as the floor came after the last step: lr_scheduler.convention")
    if values[warmup] > steps:
        values[warmup] = steps
        result.notes.append(f"written out, as a warmup was cut to the job's {steps} steps: {warmup}")
    share = values.get(ratio)
    if isinstance(share, (int, float)) and round(steps * share) > steps - values[warmup]:
        del values[ratio]
        result.notes.append(f"left out, as a decay was cut to the steps after the warmup: {ratio} = {share:g}")
    if steps + 1 < run_steps:
        result.notes.append(
            f"not the same: from step {steps + 2} on the rate left the floor (below it, or up again); here it stays"
        )


def _async_tensor_parallel(values: Values, result: Upgrade) -> None:
    """Drop async tensor parallel next to float8: of the two it is the one that changes no result."""
    key = "parallelism.enable_async_tensor_parallel"
    if values.get(key) is True and FLOAT8 in values:
        del values[key]
        reason = "it cannot fuse gathers with products in float8; losses are the same, but the gathers take their time"
        result.notes.append(f"left out, changed no result: {key} ({reason})")


def _overlap(values: Values, result: Upgrade) -> None:
    """Translate the overlap of all-to-alls, which was on by default but only had an effect with DualPipeV."""
    key = "parallelism.pipeline_parallel_expert_parallel_overlap"
    degrees = ("parallelism.pipeline_parallel_degree", "parallelism.expert_parallel_degree")
    schedule = str(values.get("parallelism.pipeline_parallel_schedule", "1F1B")).lower()
    if schedule == "dualpipev" and all(values.get(degree, 1) != 1 for degree in degrees):
        if key not in values and result.era == V0_2_2:
            values[key] = True
            result.notes.append(f"written out, as the default was another: {key}")
    elif values.get(key) is True:
        del values[key]
        result.notes.append(f"left out, changed nothing: {key} (allowed: with DualPipeV and expert parallel)")


def _with_old_model(values: Values, result: Upgrade) -> Values:
    """Replace the model's name and flavor by today's names of the same model."""
    name, flavor = values.get("model.name", "llama3"), values.get("model.flavor", "debugmodel")
    length = values.get("training.seq_len", 2048)
    if not (isinstance(name, str) and isinstance(flavor, str) and isinstance(length, int)):
        return values  # reported as faults
    try:
        model = current_model(result.era, name, flavor, length)
    except JobError as error:
        result.stuck.append(("model.name", name, str(error)))
        return values
    if model is None:
        return values
    current: dict[str, Any] = {"model.name": model.name, "model.flavor": model.flavor}
    current |= {"training.document_mask": True} if model.document_mask else {}
    current |= {"model.overrides": model.overrides | values.get("model.overrides", {})} if model.overrides else {}
    previous = {"model.name": name, "model.flavor": flavor, **values}
    changed = [key for key, value in current.items() if previous.get(key) != value]
    if changed:
        result.notes.append(f"written out, as {name} {flavor} of {result.era} meant it: {', '.join(changed)}")
    result.notes += model.notes
    return values | {key: current[key] for key in changed}
