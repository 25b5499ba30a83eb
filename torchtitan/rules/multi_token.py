"""Rules on multi-token prediction, which data and expert parallel run and no other axis does, and on its weight."""

from collections.abc import Iterator

from torchtitan.options import Fault
from torchtitan.rules.facts import Facts


def depths_are_whole(facts: Facts) -> Iterator[Fault]:
    depths = getattr(facts.args, "n_mtp_layers", 0)
    if not depths:
        return
    axes = {
        "tensor": (facts.tp, "whose last norm and head are not split"),
        "context": (facts.cp, "which needs tokens of other ranks"),
        "pipeline": (facts.pp, "which needs the embedding in the last stage"),
    }
    for axis, (degree, why) in axes.items():
        if degree > 1:
            allowed = f"1 with multi-token prediction (n_mtp_layers = {depths} in model.overrides), {why}"
            yield facts.fault(f"parallelism.{axis}_parallel_degree", allowed, "write 1, or leave n_mtp_layers out")


def weight_is_of_a_loss(facts: Facts) -> Iterator[Fault]:
    weight = facts.config.model.overrides.get("mtp_loss_weight")
    if weight is not None and getattr(facts.args, "n_mtp_layers", None) == 0:
        allowed = "mtp_loss_weight with n_mtp_layers of at least 1, whose loss it weighs"
        remedy = "set n_mtp_layers too, or leave it out"
        yield facts.fault("model.overrides", allowed, remedy, f"mtp_loss_weight = {weight}")
