"""What is trained instead of the model's own parameters."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtitan.config.sections.kinds import STRICT, NonNegative, Place, Positive
from torchtitan.config.sections.neurocache import Neurocache


@dataclass(config=STRICT, kw_only=True)
class Relora:
    every: Annotated[int, Field(ge=2)] | None = None
    """Add what A and B have learned to the frozen matrices and begin them anew every this many steps (ReLoRA). Unset:
    never."""
    reset_every: Annotated[int, Field(ge=2)] | None = None
    """Steps between resets of A's and B's optimizer state. Unset: every."""
    reset: Literal["zero", "magnitude", "random", "none"] = "zero"
    """What of that state goes: all, the smaller ones, some at random, nothing."""
    prune_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Share that goes with magnitude and random."""
    mask: Literal["joint", "independent"] = "joint"
    """Whether both moments keep the same entries. independent is for comparison: it diverges."""
    warmup_steps: NonNegative = 0
    """With a decay that has no restarts of its own: steps in which the rate comes back behind each restart, from a
    thousandth, as in Axolotl."""
    anneal_steps: Positive = 1
    """With warmup_steps: steps in which the rate goes down ahead of each restart. 1: none."""
    reset_step: bool = False
    """Also count the optimizer's steps from 0 again, for A and B."""

    @property
    def reset_period(self) -> int | None:
        return self.reset_every or self.every


@dataclass(config=STRICT, kw_only=True)
class Adapter:
    kind: str = "none"
    """What is trained instead of the model's own parameters: a key of torchtitan.adapters.ADAPTERS. none: the model
    itself."""
    rank: Positive = 128
    """Of the low-rank matrices A and B."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """What A and B add is multiplied with alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of what A reads that is set to 0 in training, of linears in the layers."""
    rslora: bool = False
    """Multiply with alpha / sqrt(rank) instead, which keeps higher ranks learning."""
    train_scaling: bool = False
    """Multiply with tanh of a number that each linear learns, 1 in the beginning, instead of alpha / rank."""
    lora_only: bool = False
    """Leave the targets' own matrices out, so that they compute with A and B alone: a model that is trained from
    scratch with matrices of low rank."""
    target: list[str] = field(default_factory=lambda: ["*attn*", "*attention*", "*mlp*", "*feed_forward*"])
    """Which linears (and stacks of experts) get low-rank matrices, by their names; * stands for anything in one. The
    word "all-linear" stands for all of the layers' own."""
    lr_ratio_b: Annotated[float, Field(gt=0)] = 1.0
    """Learning rate of B over that of A (LoRA+, arXiv:2402.12354, which finds about 16 good)."""
    initial_path: Place | None = None
    """A folder in peft's layout that the adapter begins from, beside checkpoint.initial_load_path for the model."""
    save: Literal["whole", "alone"] | None = None
    """What checkpoints hold: the whole model, or the adapter, what else is trained and the optimizer's state, with a
    reference to the model in checkpoint.initial_load_path and its digest. Unset: alone where that path is itself the
    folder or file of weights, whole otherwise; a run that has checkpoints keeps their form."""
    last_save_in_peft: bool = False
    """After the last step, also write the adapter in peft's layout, into adapter/."""
    layers: list[NonNegative] = field(default_factory=list)
    """Only in the layers of these numbers. Empty: in all."""
    train_dense_rest: bool = False
    """Train everything that is not a target too (embeddings, head, norms, biases), as when a model is trained from
    scratch."""
    train_fully: list[str] = field(default_factory=list)
    """Parameters of the model that are trained beside the adapter's, by their names; * stands for anything in one, e.g.
    ["*norm*", "output.weight"]."""
    relora: Relora = field(default_factory=Relora)
    neurocache: Neurocache = field(default_factory=Neurocache)
