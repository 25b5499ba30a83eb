"""Rules on the guards: what they could not do, and what would do nothing.

Rules on what is made of validations: the best checkpoint, and an end before the last step.

Rules on how often a run does something.
"""

from collections.abc import Iterator
from contextlib import suppress

from torchtitan.checkpoint.best_metric import LOSS
from torchtitan.config.options import Fault, hint, options, show
from torchtitan.core.cadence import SPEAKERS, CadenceError, cadence_of
from torchtitan.core.constraints import check_measured_saves
from torchtitan.rules.facts import Facts

POLICIES = ("non_finite", "spike", "loss_policy")


def policies_can_be_followed(facts: Facts) -> Iterator[Fault]:
    guard, saves = facts.config.guard, facts.config.checkpoint
    for name in POLICIES:
        policy, key = getattr(guard, name), f"guard.{name}"
        if policy == "skip" and facts.config.optimizer.early_step_in_backward:
            why = "each update is made in backward, before the loss or the norm is known"
            yield facts.fault(key, '"stop" or "rollback" with optimizer.early_step_in_backward', why)
        if policy == "rollback" and (not saves.enable or saves.load_only):
            why = "there is nothing to go back to without; set it, or write skip"
            allowed = '"rollback" only with checkpoint.enable' + (" and without load_only" if saves.load_only else "")
            yield facts.fault(key, allowed, why)
    if guard.shard_checksums and facts.config.optimizer.early_step_in_backward:
        why = "each update is made in backward, before the checksums can be compared"
        yield facts.fault("guard.shard_checksums", "false with optimizer.early_step_in_backward", why)


def guards_without_effect(facts: Facts) -> Iterator[Fault]:
    guard = facts.config.guard
    watched = {
        "spike_window": guard.spike != "off" or guard.loss_rise is not None,
        "spike_sigmas": guard.spike != "off",
        "loss_patience": guard.loss_threshold is not None,
        "loss_policy": guard.loss_threshold is not None,
        "patience": {getattr(guard, name) for name in POLICIES} & {"skip", "rollback"},
    }
    needs = {"patience": "a guard that says skip or rollback"}
    needs |= dict.fromkeys(("loss_patience", "loss_policy"), "guard.loss_threshold")
    for name, is_used in watched.items():
        key = f"guard.{name}"
        if not is_used and getattr(guard, name) != (default := options()[key].default):
            allowed = f"{show(default)} without {needs.get(name, 'guard.spike')}"
            yield facts.fault(key, allowed, "set both, or leave it out")


OF_CLASSES = ("validation_accuracy", "validation_f1")


def _measured(facts: Facts, key: str, name: str) -> Iterator[Fault]:
    """Of an option that names what a validation measures."""
    known = (LOSS, *(OF_CLASSES if facts.tells_classes else ()))
    if not facts.config.validation.enable:
        yield facts.fault(key, "nothing without validation.enable", "set both, or leave it out")
    elif name not in known:
        remedy = hint(name, known, 0.8, quote=True) or "these are measured in a validation of this task"
        yield facts.fault(key, ", ".join(map(show, known)), remedy)


def best_is_measured(facts: Facts) -> Iterator[Fault]:
    options, key = facts.config.checkpoint, "checkpoint.best_metric"
    if options.best_metric is None:
        for name in ("best_mode", "export_best"):
            if getattr(options, name):
                yield facts.fault(f"checkpoint.{name}", "nothing without checkpoint.best_metric", f"set {key}")
        return
    yield from _measured(facts, key, options.best_metric)
    if options.load_only:
        yield facts.fault(key, "nothing with checkpoint.load_only, which never saves", "drop one of the two")
    if options.export_best and not (options.last_save_model_only or facts.config.adapter.last_save_in_peft):
        why = "they say what is exported"
        needed = "checkpoint.last_save_model_only or adapter.last_save_in_peft"
        yield facts.fault("checkpoint.export_best", f"false without {needed}", f"{why}; set one of them")


def saves_are_measured(facts: Facts) -> Iterator[Fault]:
    """Of shares of steps that are known only with the data, the run says it before it starts."""
    config = facts.config
    if config.checkpoint.best_metric is None or not config.validation.enable:
        return
    if config.checkpoint.interval_type == "seconds":
        why = "each checkpoint falls on a validation, and these are counted in steps"
        yield facts.fault("checkpoint.interval_type", '"steps" with checkpoint.best_metric', why)
        return
    said = config.checkpoint.interval, config.validation.freq
    if all(isinstance(each, int) for each in said):
        yield from facts.judged(check_measured_saves, *said)
    elif facts.steps is not None:
        with suppress(CadenceError):  # which another rule says
            cadence = cadence_of(facts.config_with_end, facts.steps)
            yield from facts.judged(check_measured_saves, cadence.save, cadence.validate)


def early_stop_can_be_told(facts: Facts) -> Iterator[Fault]:
    options = facts.config.early_stop
    if options.patience is None:
        for name in ("min_delta", "metric"):
            if getattr(options, name):
                yield facts.fault(f"early_stop.{name}", "nothing without early_stop.patience", "set both or neither")
    elif options.metric is None and not facts.config.validation.enable:
        yield facts.fault("early_stop.patience", "nothing without validation.enable", "set both, or leave it out")
    if options.patience is not None and options.metric is not None:
        yield from _measured(facts, "early_stop.metric", options.metric)


def epochs_are_counted(facts: Facts) -> Iterator[Fault]:
    """What is said in epochs has a meaning where the run is as long as these."""
    for key in SPEAKERS if facts.config.training.epochs is None else ():
        section, _, name = key.partition(".")
        if isinstance(getattr(getattr(facts.config, section), name), str):
            allowed = "steps, or a share of the run such as 0.1, without training.epochs"
            yield facts.fault(key, allowed, "write one of them, or training.epochs instead of training.steps")


def seconds_are_whole(facts: Facts) -> Iterator[Fault]:
    options = facts.config.checkpoint
    if options.interval_type == "seconds" and not isinstance(options.interval, int):
        allowed = 'a whole number with checkpoint.interval_type = "seconds"'
        yield facts.fault("checkpoint.interval", allowed, 'write seconds, or interval_type = "steps"')
