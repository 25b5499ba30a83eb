"""The options of [adapter.neurocache]."""

from dataclasses import field
from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass

from torchtitan.config.sections.field_types import STRICT, Positive


@dataclass(config=STRICT, kw_only=True)
class NeurocacheOptions:
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
    TOLD: ClassVar[tuple[str, ...]] = ("resume_warmup", "score_block_bytes")
