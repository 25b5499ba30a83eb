"""Rules on what a job would go on from: a checkpoint of another job is refused before anything starts."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from torchtitan.adapters import NONE
from torchtitan.checkpoint import base
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
from torchtitan.rules.facts import Facts
from torchtitan.run_folder import missing_checkpoints

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
    if not options.enable or facts.begins_anew or facts.args is None or facts.samples is None:
        return
    try:
        complete, _ = complete_steps(Path(facts.config.job.dump_folder, options.folder))
        wanted = [path for path in complete if options.load_step in (-1, step_of(path.name))]
        kept = read_state(wanted[0])["trainer"] if wanted else {}
    except (OSError, ValueError):  # CheckpointError, and names that no folder can have
        return
    samples = facts.config.training.global_batch_size
    now = kept_job(facts.config, asdict(facts.args), samples if samples > 0 else facts.samples)
    found = changes(kept, now)
    for change in refused(found, options.allow_config_change):
        yield facts.fault(change.key, f"{change.before}, as in {wanted[0].name}", remedy(change), given=change.now)
    others = [each.key for each in found if each.key in TRAINED and each.key in options.allow_config_change]
    if others and "optimizer" not in options.exclude_from_loading:
        why = f"{wanted[0].name} has the optimizer of what was trained then: it begins anew"
        yield facts.fault("checkpoint.exclude_from_loading", f'"optimizer" among them, with another {others[0]}', why)


def adapter_is_of_this_model(facts: Facts) -> Iterator[Fault]:
    """The newest checkpoint, where it holds an adapter alone; of a base that takes long to read, loading says it."""
    options, adapter = facts.config.checkpoint, facts.config.adapter
    anew = facts.begins_anew or not options.enable
    if anew or options.initial_load_path is None or adapter.kind == NONE or adapter.save != "alone":
        return
    try:
        newest, _ = newest_complete(Path(facts.config.job.dump_folder, options.folder))
        if newest is None:
            return
        state = read_state(newest)["trainer"]
        if base.size(options.initial_load_path) <= QUICKLY_READ:
            base.refuse_another(state, base.reference(options.initial_load_path))
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
