"""Sizes of a cache: which layers store, look up and read, the width of entries, and their bytes.

It does not import torch, so `torchtitan check` uses it too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchtitan.adapters.targets import Misfit
from torchtitan.plugins.neurocache.options import NeurocacheOptions as Options

BUCKETS = 512
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
KEY = "adapter.neurocache."


@dataclass(frozen=True)
class CacheLayers:
    """The layers that use a cache.

    `readers`: layers before which tokens look up -> layer that stored the entries. `attending`: layers that read the
    entries retrieved at the nearest reader at or below them.
    """

    readers: dict[int, int]
    attending: list[int]

    @property
    def storing(self) -> list[int]:
        return sorted(set(self.readers.values()))

    @property
    def first(self) -> int:
        return min((*self.readers, *self.storing))

    @property
    def last(self) -> int:
        return max(*self.attending, *self.readers, *self.storing)


def layers_of(options: Options, n_layers: int) -> CacheLayers:
    """Return the cache layers of a model with `n_layers`; the default reader is the layer at 3/4 of the depth."""
    readers = {int(reader): storing for reader, storing in options.retrieval_map.items()}
    readers = readers or {3 * n_layers // 4: 3 * n_layers // 4}
    return CacheLayers(readers, options.attention_layers or list(range(min(readers), n_layers)))


def widths(options: Options, dim: int, training: bool) -> dict[str, int]:
    """Return the widths of the tensors stored per token: its key, and in training also the state before compression."""
    key_width = {"key": dim // options.compression}
    return key_width | ({"state": dim} if training and options.compression > 1 else {})


def cache_bytes(options: Options, dim: int, n_layers: int, lanes: int, training: bool, tp: int = 1) -> int:
    """Return the bytes of a cache on one rank, out of `tp` of tensor parallel."""
    entry = sum(widths(options, dim, training).values()) * BYTES[options.cache_dtype]
    entry += 4 * (options.ordering == "lru") + 8 * (options.track_hits and training)
    lanes = 1 if options.scope == "global" else lanes
    entries = options.cache_size // (tp if options.cache_shard == "tp" else 1)
    return lanes * len(layers_of(options, n_layers).storing) * entries * entry


def added_parameters(
    options: Options, n_layers: int, dim: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[int, int]:
    """Return the number of parameters of all cache attentions, and of the compression with its norm."""
    width = dim // options.compression
    per_layer = 2 * dim * heads * head_dim + 2 * width * kv_heads * head_dim
    compression = (dim + 2) * width if options.compression > 1 else 0
    return len(layers_of(options, n_layers).attending) * per_layer, compression


def cache_flops(options: Options, n_layers: int, dim: int, heads: int, head_dim: int, seq_len: int) -> int:
    """Return the floating-point operations per training token with a full cache, as defined in models/flops.py.

    The cache attention counts as trained weights. The compression of new states, which gets no gradient, and the lookup
    count in forward only. States that are compressed again also count the gradient of the weights.
    """
    layers, width, entries = layers_of(options, n_layers), dim // options.compression, options.topk * options.window
    compresses, compressed = options.compression > 1, dim * width
    matrices = 2 * heads * head_dim * (dim + width)
    attention = 2 * heads * options.context * entries * width
    total = len(layers.attending) * (6 * matrices + (6 if compresses else 4) * attention)
    total += len(layers.readers) * 2 * options.cache_size * width
    if compresses:
        recompressed = min(options.cache_size // seq_len, entries)
        total += 2 * compressed * len({*layers.storing, *layers.readers}) + 4 * compressed * recompressed * len(
            layers.readers
        )
    return total


def cache_misfits(options: Options, n_layers: int, dim: int, seq_len: int | None = None) -> Iterator[Misfit]:
    """Yield the options that do not fit a model with `n_layers` of width `dim`, and segments of `seq_len` tokens."""
    if invalid := [reader for reader in options.retrieval_map if not reader.isdecimal()]:
        yield Misfit(KEY + "retrieval_map", "numbers of layers in its keys", f'"{invalid[0]}" is none')
        return
    layers = layers_of(options, n_layers)
    layer_options = {"retrieval_map": [*layers.readers, *layers.storing], "attention_layers": layers.attending}
    if beyond := {
        name: out_of_range for name, numbers in layer_options.items() if (out_of_range := _beyond(numbers, n_layers))
    }:
        for name, out_of_range in beyond.items():
            yield Misfit(KEY + name, f"layers from 0 to {n_layers - 1}", f"drop {out_of_range}")
        return
    if min(layers.attending) < min(layers.readers):
        allowed = f"layers from {min(layers.readers)} on, before which tokens look up first"
        yield Misfit(KEY + "attention_layers", allowed, f"{min(layers.attending)} would have nothing to read")
    if len(set(layers.attending)) < len(layers.attending):
        yield Misfit(KEY + "attention_layers", "each layer once", "drop the repeated layers")
    if options.window != 1 and options.window % 2:
        yield Misfit(KEY + "window", "1, or an even number", f"write {options.window - 1} or {options.window + 1}")
    if options.init == "pca" and options.compression == 1:
        yield Misfit(
            KEY + "compression", 'more than 1 with init = "pca"', "write another init, all directions are kept"
        )
    if dim % options.compression:
        yield Misfit(KEY + "compression", f"a divisor of the width {dim} of the model", "")
    minimum = max(seq_len or 1, options.topk, options.window + 1)
    if options.cache_size < minimum:
        reason = "a segment's tokens" if minimum == seq_len else "topk" if minimum == options.topk else "window + 1"
        yield Misfit(KEY + "cache_size", f"at least {minimum}, {reason}", "raise it")
    if options.lookup == "bucketed":
        if options.cache_size % BUCKETS:
            multiple = options.cache_size // BUCKETS * BUCKETS
            yield Misfit(
                KEY + "cache_size",
                f'a multiple of {BUCKETS} with lookup = "bucketed"',
                f"write {multiple} or {multiple + BUCKETS}",
            )
        if options.topk > BUCKETS:
            yield Misfit(KEY + "topk", f'at most {BUCKETS} with lookup = "bucketed"', "a bucket gives one entry")
    if options.cache_shard == "tp":
        if options.ordering == "lru":
            remedy = "the entries to evict depend on the entries of all ranks"
            yield Misfit(KEY + "ordering", '"fifo" with cache_shard = "tp"', remedy)
        if options.lookup == "bucketed":
            yield Misfit(KEY + "lookup", '"exact" with cache_shard = "tp"', "buckets would be over several ranks")
    if options.scope == "global" and options.ordering == "lru":
        yield Misfit(KEY + "ordering", '"fifo" with scope = "global"', "write one of the two otherwise")


def split_layers_message(layers: CacheLayers) -> str:
    """Return the error message for a pipeline that splits these layers."""
    return (
        f"layers {layers.first} to {layers.last}, which store, look up and read, have to be in one stage of the "
        f"pipeline; cut it elsewhere (parallelism.module_fqns_per_model_part), or choose others of them"
    )


def _beyond(numbers: Sequence[int], n_layers: int) -> str:
    return ", ".join(str(number) for number in sorted(set(numbers)) if not 0 <= number < n_layers)
