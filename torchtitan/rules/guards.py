"""Rules on the guards: what they could not do, and what would do nothing."""

from collections.abc import Iterator

from torchtitan.config.options import Fault, options, show
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
