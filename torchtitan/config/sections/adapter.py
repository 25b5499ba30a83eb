"""Adapters, trained instead of the model's own parameters: LoRA and ReLoRA, and the sections of plugins."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtitan.config.sections.field_types import (
    STRICT,
    NameIn,
    NonNegative,
    Place,
    Positive,
    with_plugin_sections,
)


@dataclass(config=STRICT, kw_only=True)
class Relora:
    every: Annotated[int, Field(ge=2)] | None = None
    """Steps between restarts, which merge A and B into the frozen matrices and initialize them again (ReLoRA). Unset:
    never."""
    reset_every: Annotated[int, Field(ge=2)] | None = None
    """Steps between resets of A's and B's optimizer state. Unset: every."""
    reset: Literal["zero", "magnitude", "random", "none"] = "zero"
    """Part of the optimizer state that a reset clears: all (zero), the smallest entries (magnitude), random entries, or
    nothing."""
    prune_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Fraction of the optimizer state pruned by reset = "magnitude" or "random"."""
    mask: Literal["joint", "independent"] = "joint"
    """Entries pruned from the two moments: the same in both (joint), or chosen for each. independent is for comparison:
    it diverges."""
    warmup_steps: NonNegative = 0
    """Steps of warmup after each restart, from a thousandth of the rate as in Axolotl, for decays without built-in
    restarts."""
    anneal_steps: Positive = 1
    """Steps over which the rate falls before each restart, with warmup_steps. 1: none."""
    reset_step: bool = False
    """Restart the optimizer's step count of A and B too."""

    @property
    def reset_period(self) -> int | None:
        return self.reset_every or self.every


@dataclass(config=STRICT, kw_only=True)
@with_plugin_sections("adapter")
class Adapter:
    """LoRA, DoRA, quantized bases, ReLoRA, and adapters of plugins."""

    kind: Annotated[str, NameIn("torchtitan.adapters:ADAPTERS", ("none",))] = "none"
    """Adapter to train instead of the model's own parameters. none: train the model itself."""
    rank: Positive = 128
    """Rank of the low-rank matrices A and B."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale of B A: their product is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout rate of the input of A, in linear layers of the blocks."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead, which stabilizes training at high ranks (rsLoRA)."""
    train_scaling: bool = False
    """Multiply by tanh of a learned number per linear layer, initially 1, instead of alpha / rank."""
    lora_only: bool = False
    """Drop the original matrices of the targets and compute with A and B alone, to train a low-rank model from
    scratch."""
    target: list[str] = field(default_factory=lambda: ["*attn*", "*attention*", "*mlp*", "*feed_forward*"])
    """Names of the linear layers and stacks of experts that get low-rank matrices; * matches anything. "all-linear":
    all linear layers of the blocks."""
    lr_ratio_b: Annotated[float, Field(gt=0)] = 1.0
    """Ratio of the learning rates of B and A (LoRA+, arXiv:2402.12354, which recommends about 16)."""
    initial_path: Place | None = None
    """Folder in peft's format from which the adapter starts; the model itself is checkpoint.initial_load_path."""
    save: Literal["whole", "alone"] | None = None
    """Content of checkpoints. whole: the whole model. alone: trained parameters and optimizer state, with a reference
    to the model in checkpoint.initial_load_path and its digest. Unset: alone if that path is itself a folder or file of
    weights, else whole; a resumed run keeps its form."""
    last_save_in_peft: bool = False
    """Also write the adapter in peft's format after the last step, into adapter/."""
    layers: list[NonNegative] = field(default_factory=list)
    """Numbers of the layers that are adapted. Empty: all."""
    train_dense_rest: bool = False
    """Also train all parameters that are not targets (embeddings, head, norms, biases), as in training from scratch."""
    train_fully: list[str] = field(default_factory=list)
    """Names of model parameters trained together with the adapter; * matches anything, e.g. ["*norm*",
    "output.weight"]."""
    relora: Relora = field(default_factory=Relora)
