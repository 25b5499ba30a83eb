"""Rules on resuming and on initial weights: the checkpoint of another job is refused before anything starts."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtitan.adapters import NONE
from torchtitan.adapters.targets import with_wildcards
from torchtitan.checkpoint import base_weights
from torchtitan.checkpoint.base_weights import Kind, counters_of, find_weights, rounding_of
from torchtitan.checkpoint.layout import (
    CheckpointError,
    NothingLoadable,
    complete_steps,
    newest_complete,
    read_state,
    step_of,
)
from torchtitan.config.changes import TRAINED, changes, kept_job, refusable, refused, remedy
from torchtitan.config.options import Fault, hint, options, show
from torchtitan.core.errors import JobError
from torchtitan.launcher.run_folder import find_lost_checkpoints
from torchtitan.models import CONFIG_CONVERTERS, FROM_HF
from torchtitan.models.hf.config import CONFIG
from torchtitan.optimizers.spec import sides, sides_under_plan
from torchtitan.rules.facts import Facts, Rule
from torchtitan.rules.optimization import options_of_the_optimizer, sharded_sides, trained_matrices
from torchtitan.rules.task import PAIRS

QUICKLY_READ = 2**28
"""Size in bytes up to which a base model is read to check it before the run."""


def changes_that_can_be_allowed(facts: Facts) -> Iterator[Fault]:
    key, allowed_names = "checkpoint.allow_config_change", refusable()
    for name in facts.config.checkpoint.allow_config_change:
        if name not in allowed_names:
            reason = (
                "a resume accepts any value of it"
                if name in options()
                else hint(name, allowed_names) or "no such option"
            )
            yield facts.fault(key, "options that a resume otherwise refuses to change", reason, value=show(name))


def same_job_as_the_checkpoint(facts: Facts) -> Iterator[Fault]:
    """Require that the job equals the one that wrote the checkpoint, except for changes that are harmless or allowed.

    If the checkpoint's job cannot be read, loading reports the reason.
    """
    options = facts.config.checkpoint
    if (resume_point := checkpoint_to_resume(facts)) is None:
        return
    folder, saved_job = resume_point
    # the resolved values: an old checkpoint may hold one although the job leaves it open
    config = facts.job.with_lasting_options().config
    now = kept_job(config, asdict(facts.model.args), facts.layout.samples)
    changed = changes(saved_job, now)
    for change in refused(changed, options.allow_config_change):
        yield facts.fault(change.key, f"{change.before}, as in {folder.name}", remedy(change), value=change.now)
    changed_keys = [entry.key for entry in changed if entry.key in TRAINED and entry.key in options.allow_config_change]
    if changed_keys and "optimizer" not in options.exclude_from_loading:
        reason = f"{folder.name} has the optimizer state of the parameters trained then; start with a new one"
        yield facts.fault(
            "checkpoint.exclude_from_loading", f'a list with "optimizer" if {changed_keys[0]} changes', reason
        )


def checkpoint_to_resume(facts: Facts) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint to resume from (the newest, or checkpoint.load_step) and the job that it holds."""
    options = facts.config.checkpoint
    if not options.enable or facts.saving.begins_anew:
        return None
    try:
        complete, _ = complete_steps(facts.saving.folder)
        selected = next((path for path in complete if options.load_step in (-1, step_of(path.name))), None)
        return None if selected is None else (selected, read_state(selected)["trainer"])
    except (OSError, ValueError):  # CheckpointError, or an invalid folder name
        return None


def moments_are_of_this_plan(facts: Facts) -> Iterator[Fault]:
    """Require a plan that gives GaLore's saved moments the same sides.

    With on_conflict = "flip" GaLore projects the side that the plan does not shard, which may differ in another plan.
    """
    options, exclude = options_of_the_optimizer(facts), facts.config.checkpoint.exclude_from_loading
    if not options or options.get("on_conflict") != "flip" or "optimizer" in exclude:
        return
    if (resume_point := checkpoint_to_resume(facts)) is None:
        return
    folder, saved_job = resume_point
    degrees = saved_job.get("degrees")
    axis_degrees = degrees.items() if isinstance(degrees, dict) else ()
    saved = {axis: degree for axis, degree in axis_degrees if isinstance(degree, int)}
    if not {"dp_shard", "cp", "tp"} <= saved.keys():
        return
    shard, cp, tp = (saved[axis] for axis in ("dp_shard", "cp", "tp"))
    flipped = []
    for name, shape in trained_matrices(facts).items():
        projected = sides(name, shape, options)
        cut = sharded_sides(name, facts.layout.fsdp_shards, facts.layout.tp), sharded_sides(name, shard * cp, tp)
        now, then = (sides_under_plan(projected, sharded, "flip") for sharded in cut)
        flipped += [name] if now != then else []
    if flipped:
        plan = f"dp_shard {shard}, cp {cp}, tp {tp}"
        allowed = f"a plan that shards {', '.join(with_wildcards(flipped))} by the sides of {folder.name} ({plan})"
        remedy = 'use that plan, or reset the moments: checkpoint.exclude_from_loading = ["optimizer"]'
        yield facts.fault("optimizer.options", allowed, remedy, value='on_conflict = "flip"')


def adapter_is_of_this_model(facts: Facts) -> Iterator[Fault]:
    """Require the base model of the newest adapter-only checkpoint. For a large base, loading makes this check."""
    options, adapter = facts.config.checkpoint, facts.config.adapter
    fresh_start = facts.saving.begins_anew or not options.enable
    if fresh_start or options.initial_load_path is None or adapter.kind == NONE or facts.saving.adapter_save != "alone":
        return
    try:
        newest, _ = newest_complete(facts.saving.folder)
        if newest is None:
            return
        state = read_state(newest)["trainer"]
        if base_weights.base_bytes(options.initial_load_path) <= QUICKLY_READ:
            base_weights.refuse_other_base(state, base_weights.describe_base(options.initial_load_path))
    except NothingLoadable:
        return  # the rule on initial_load_path reports it
    except CheckpointError as error:
        yield facts.fault("checkpoint.initial_load_path", "the model of the adapter in this folder", str(error))
    except (OSError, ValueError):
        return


def checkpoints_are_still_there(facts: Facts) -> Iterator[Fault]:
    """Refuse a used folder without its checkpoints: its disk is not mounted, or they have been moved."""
    options, dump = facts.config.checkpoint, facts.config.job.dump_folder
    if not options.enable or facts.saving.begins_anew or "\0" in dump + options.folder:
        return
    folder = Path(dump, options.folder)
    try:
        before = find_lost_checkpoints(Path(dump), folder)
    except OSError:  # the rule on folders reports it
        return
    if before is not None:
        value = f"{show(options.folder)}: no checkpoint in {folder}"
        allowed = f"the folder to which this run saved ({before})"
        reason = "mount its disk or restore it; to start from scratch, give another job.dump_folder"
        yield facts.fault("checkpoint.folder", allowed, reason, value=value)


def checkpoint_rules(facts: Facts) -> Iterator[Fault]:
    options, key = facts.config.checkpoint, "checkpoint."
    if options.keep_latest_k == 1:
        reason = "the only checkpoint would be deleted before the new one has been verified"
        yield facts.fault(key + "keep_latest_k", "0 (all) or at least 2", reason)
    if options.load_only and (options.last_save_model_only or options.enable_first_step_checkpoint):
        name = "last_save_model_only" if options.last_save_model_only else "enable_first_step_checkpoint"
        yield facts.fault(key + name, "false with checkpoint.load_only, which never saves", "drop one of the two")
    if options.enable and options.initial_load_in_hf and options.initial_load_path is None:
        yield facts.fault(key + "initial_load_in_hf", "true only with initial_load_path", "set the path")
    if options.initial_load_in_hf and not options.initial_load_model_only:
        reason = "safetensors of Hugging Face hold no optimizer state"
        yield facts.fault(key + "initial_load_model_only", "true with initial_load_in_hf", reason)
    if options.initial_load_counters and options.enable and options.initial_load_path is None:
        yield facts.fault(key + "initial_load_counters", "true only with initial_load_path", "set the path")
    if options.initial_load_counters and not options.initial_load_model_only:
        reason = "everything is loaded anyway, including the counters"
        yield facts.fault(key + "initial_load_counters", "false with initial_load_model_only = false", reason)
    if options.initial_load_path is not None:
        yield from _initial_load(facts, Path(options.initial_load_path))


def _initial_load(facts: Facts, path: Path) -> Iterator[Fault]:
    key, options = "checkpoint.initial_load_path", facts.config.checkpoint
    try:
        newest = newest_complete(facts.saving.folder)[0] if options.enable else None
        if newest is not None and facts.saving.adapter_save == "whole":
            return  # this run resumes its own checkpoint and no longer needs the initial weights
        kind, place = find_weights(path)
    except (OSError, NothingLoadable) as error:
        yield facts.fault(key, "a path with weights", str(error))
        return
    if kind != "hf" and options.initial_load_in_hf:
        origin = "this project" if kind == "native" else "PyTorch's torchtitan"
        reason = f"{place} is a checkpoint of {origin}; leave it out"
        yield facts.fault("checkpoint.initial_load_in_hf", "true with a folder or file of Hugging Face only", reason)
    if kind == "torchtitan" and not options.initial_load_model_only:
        reason = "only the weights of checkpoints of PyTorch's torchtitan are read"
        yield facts.fault("checkpoint.initial_load_model_only", "true with this initial_load_path", reason)
    if kind == "hf" and not options.initial_load_model_only and not options.initial_load_in_hf:
        reason = "safetensors of Hugging Face hold no optimizer state"
        yield facts.fault("checkpoint.initial_load_model_only", "true with this initial_load_path", reason)
    if kind == "hf" and facts.config.qat.weight_dtype != "none" and rounding_of(place) is not None:
        reason = "rounding once more would move them: export the run without --rounded"
        yield facts.fault(key, "weights that are not rounded yet, with qat.weight_dtype", reason)
    if options.initial_load_counters:
        yield from _counters(facts, kind, place)
    if kind == "hf" and (place / CONFIG).is_file():
        yield from _other_sizes(facts, place, key)


def reference_is_of_this_model(facts: Facts) -> Iterator[Fault]:
    """Require a DPO reference with the job's model sizes, as far as its folder states them apart from its tensors.

    A resumed run has saved the reference log-probabilities, so it needs the reference only before the first checkpoint.
    """
    key, path, options = "dpo.reference", facts.config.dpo.reference, facts.config.checkpoint
    if path is None or facts.config.task.kind not in PAIRS:
        return
    try:
        if options.enable and newest_complete(facts.saving.folder)[0] is not None:
            return
        kind, place = find_weights(Path(path))
    except (OSError, NothingLoadable) as error:
        yield facts.fault(key, "a path with weights", str(error))
        return
    if kind == "hf" and (place / CONFIG).is_file():
        yield from _other_sizes(facts, place, key)
    elif kind == "native":
        yield from _sizes_of_another_run(facts, place, key)


def _sizes_of_another_run(facts: Facts, place: Path, key: str) -> Iterator[Fault]:
    try:
        saved_job = read_state(place)["trainer"]
    except (OSError, ValueError, KeyError):  # an export; loading reports the error
        return
    for change in changes(saved_job, kept_job(facts.config, asdict(facts.model.args), 0), model_only=True):
        allowed = f"a model of {change.now}"
        yield facts.fault(key, allowed, f"{place} has {change.before}; give a model of the job's sizes")


def _counters(facts: Facts, kind: Kind, place: Path) -> Iterator[Fault]:
    counters, key = counters_of(kind, place), "checkpoint.initial_load_counters"
    if counters is None:
        reason = f"{place} does not record the number of trained steps; leave it out"
        yield facts.fault(
            key, "true with a checkpoint of this project, or weights next to a training_state.json", reason
        )
    elif facts.steps is not None and facts.steps <= counters.step:
        reason = f"{place} ends at step {counters.step}, and this run continues the count"
        yield facts.fault("training.steps", f"more than {counters.step}", reason, value=str(facts.steps))


def _other_sizes(facts: Facts, folder: Path, key: str) -> Iterator[Fault]:
    """Yield a fault if a folder's config.json differs from the job; its tensors are checked when they are loaded."""
    allowed = f"weights of {facts.config.model.name} {facts.config.model.flavor}"
    args, form = facts.model.args, facts.model.converter
    try:
        differing = form.differences(folder, form.args_for_weights(folder, args, facts.config.model.overrides))
    except JobError as error:
        yield facts.fault(key, allowed, str(error))
        return
    if differing:
        model = facts.config.model
        overrides = model.overrides if model.flavor == FROM_HF else {}
        names = [name for name in overrides if any(text.startswith(f"{name} is ") for text in differing)]
        remedy = f'set model.flavor = "{FROM_HF}" and model.hf_folder = {show(str(folder))}'
        remedy = f"leave {', '.join(names)} out of model.overrides" if names else remedy
        yield facts.fault(key, allowed, f"{'; '.join(differing)}; {remedy}")


def export_has_a_form(facts: Facts) -> Iterator[Fault]:
    """Require a model that transformers can represent, for an export."""
    if facts.config.checkpoint.last_save_in_hf:
        args = facts.model.args
        try:
            CONFIG_CONVERTERS[facts.config.model.name].to_hf(args)
        except JobError as error:
            yield facts.fault("checkpoint.last_save_in_hf", "false with this model", str(error))


def checkpoint_options_have_effect(facts: Facts) -> Iterator[Fault]:
    """Report options of [checkpoint] that have no effect because checkpoint.enable is false.

    With initial_load_path set, the options that affect the initial load are not reported.
    """
    options = facts.config.checkpoint
    names: tuple[str, ...] = ("load_only", "last_save_model_only", "enable_first_step_checkpoint", "best_metric")
    if options.initial_load_path is None:
        names = ("initial_load_in_hf", "initial_load_counters", *names, "exclude_from_loading", "allow_config_change")
    used = {"load_step": options.load_step >= 0} | {name: bool(getattr(options, name)) for name in names}
    for name in (name for name, is_used in used.items() if is_used and not options.enable):
        allowed = "nothing with checkpoint.enable = false"
        yield facts.fault(f"checkpoint.{name}", allowed, "set checkpoint.enable = true, or leave it out")


def seconds_are_whole(facts: Facts) -> Iterator[Fault]:
    options = facts.config.checkpoint
    if options.interval_type == "seconds" and not isinstance(options.interval, int):
        allowed = 'a whole number with checkpoint.interval_type = "seconds"'
        yield facts.fault("checkpoint.interval", allowed, 'write seconds, or interval_type = "steps"')


RULES: tuple[Rule, ...] = (
    seconds_are_whole,
    checkpoint_rules,
    reference_is_of_this_model,
    export_has_a_form,
    changes_that_can_be_allowed,
    same_job_as_the_checkpoint,
    adapter_is_of_this_model,
    checkpoints_are_still_there,
    moments_are_of_this_plan,
)
WITHOUT_EFFECT: tuple[Rule, ...] = (checkpoint_options_have_effect,)
