"""What multi-token prediction asks of a job: data and expert parallel run it and no other axis does. No torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan.limits import LimitError


def multi_token_limits(depths: int, overrides: Mapping[str, Any], *, tp: int, cp: int, pp: int) -> Iterator[LimitError]:
    """Of a model with `depths` of them; `overrides` are the sizes that the job itself gives."""
    axes = {
        "tensor": (tp, "whose last norm and head are not split"),
        "context": (cp, "which needs tokens of other ranks"),
        "pipeline": (pp, "which needs the embedding in the last stage"),
    }
    for axis, (degree, why) in axes.items():
        if depths and degree > 1:
            allowed = f"1 with multi-token prediction (n_mtp_layers = {depths} in model.overrides), {why}"
            remedy = "write 1, or leave n_mtp_layers out"
            yield LimitError(f"parallelism.{axis}_parallel_degree", degree, allowed, remedy)
    weight = overrides.get("mtp_loss_weight")
    if weight is not None and not depths:
        allowed = "mtp_loss_weight with n_mtp_layers of at least 1, whose loss it weighs"
        remedy = "set n_mtp_layers too, or leave it out"
        yield LimitError("model.overrides", f"mtp_loss_weight = {weight}", allowed, remedy)
