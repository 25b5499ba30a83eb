"""A cache of past states beside a frozen model (arXiv:2407.02486)."""

from dataclasses import field
from typing import Literal

from pydantic.dataclasses import dataclass

from torchtitan.config.sections.kinds import STRICT, Positive


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
