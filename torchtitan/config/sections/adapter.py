"""Adapters, trained instead of the model's own parameters: LoRA, ReLoRA, and Neurocache (arXiv:2407.02486)."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtitan.config.sections.field_types import STRICT, NameIn, NonNegative, Place, Positive


@dataclass(config=STRICT, kw_only=True)
class Neurocache:
    cache_size: Positive = 16384
    """Entries kept in each storing layer, per row of the batch."""
    compression: Positive = 4
    """Ratio of the model's width to an entry's width. 1: entries are the hidden states themselves."""
    topk: Positive = 16
    """Entries that each token retrieves."""
    window: Positive = 2
    """Neighbouring entries read with each retrieved one, in the order of the document: 1 (only itself), or an even
    number, half of them up to the retrieved one and half after it."""
    context: Positive = 2
    """Tokens that share their retrieved entries: a token also attends to the entries of the context - 1 tokens before
    it."""
    similarity: Literal["l2", "dot"] = "l2"
    """Similarity of two keys: l2 distance, or dot product."""
    lookup: Literal["exact", "bucketed"] = "exact"
    """Search for the nearest entries. exact: over all entries. bucketed: the best of each of 512 buckets, then the best
    of these."""
    cache_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of stored entries."""
    ordering: Literal["fifo", "lru"] = "fifo"
    """Eviction from a full cache: the oldest entries (fifo), or the least recently retrieved ones (lru)."""
    scope: Literal["lane", "global"] = "lane"
    """Extent of a cache. lane: one for each row of a batch, emptied when a document begins. global: one for all rows of
    a rank, never emptied."""
    retrieval_map: dict[str, int] = field(default_factory=dict)
    """Layers before which tokens look up entries, mapped to the layers that stored these, e.g. {"18" = 18}. Empty: the
    layer at 3/4 of the depth, for both."""
    attention_layers: list[int] = field(default_factory=list)
    """Layers that attend to retrieved entries, from the nearest lookup at or below them. Empty: all layers from the
    first lookup on."""
    init: Literal["self_attention", "random", "pca"] = "self_attention"
    """Initial weights of the attention to the cache. self_attention: columns of the layer's own keys and values, as
    many as an entry is wide. random: random weights. pca: entries keep the principal directions of states on the
    training documents, with the layer's own keys and values projected to match."""
    compat_head_layout: bool = False
    """Read entries as the authors' program does, for adapters trained with it: keys and values are laid out by heads
    without a transpose, tokens of the context are joined afterwards, and positions without an entry are read as zeros.
    Not with tensor parallel."""
    resume_warmup: Literal["replay", "saved", "cold"] = "replay"
    """Caches after a resume. replay: read the last segments of all documents again. saved: load them from the
    checkpoint, which then holds them, and replay if the plan has changed. cold: start empty."""
    eval_cache_sizes: list[int] = field(default_factory=list)
    """Sizes of further caches to validate with, each reported as validation_loss_cache_N in metrics.jsonl. 0: without a
    cache."""
    track_hits: bool = False
    """Log how often a retrieved entry was followed by the token to predict, how full the caches are, and how much they
    contribute. Takes 8 bytes per entry in training."""
    cache_shard: Literal["none", "tp"] = "none"
    """Distribution of entries over tensor-parallel ranks. tp: each rank keeps a part, and results are merged. none:
    each rank keeps all."""
    score_block_bytes: Positive = 268435456
    """Memory in bytes for scores computed at a time."""
    beside: str = "none"
    """Adapter of the model's own linear layers that is trained with the cache, using the options of this section: lora,
    dora, or qlora and lora_int8 for a quantized base."""


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
class Adapter:
    """LoRA, DoRA, quantized bases, ReLoRA and Neurocache."""

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
    neurocache: Neurocache = field(default_factory=Neurocache)
