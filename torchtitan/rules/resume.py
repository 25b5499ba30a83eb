"""Rules on what a job would go on from: a checkpoint of another job is refused before anything starts."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torchtitan.adapters import NONE
from torchtitan.adapters.targets import without_numbers
from torchtitan.checkpoint import base_weights
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
from torchtitan.launcher.run_folder import missing_checkpoints
from torchtitan.optimizers.state_sizes import sides, under_plan
from torchtitan.rules.facts import Facts
from torchtitan.rules.optimization import options_of_the_optimizer

QUICKLY_READ = 2**28
"""Bytes."""


def changes_that_can_be_allowed(facts: Facts) -> Iterator[Fault]:
    key, known = "checkpoint.allow_config_change", refusable()
    for name in facts.config.checkpoint.allow_config_change:
        if name not in known:
            why = "a resume takes any value of it" if name in options() else hint(name, known) or "no such option"
            yield facts.fault(key, "options that a resume does not let change by itself", why, given=show(name))


def same_job_as_the_checkpoint(facts: Facts) -> Iterator[Fault]:
    """What the newest checkpoint, or that of load_step, was made by. Where it cannot be read, loading says why."""
    options = facts.config.checkpoint
    if facts.args is None or facts.samples is None or (found := _wanted(facts)) is None:
        return
    folder, kept = found
    samples = facts.config.training.global_batch_size
    # as a run has it, which an old checkpoint may say although the job leaves it open
    adapter = replace(facts.config.adapter, save=facts.adapter_save)
    now = kept_job(
        replace(facts.config, adapter=adapter), asdict(facts.args), samples if samples > 0 else facts.samples
    )
    changed = changes(kept, now)
    for change in refused(changed, options.allow_config_change):
        yield facts.fault(change.key, f"{change.before}, as in {folder.name}", remedy(change), given=change.now)
    others = [each.key for each in changed if each.key in TRAINED and each.key in options.allow_config_change]
    if others and "optimizer" not in options.exclude_from_loading:
        why = f"{folder.name} has the optimizer of what was trained then: it begins anew"
        yield facts.fault("checkpoint.exclude_from_loading", f'"optimizer" among them, with another {others[0]}', why)


def _wanted(facts: Facts) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint that the job would go on from, the newest or that of load_step, and what it keeps of its job."""
    options = facts.config.checkpoint
    if not options.enable or facts.begins_anew:
        return None
    try:
        complete, _ = complete_steps(Path(facts.config.job.dump_folder, options.folder))
        wanted = next((path for path in complete if options.load_step in (-1, step_of(path.name))), None)
        return None if wanted is None else (wanted, read_state(wanted)["trainer"])
    except (OSError, ValueError):  # CheckpointError, and names that no folder can have
        return None


def moments_are_of_this_plan(facts: Facts) -> Iterator[Fault]:
    """With on_conflict = "flip" GaLore's are of the sides that the plan leaves whole: another may leave others."""
    options, exclude = options_of_the_optimizer(facts), facts.config.checkpoint.exclude_from_loading
    if not options or options.get("on_conflict") != "flip" or "optimizer" in exclude or facts.fsdp_shards is None:
        return
    if (found := _wanted(facts)) is None:
        return
    folder, kept = found
    degrees = kept.get("degrees")
    named = degrees.items() if isinstance(degrees, dict) else ()
    saved = {axis: degree for axis, degree in named if isinstance(degree, int)}
    if not {"dp_shard", "cp", "tp"} <= saved.keys():
        return
    shard, cp, tp = (saved[axis] for axis in ("dp_shard", "cp", "tp"))
    turned = []
    for name, shape in facts.matrices.items():
        own = sides(name, shape, options)
        cut = facts.cut_sides(name, facts.fsdp_shards, facts.tp), facts.cut_sides(name, shard * cp, tp)
        now, then = (under_plan(own, each, "flip") for each in cut)
        turned += [name] if now != then else []
    if turned:
        plan = f"dp_shard {shard}, cp {cp}, tp {tp}"
        allowed = f"a plan that shards {', '.join(without_numbers(turned))} by the sides of {folder.name} ({plan})"
        remedy = 'take that plan, or begin the moments anew by checkpoint.exclude_from_loading = ["optimizer"]'
        yield facts.fault("optimizer.options", allowed, remedy, given='on_conflict = "flip"')


def adapter_is_of_this_model(facts: Facts) -> Iterator[Fault]:
    """The newest checkpoint, where it holds an adapter alone; of a base that takes long to read, loading says it."""
    options, adapter = facts.config.checkpoint, facts.config.adapter
    anew = facts.begins_anew or not options.enable
    if anew or options.initial_load_path is None or adapter.kind == NONE or facts.adapter_save != "alone":
        return
    try:
        newest, _ = newest_complete(Path(facts.config.job.dump_folder, options.folder))
        if newest is None:
            return
        state = read_state(newest)["trainer"]
        if base_weights.size(options.initial_load_path) <= QUICKLY_READ:
            base_weights.refuse_another(state, base_weights.reference(options.initial_load_path))
    except NothingLoadable:
        return  # the rule on initial_load_path says it
    except CheckpointError as error:
        yield facts.fault("checkpoint.initial_load_path", "the model of the adapter in this folder", str(error))
    except (OSError, ValueError):
        return


def checkpoints_are_still_there(facts: Facts) -> Iterator[Fault]:
    """A used folder without them is no fresh start: its disk is not mounted, or somebody has moved them."""
    options, dump = facts.config.checkpoint, facts.config.job.dump_folder
    if not options.enable or facts.begins_anew or "\0" in dump + options.folder:
        return
    folder = Path(dump, options.folder)
    try:
        before = missing_checkpoints(Path(dump), folder)
    except OSError:  # which the rule on folders names
        return
    if before is not None:
        given = f"{show(options.folder)}: no checkpoint in {folder}"
        allowed = f"the folder that this run has saved to ({before})"
        why = "mount its disk or bring it back; to begin anew, give another job.dump_folder"
        yield facts.fault("checkpoint.folder", allowed, why, given=given)
