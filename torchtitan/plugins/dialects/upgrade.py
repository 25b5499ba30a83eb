"""`torchtitan check --upgrade`: translate a job of PyTorch's torchtitan, keeping its comments.

Options have moved, and defaults and models have changed.
Three eras are supported: the flat dialect up to July 2024; v0.1.0 to August 2025; v0.2.0 to v0.2.2 (February 2026). An
era is recognized by options that only it had; a job with none of them is read as v0.2.2.
"""

import fnmatch
from argparse import Namespace
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import Comment, Table

from torchtitan.commands.check import refuse
from torchtitan.config.changes import Removed, renamed
from torchtitan.config.job import JobConfig
from torchtitan.config.layers import Comments, Values, as_file, assemble, layer_of, merged
from torchtitan.config.manager import LARGEST_FILE, read_layers
from torchtitan.config.options import ConfigError, Fault, show
from torchtitan.core.errors import JobError, LimitError
from torchtitan.core.files import read_file
from torchtitan.job import ResolvedJob
from torchtitan.plugins.dialects.models import JULY_2024, V0_1, V0_2_2, current_model
from torchtitan.plugins.dialects.renames import (
    BEFORE_JULY_2024,
    FLOAT8,
    FLOAT8_EXCLUDE,
    MOVED,
    VALUES,
    translate_float8,
)
from torchtitan.rules import WITHOUT_EFFECT, Facts, UnknownValue, check, judge, without_unknown_names
from torchtitan.rules.loading import fewest_ranks
from torchtitan.rules.optimization import linears_in_blocks

ERAS = {"july-2024": JULY_2024, "v0.1": V0_1, "v0.2": V0_2_2}
"""By the words of --from."""
TODAY = "today"
YIELDING = ("model.hf_assets_path",)
"""Options that v0.2 ignored where the option of their new name was set too."""
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
_ONLY_JULY += (*BEFORE_JULY_2024, "training.checkpoint_interval_type")
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


def upgrade(old: Values, values: Values, era: str | None = None, models: str | None = None) -> Upgrade:
    """Translate a job from `old`, options of older dialects, and `values`, options that still exist.

    `models`: the era whose models the names mean, if it is another than that of the options.
    """
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
        if new is not None and values.setdefault(rename.to, new) != new and key not in YIELDING:
            result.stuck.append(
                (key, value, f"{rename.to} has another value, {values[rename.to]!r}: keep one of the two")
            )
    values = _with_old_defaults(values, result)
    _schedule(values, result)
    _async_tensor_parallel(values, result)
    result.values = _with_old_model(values, result, models or result.era)
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
    if values.get("checkpoint.folder") == "":
        del values["checkpoint.folder"]
        if loads:
            result.stuck.append(("checkpoint.folder", "", "name a folder: an empty one was the run's own"))
        else:
            result.notes.append("left out, changed nothing: checkpoint.folder (checkpoints are off)")
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


def _with_old_model(values: Values, result: Upgrade, era: str) -> Values:
    """Replace the model's name and flavor by today's names of the same model."""
    name, flavor = values.get("model.name", "llama3"), values.get("model.flavor", "debugmodel")
    length = values.get("training.seq_len", 2048)
    if not (isinstance(name, str) and isinstance(flavor, str) and isinstance(length, int)):
        return values  # reported as faults
    try:
        model = current_model(era, name, flavor, length)
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
        result.notes.append(f"written out, as {name} {flavor} of {era} meant it: {', '.join(changed)}")
    result.notes += model.notes
    return values | {key: current[key] for key in changed}


__all__ = ["ERAS", "print_translation", "translate"]


def print_translation(argv: list[str], options: Namespace) -> int:
    """Print a job in today's options. Returns 2 also for a translated job that cannot start without changes."""
    try:
        text, config = translate(argv, ERAS.get(options.era))
    except ConfigError as error:
        return refuse(error.faults)
    print(text, flush=True)
    faults = check(config, options.world_size or fewest_ranks(config.parallelism), options.device)
    return refuse(["translated, but the job cannot start without changes:", *faults], len(faults)) if faults else 0


def translate(argv: list[str], era: str | None) -> tuple[str, JobConfig]:
    """Return the translated file, including old defaults that differ from today's, and its job.

    Raises ConfigError with all options that have no translation.
    """
    files, layers = read_layers(argv)
    if faults := [fault for layer in layers for fault in layer.faults]:
        raise ConfigError(faults)
    name = " + ".join(files) or "the job"
    result = upgrade(merged(layer.old for layer in layers), merged(layer.values for layer in layers), era)
    faults = [Fault(name, key, show(value), "", f"has no translation: {reason}") for key, value, reason in result.stuck]
    translated = layer_of(name, result.values.items())
    if faults := faults + translated.all_faults():
        raise ConfigError(faults)
    values = with_effect(translated.values, result)
    comments = Comments()
    for layer in layers:
        if Path(layer.name).is_file():
            _read_comments(read_file(layer.name, LARGEST_FILE).decode(), comments)
    head = [f"Translated from {name}, read as a job for PyTorch's torchtitan of {result.era}.", *result.notes]
    return as_file(head, values, comments), assemble(values, [f"the translation of {name}"])


def with_effect(values: Values, result: Upgrade) -> Values:
    """Leave out options that have no effect with the other options, and would be a fault here."""
    while faults := [fault for fault in _faults_without_effect(values) if fault.key in values]:
        result.notes += [f"left out, changed nothing: {fault.key} (allowed: {fault.allowed})" for fault in faults]
        values = {key: value for key, value in values.items() if key not in {fault.key for fault in faults}}
    return _without_unmatched(values, result)


def _faults_without_effect(values: Values) -> list[Fault]:
    return judge(_facts_of(values), WITHOUT_EFFECT)


def _facts_of(values: Values) -> Facts:
    return without_unknown_names(Facts(ResolvedJob(assemble(values, []))))[0]


def _without_unmatched(values: Values, result: Upgrade) -> Values:
    """Leave out filters of float8 that match none of the model's linears: old files named routers for every model."""
    names: Collection[str] = ()
    with suppress(LimitError, UnknownValue):  # the sizes of the model are wrong, or not known
        names = linears_in_blocks(_facts_of(values)) if FLOAT8_EXCLUDE in values else ()
    unmatched = [pattern for pattern in values[FLOAT8_EXCLUDE] if not fnmatch.filter(names, pattern)] if names else []
    if not unmatched:
        return values
    dropped = ", ".join(unmatched)
    result.notes.append(
        f"left out, changed nothing: {dropped} in {FLOAT8_EXCLUDE} (no linear in float8 has such a name)"
    )
    return values | {FLOAT8_EXCLUDE: [pattern for pattern in values[FLOAT8_EXCLUDE] if pattern not in unmatched]}


def _read_comments(text: str, comments: Comments) -> None:
    """Add the comments of a file to those that were read, by today's names of its options."""
    pending: list[str] = []
    for name, item in _items(tomlkit.parse(text.removeprefix("\ufeff")), ""):
        if isinstance(item, Comment):
            pending.append(item.as_string().strip())
            continue
        is_first_section = isinstance(item, Table) and not comments.above and not comments.head
        name = MOVED[name].to if name in MOVED else name
        if is_first_section:
            comments.head, pending = pending, []
        elif pending:
            comments.above[name], pending = comments.above.get(name, []) + pending, []
        if item.trivia.comment:
            comments.inline[name] = item.trivia.comment
    comments.above[""] = comments.above.get("", []) + pending


def _items(table: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, item) in file order: comments (with an empty name), sections and options."""
    for key, item in table.body if isinstance(table, tomlkit.TOMLDocument) else table.value.body:
        if isinstance(item, Comment):
            yield "", item
        elif key is not None:
            name = prefix + key.key
            yield name, item
            if isinstance(item, Table):
                yield from _items(item, f"{name}.")
