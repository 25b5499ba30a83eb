"""The registry of optimizers. It does not import torch; `build.py` creates optimizers.

A new optimizer is one class and one entry here.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from torchtitan.config.options import Option
from torchtitan.core.registry import Registry
from torchtitan.optimizers import spec, step_sizes
from torchtitan.optimizers.spec import LAYER_MATRICES, SHARED, TORCHS, OptimizerSpec

Decay = Annotated[float, Field(ge=0, lt=1)]
_UNFUSED = {implementation: flags for implementation, flags in TORCHS.items() if implementation != "fused"}
"""Implementations of an optimizer without a fused form for DTensor."""


def _nesterov(options: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    if options["nesterov"] and not options["momentum"]:
        yield "nesterov", "false without momentum", "give momentum too, e.g. 0.9"


def _by_shape(options: Mapping[str, Any]) -> None:
    """Return None: the size of the state depends on shapes, and `state_size` computes it."""


def _one_sided(options: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    if options["residual"] == "fira" and options["side"] == "full":
        yield "residual", '"none" with side = "full"', "its factors are those of rows or of columns"
    if options["formula"] != "torch" and options["inner"] != "adamw":
        yield "formula", '"torch" with inner = "{}"'.format(options["inner"]), 'leave it out, or write inner = "adamw"'
    if options["inner"] != "adafactor":
        return
    if options["state_on_refresh"] == "rotate":
        yield "state_on_refresh", 'keep or reset with inner = "adafactor"', "sums of rows and columns cannot be turned"
    for key, unread in (("beta2", 0.95), ("eps", 1e-8)):
        if options[key] != unread:
            yield key, 'its default with inner = "adafactor", which does not read it', "leave it out"


Rank = Annotated[int, Field(ge=1)]
TARGETS = Option(
    list[str], LAYER_MATRICES, "Which matrices, by their names; * stands for anything. All else steps as in AdamW."
)
_adam: dict[str, Any] = dict(shared=SHARED, implementations=TORCHS, state=lambda options: 2)
_built_in = {
    "Adafactor": OptimizerSpec(
        make="torchtitan.optimizers.by_parameter:Adafactor",
        options={
            "beta1": Option(Decay, 0.0, "Decay of the running mean of changes; 0 keeps none."),
            "tiny": Option(Annotated[float, Field(gt=0)], 1e-30, "Added to squares of gradients."),
            "clip": Option(Annotated[float, Field(gt=0)], 1.0, "Longest a change may be, as a root of mean squares."),
        },
        state=_by_shape,
        state_size=spec.adafactor,
        step_size=step_sizes.adafactor,
        sums=True,
    ),
    "Adam": OptimizerSpec(make="torchtitan.optimizers.build:adam", step_size=step_sizes.adam, **_adam),
    "AdamW": OptimizerSpec(make="torchtitan.optimizers.build:adamw", step_size=step_sizes.adamw, **_adam),
    "AdamW8bit": OptimizerSpec(
        make="torchtitan.optimizers.by_parameter:AdamW8bit",
        shared=SHARED,
        state=_by_shape,
        state_size=spec.adam_8bit,
        step_size=step_sizes.in_pieces(7),
        sums=True,
    ),
    "AdamWBF16": OptimizerSpec(
        make="torchtitan.optimizers.by_parameter:AdamWBF16",
        shared=SHARED,
        options={
            "rounding": Option(
                Literal["kahan", "stochastic"], "kahan", "kahan keeps what rounding takes; stochastic rounds by chance."
            ),
        },
        needs_names=True,
        only_in="bfloat16",
        state=lambda options: 3 if options["rounding"] == "kahan" else 2,
        step_size=step_sizes.in_pieces(7),
    ),
    "APOLLO": OptimizerSpec(
        make="torchtitan.optimizers.galore:APOLLO",
        shared=SHARED,
        options={
            "rank": Option(Rank, 128, "Directions that moments are kept in."),
            "update_gap": Option(Rank, 200, "Steps with the same directions."),
            "scale": Option(Annotated[float, Field(ge=0)], 1.0, "Of a matrix's step."),
            "per": Option(Literal["channel", "tensor"], "channel", "What has a factor of its own."),
            "targets": TARGETS,
        },
        needs_names=True,
        state=_by_shape,
        state_size=spec.apollo,
        step_size=step_sizes.apollo,
        sums=True,
    ),
    "GaLore": OptimizerSpec(
        make="torchtitan.optimizers.galore:GaLore",
        shared=SHARED,
        options={
            "rank": Option(Rank, 128, "Directions that moments are kept in."),
            "update_gap": Option(Rank, 200, "Steps from one basis to the next."),
            "scale": Option(Annotated[float, Field(ge=0)], 0.25, "Of a matrix's step."),
            "side": Option(
                Literal["std", "reverse_std", "left", "right", "full"],
                "std",
                "What becomes short; std: the short side.",
            ),
            "targets": TARGETS,
            "inner": Option(Literal["adamw", "adamw_8bit", "adafactor"], "adamw", "The moments, of all parameters."),
            "formula": Option(
                Literal["torch", "galore_torch"],
                "torch",
                "AdamW's: torch.optim's, or with eps before the bias correction and weight decay last.",
            ),
            "basis": Option(Literal["gram", "svd", "rsvd", "power"], "gram", "How directions are found."),
            "state_on_refresh": Option(Literal["keep", "rotate", "reset"], "keep", "The moments, with a new basis."),
            "on_conflict": Option(
                Literal["gather", "flip", "error"], "gather", "Where the side is sharded: sum, take the other, refuse."
            ),
            "stagger": Option(bool, False, "Find the matrices' bases in different steps."),
            "adaptive_gap": Option(bool, False, "Twice as long where directions stay."),
            "residual": Option(Literal["none", "fira"], "none", "fira: follow the rest of the gradient too."),
        },
        needs_names=True,
        state=_by_shape,
        state_size=spec.galore,
        step_size=step_sizes.galore,
        measures=("basis_energy", "basis_overlap"),
        sums=True,
        excluded=_one_sided,
    ),
    "Lion": OptimizerSpec(
        make="torchtitan.optimizers.lion:Lion",
        options={
            "beta1": Option(Decay, 0.9, "Weight of the running mean in the update."),
            "beta2": Option(Decay, 0.99, "Decay of the running mean."),
        },
        state=lambda options: 1,
        step_size=step_sizes.in_pieces(1),
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
        needs_names=True,
        state=_by_shape,
        state_size=spec.muon,
        step_size=step_sizes.muon,
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
        step_size=step_sizes.sgd,
        excluded=_nesterov,
    ),
}
OPTIMIZERS: Registry[OptimizerSpec] = Registry("torchtitan.optimizers", _built_in, OptimizerSpec)
