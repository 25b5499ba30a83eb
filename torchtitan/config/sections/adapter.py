"""A cache of past states beside a frozen model (arXiv:2407.02486).

What is trained instead of the model's own parameters.
"""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtitan.config.sections.field_types import STRICT, NameIn, NonNegative, Place, Positive


@dataclass(config=STRICT, kw_only=True)
class Neurocache:
    cache_size: Positive = 16384
    """Entries that are kept of a lane's document, in each storing layer."""
    compression: Positive = 4
    """How many times narrower than the model an entry is. 1: the states themselves are kept."""
    topk: Positive = 16
    """Entries that a token looks up."""
    window: Positive = 2
    """With each of them so many are read, those beside it in the document: 1, or an even number, half of them and the
    one that was found up to there."""
    context: Positive = 2
    """A token reads what it and the context - 1 tokens before it found."""
    similarity: Literal["l2", "dot"] = "l2"
    """What is near: by the distance of two keys, or by their product."""
    lookup: Literal["exact", "bucketed"] = "exact"
    """exact: the best entries; bucketed: the best of each of 512 buckets first, and of these the best."""
    cache_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """In which entries are kept."""
    ordering: Literal["fifo", "lru"] = "fifo"
    """What goes when a cache is full: the oldest entries, or those that were found the longest ago."""
    scope: Literal["lane", "global"] = "lane"
    """lane: each row of a batch has a cache, which a document's beginning empties; global: one for all rows of a rank,
    never emptied."""
    retrieval_map: dict[str, int] = field(default_factory=dict)
    """Layers before which tokens look up -> the layer whose entries they find, e.g. {"18" = 18}. Empty: the one three
    quarters up, for both."""
    attention_layers: list[int] = field(default_factory=list)
    """Layers that read what was found at the nearest reader at or below them. Empty: from the first reader on, all."""
    init: Literal["self_attention", "random", "pca"] = "self_attention"
    """What the attention to the cache begins as: the layer's own, of keys and values as many columns as an entry is
    wide; or at random. pca: an entry keeps the directions of which states of the training documents have most, and the
    layer's own keys and values are those of what it keeps."""
    compat_head_layout: bool = False
    """Read what was found as the authors' program does, for adapters that were trained with it: the keys and values of
    a token's entries are laid out by heads without a transpose, the tokens of the context are joined after that, and a
    place without an entry is read as zeros. Not with tensor parallel."""
    resume_warmup: Literal["replay", "saved", "cold"] = "replay"
    """What a resume does about the caches: read the last segments of all documents again; find them in the checkpoint
    (saved), which holds them then, and under another plan read again; or begin with empty ones."""
    eval_cache_sizes: list[int] = field(default_factory=list)
    """Validation is also done with caches of so many entries, each as validation_loss_cache_N in metrics.jsonl; 0:
    without."""
    track_hits: bool = False
    """Count how often what was found was followed by what was to be told, and log it with how full caches are and how
    much they add. Takes 8 bytes for each entry in training."""
    cache_shard: Literal["none", "tp"] = "none"
    """tp: each rank of tensor parallel keeps a part of the entries, and what is found is brought together; none: each
    rank keeps them all."""
    score_block_bytes: Positive = 268435456
    """Scores in memory at a time."""
    beside: str = "none"
    """A kind of adapter for the model's own linears that is trained too, with its options of this section: lora, dora,
    or, beside a base in few bits, qlora, lora_int8."""


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
    """LoRA, DoRA, quantized bases, ReLoRA and Neurocache."""

    kind: Annotated[str, NameIn("torchtitan.adapters:ADAPTERS", ("none",))] = "none"
    """What is trained instead of the model's own parameters. none: the model itself."""
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
