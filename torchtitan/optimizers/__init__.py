"""Optimizers by name. No torch here; `build.py` makes them. A new optimizer is one file and one entry here."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from torchtitan.config.options import Option
from torchtitan.optimizers.spec import SHARED, TORCHS, OptimizerSpec
from torchtitan.registration import Registry

Decay = Annotated[float, Field(ge=0, lt=1)]
_UNFUSED = {words: flags for words, flags in TORCHS.items() if words != "fused"}
"""Of an optimizer whose fused form takes no DTensor."""


def _nesterov(options: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    if options["nesterov"] and not options["momentum"]:
        yield "nesterov", "false without momentum", "give momentum too, e.g. 0.9"


_adam: dict[str, Any] = dict(shared=SHARED, implementations=TORCHS, state=lambda options: 2)
_own = {
    "Adam": OptimizerSpec(make="torchtitan.optimizers.torchs:adam", **_adam),
    "AdamW": OptimizerSpec(make="torchtitan.optimizers.torchs:adamw", **_adam),
    "Lion": OptimizerSpec(
        make="torchtitan.optimizers.lion:Lion",
        options={
            "beta1": Option(Decay, 0.9, "Weight of the running mean in the update."),
            "beta2": Option(Decay, 0.99, "Decay of the running mean."),
        },
        state=lambda options: 1,
    ),
    "SGD": OptimizerSpec(
        make="torch.optim:SGD",
        options={
            "momentum": Option(Decay, 0.0, "Decay of the running sum of gradients; 0 keeps none."),
            "nesterov": Option(bool, False, "Look ahead by one momentum step; needs momentum."),
        },
        implementations=_UNFUSED,
        state=lambda options: 1 if options["momentum"] else 0,
        excluded=_nesterov,
    ),
}
OPTIMIZERS: Registry[OptimizerSpec] = Registry("torchtitan.optimizers", _own, OptimizerSpec)
