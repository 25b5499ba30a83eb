"""Optimizers by name. No torch here; `build.py` makes them. A new optimizer is one file and one entry here."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from torchtitan.config.options import Option
from torchtitan.optimizers import sizes
from torchtitan.optimizers.patterns import HIDDEN
from torchtitan.optimizers.spec import SHARED, TORCHS, OptimizerSpec
from torchtitan.registration import Registry

Decay = Annotated[float, Field(ge=0, lt=1)]
_UNFUSED = {words: flags for words, flags in TORCHS.items() if words != "fused"}
"""Of an optimizer whose fused form takes no DTensor."""


def _nesterov(options: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    if options["nesterov"] and not options["momentum"]:
        yield "nesterov", "false without momentum", "give momentum too, e.g. 0.9"


def _by_shape(options: Mapping[str, Any]) -> None:
    """What an optimizer keeps for each of a parameter's values, where that is said by `held`."""


TARGETS = Option(
    list[str], HIDDEN, "Which matrices, by their names; * stands for anything. All else steps as in AdamW."
)
_adam: dict[str, Any] = dict(shared=SHARED, implementations=TORCHS, state=lambda options: 2)
_own = {
    "Adafactor": OptimizerSpec(
        make="torchtitan.optimizers.adafactor:Adafactor",
        options={
            "beta1": Option(Decay, 0.0, "Decay of the running mean of changes; 0 keeps none."),
            "tiny": Option(Annotated[float, Field(gt=0)], 1e-30, "Added to squares of gradients."),
            "clip": Option(Annotated[float, Field(gt=0)], 1.0, "Longest a change may be, as a root of mean squares."),
        },
        state=_by_shape,
        held=sizes.adafactor,
        sums=True,
    ),
    "Adam": OptimizerSpec(make="torchtitan.optimizers.torchs:adam", **_adam),
    "AdamW": OptimizerSpec(make="torchtitan.optimizers.torchs:adamw", **_adam),
    "AdamW8bit": OptimizerSpec(
        make="torchtitan.optimizers.adamw_8bit:AdamW8bit",
        shared=SHARED,
        state=_by_shape,
        held=sizes.adam_8bit,
        sums=True,
    ),
    "AdamWBF16": OptimizerSpec(
        make="torchtitan.optimizers.adamw_bf16:AdamWBF16",
        shared=SHARED,
        options={
            "rounding": Option(
                Literal["kahan", "stochastic"], "kahan", "kahan keeps what rounding takes; stochastic rounds by chance."
            ),
        },
        named=True,
        only_in="bfloat16",
        state=lambda options: 3 if options["rounding"] == "kahan" else 2,
    ),
    "Lion": OptimizerSpec(
        make="torchtitan.optimizers.lion:Lion",
        options={
            "beta1": Option(Decay, 0.9, "Weight of the running mean in the update."),
            "beta2": Option(Decay, 0.99, "Decay of the running mean."),
        },
        state=lambda options: 1,
    ),
    "Muon": OptimizerSpec(
        make="torchtitan.optimizers.muon:Muon",
        shared=SHARED,
        options={
            "targets": TARGETS,
            "momentum": Option(Decay, 0.95, "Decay of the matrices' running mean."),
            "nesterov": Option(bool, True, "Mix the gradient into the mean once more."),
            "adjust": Option(
                Literal["rms", "original"], "rms", "rms: changes as long as AdamW's; original: the post's."
            ),
            "precision": Option(Literal["bfloat16", "float32"], "bfloat16", "What the products are computed in."),
        },
        named=True,
        state=_by_shape,
        held=sizes.muon,
        sums=True,
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
