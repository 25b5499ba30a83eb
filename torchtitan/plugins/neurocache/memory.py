"""The memory module of a model: it looks up cache entries before the reading layers and collects states to store.

All of this runs between the blocks. There, a block's recompute does not repeat the lookup with a changed cache, the
compiler does not trace it, and blocks get the retrieved entries in the same way as their rotary angles. Nothing is
stored until `commit`, after the microbatch's backward. So a token never retrieves entries of its segment,
whichever layer stores them, and retrieved states are read in place.

Shapes: B lanes, S tokens, D width of the model, C = D / compression, M entries, N entries retrieved by a token.

Generation has a growing cache: earlier segments are looked up in the cache, and the current segment has a key-value
cache. When it is full, it is stored and the next one begins.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.core.random_draws import Constant, Init, Normal
from torchtitan.models.attention import SharedInputs
from torchtitan.models.decoder import Decoder
from torchtitan.models.kv_cache import CachedDecoder
from torchtitan.parallelisms.context_parallel import ContextParallelAttention, GatherSequence
from torchtitan.plugins.neurocache.attention import Retrieved, shift_tokens
from torchtitan.plugins.neurocache.cache import (
    CacheSegment,
    CacheShard,
    CacheStore,
    EntryAges,
    HitStatistics,
    compare_pairs,
    entry_places,
    nearest,
    pairs,
    with_neighbours,
)
from torchtitan.plugins.neurocache.options import NeurocacheOptions as Options
from torchtitan.plugins.neurocache.sizes import BUCKETS, CacheLayers, widths


class SegmentReader(CachedDecoder):
    """Calls a decoder that has a memory with growing sequences, in segments of `seq_len` tokens."""

    def __init__(self, model: Decoder, seq_len: int):
        assert model.memory is not None
        super().__init__(model)
        self.memory, self.seq_len = model.memory, seq_len
        self.memory.decodes = True

    def clear(self) -> None:
        self.memory.clear()
        self._begin()

    def read(self, ids: torch.Tensor, num_cached: int) -> torch.Tensor:
        while num_cached < ids.shape[1]:
            offset = num_cached % self.seq_len
            piece = ids[:, num_cached : num_cached - offset + self.seq_len]
            positions = torch.arange(offset, offset + piece.shape[1], device=ids.device)[None]
            logits = self.model(piece, positions=positions)
            num_cached += piece.shape[1]
            if num_cached % self.seq_len == 0:
                self.memory.commit()
                self._begin()
        return logits

    def _begin(self) -> None:
        self.memory.tail = {}
        super().clear()


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NORM_EPS = 1e-5
UNLIMITED = 2**31
"""Context length in tokens of a model with a cache: unlimited."""


@dataclass
class Microbatch:
    """A microbatch from the start of its forward until its states are stored."""

    store: CacheStore
    lanes: slice
    counts: torch.Tensor  # [B], entries stored before this segment
    filled: torch.Tensor | None  # [B], number of tokens that are no padding; None: all
    states: dict[tuple[int, str], torch.Tensor]
    used: dict[int, EntryAges]
    pairs: torch.Tensor | None  # int32 [B, S, 2], tokens and labels, if hits are counted


class Compression(nn.Linear):
    """The compression W_c, initialized from a normal distribution with deviation 1 / sqrt(D)."""

    def parameter_init(self, name: str) -> Init:
        return Normal(self.in_features**-0.5)


class KeyNorm(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x [..., C] in its own dtype."""
        return F.layer_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)

    def parameter_init(self, name: str) -> Init:
        return Constant(1.0 if name == "weight" else 0.0)


class CacheMemory(nn.Module):
    """A models.decoder.DecoderMemory with caches of earlier states.

    One compression and norm serve all storing layers. With a compression of 1 there is neither, and keys are the
    states.
    """

    context = UNLIMITED
    border: Any = None  # under tensor parallel, between this rank's tokens and all of them

    def __init__(self, options: Options, layers: CacheLayers, dim: int, reads_stream: bool):
        super().__init__()
        self.options, self.layers, self.dim, self.reads_stream = options, layers, dim, reads_stream
        self.h_proj = self.h_norm = None
        if options.compression > 1:
            width = dim // options.compression
            self.h_proj, self.h_norm = Compression(dim, width, bias=False), KeyNorm(width, NORM_EPS)
        self.cache_size = {True: options.cache_size, False: options.cache_size}  # by `training`
        self.stores: dict[tuple[bool, int], CacheStore] = {}  # by `training` and the first lane
        self.pending: list[Microbatch] = []
        self.hits = HitStatistics() if options.track_hits else None
        self.moments: torch.Tensor | None = None  # float64 [D, D], second moments of states, while collected
        self.decodes = False  # True if a batch continues a segment; `tail` has its last entries
        self.tail: dict[int, EntryAges] = {}
        self.clocks: dict[tuple[bool, int], torch.Tensor] = {}
        self.rows_share_state = options.scope == "global"

    def train(self, mode: bool = True) -> "CacheMemory":
        """Set the mode. A switch to training drops the evaluation caches but not the training caches."""
        if mode:
            self.clear_evaluation()
        return super().train(mode)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the training caches, by names for a checkpoint."""
        groups = {group: store for (training, group), store in self.stores.items() if training}
        return {
            f"{group}.{name}": tensor for group, store in groups.items() for name, tensor in store.tensors().items()
        }

    def tensors_to_restore(
        self, shapes: Mapping[str, list[int]], rows: int, device: torch.device
    ) -> dict[str, torch.Tensor] | None:
        """Return tensors on the device, to be filled from a checkpoint of `state_tensors` with these shapes.

        Returns None if `rows` rows need other shapes.
        """
        lanes = {int(name.split(".")[0]): shape[0] for name, shape in shapes.items() if name.endswith(".counts")}
        stores = {(True, group): self._empty(count, device) for group, count in lanes.items()}
        previous, self.stores = self.stores, stores
        tensors = self.state_tensors()
        if {name: list(tensor.shape) for name, tensor in tensors.items()} != shapes or sum(lanes.values()) != rows:
            self.stores = previous
            return None
        self.clocks = {key: tensors[f"{key[1]}.clock"] for key in stores}
        return tensors

    def finish_restore(self) -> None:
        """Resume from the tensors of `tensors_to_restore`, which have been filled."""
        for key, clock in self.clocks.items():
            self.stores[key].set_clock(clock)
        self.pending = []

    def clear_evaluation(self) -> None:
        self.stores = {key: store for key, store in self.stores.items() if key[0]}

    def clear(self) -> None:
        self.stores, self.pending, self.tail = {}, [], {}

    def reader(self, model: Decoder, seq_len: int) -> CachedDecoder:
        return SegmentReader(model, seq_len)

    def end_reading(self) -> None:
        self.decodes = False
        self.clear()

    # A microbatch

    def begin(
        self, tokens: torch.Tensor, lane_tensors: Mapping[str, torch.Tensor], labels: torch.Tensor | None
    ) -> None:
        """Begin a microbatch of tokens [B, S] (hidden states in later pipeline stages) with its labels, if any.

        `lane_tensors`: the batch's tensors per lane (MEMORY_INPUTS of models/decoder.py).
        """
        size, device = len(tokens), tokens.device
        key = self.training, int(lane_tensors["lanes"][0]) if "lanes" in lane_tensors else 0
        if key not in self.stores:
            self.stores[key] = self._empty(size, device)
        store = self.stores[key]
        assert size <= store.lanes or self.options.scope == "global", "batches of one group of lanes are alike"
        lanes = slice(0, min(size, store.lanes))
        counts = store.counts[lanes].expand(size)
        if "begins" in lane_tensors and self.options.scope == "lane":
            counts = counts.masked_fill(lane_tensors["begins"].bool(), 0)
        if not self.decodes:  # an uncommitted microbatch of these lanes was abandoned
            self.pending = [other for other in self.pending if other.store is not store]
        token_pairs = None
        if self.counts_hits and labels is not None and tokens.dim() == 2:
            token_pairs = pairs(tokens, labels)
            self.hits.note_filled(counts, store.size)
        self.pending.append(Microbatch(store, lanes, counts, lane_tensors.get("filled"), {}, {}, token_pairs))

    @property
    def counts_hits(self) -> bool:
        return self.training and self.hits is not None

    def _empty(self, lanes: int, device: torch.device) -> CacheStore:
        options = self.options
        return CacheStore(
            1 if options.scope == "global" else lanes,
            self.cache_size[self.training],
            self.layers.storing,
            widths(options, self.dim, self.training),
            DTYPES[options.cache_dtype],
            device,
            options.ordering,
            self.counts_hits,
            CacheShard(self.border if options.cache_shard == "tp" else None),
        )

    @torch.compiler.disable
    def before_block(
        self, layer: int, block: nn.Module, x: torch.Tensor, shared: SharedInputs, kernel: nn.Module
    ) -> SharedInputs:
        """Run before a block gets its input x [B, S, D], or a rank's shard of it.

        Collects the states that the layer stores, and returns `shared` with the entries that its tokens retrieve.
        """
        stores = layer in self.layers.storing
        if self.moments is not None:
            self._add_moments(block, x, kernel) if stores else None
            return shared
        if not self.cache_size[self.training] or not (stores or layer in self.layers.readers):
            return shared
        microbatch = self.pending[-1]
        with torch.no_grad():
            states = self._states(block, x)
            keys = self.encode(states)
            if stores:
                tensors = {"key": keys, "state": states}
                stored_widths = widths(self.options, self.dim, self.training)
                if microbatch.pairs is not None:
                    tensors["pairs"], stored_widths["pairs"] = microbatch.pairs, 2
                microbatch.states |= {(layer, name): _gather_sequence(kernel, tensors[name]) for name in stored_widths}
        if layer not in self.layers.readers:
            return shared
        return shared._replace(retrieved=self._retrieve(microbatch, layer, keys, kernel))

    def _states(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the input of the block's attention, under tensor parallel gathered over all tokens."""
        if not self.reads_stream:
            if hasattr(block, "unshard"):  # FSDP: the weights that it gathers serve the block, too
                block.unshard()
            x = block.attention_norm(x)
        return x if self.border is None else self.border.enter(x)

    @torch.no_grad()
    def _add_moments(self, block: nn.Module, x: torch.Tensor, kernel: nn.Module) -> None:
        states, filled = _gather_sequence(kernel, self._states(block, x)), self.pending[-1].filled
        if filled is not None:
            states = states[torch.arange(states.shape[1], device=states.device) < filled[:, None]]
        states = states.flatten(0, -2).double()
        self.moments = self.moments.to(states.device) + states.t() @ states  # weights may be offloaded

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        """Compress states [..., D] to keys [..., C]."""
        return states if self.h_proj is None else self.h_norm(self.h_proj(states))

    def _retrieve(self, microbatch: Microbatch, reader: int, queries: torch.Tensor, kernel: nn.Module) -> Retrieved:
        """Look up queries [B, S, C] before the layer `reader` and return the entries that they retrieve."""
        options, store, layer = self.options, microbatch.store, self.layers.readers[reader]
        bucketed = options.lookup == "bucketed"
        size = max(store.reach, 1)  # further places are empty
        step = BUCKETS if bucketed else store.share.ranks
        size = -(-size // step) * step
        local_size = size // store.share.ranks  # by this rank
        keys = store.entries[layer, "key"][microbatch.lanes, :local_size]
        with torch.no_grad():
            hits = nearest(
                queries,
                keys,
                microbatch.counts,
                options.topk,
                similarity=options.similarity,
                bucketed=bucketed,
                block_bytes=options.score_block_bytes,
                share=store.share,
            )
            if microbatch.pairs is not None:
                places = entry_places(hits, size, microbatch.counts)
                local_places = gather_places(
                    store.entries[layer, "pairs"][microbatch.lanes, :local_size], places // store.share.ranks
                )
                self.hits.note(
                    reader, compare_pairs(microbatch.pairs, store.share.combine(local_places, places), hits.exists)
                )
            entries = with_neighbours(hits, options.window, size, microbatch.counts)
            if options.ordering == "lru":
                full_entries = _gather_entries(kernel, entries)
                earlier = microbatch.used.get(layer)
                microbatch.used[layer] = full_entries if earlier is None else _concatenate(earlier, full_entries)
            entries, joined = self._with_earlier(layer, entries, kernel)
            places = entry_places(entries, size, microbatch.counts)
        local_places = places // store.share.ranks
        if self.training and self.h_proj is not None:
            rows = self._compress_again(
                store.entries[layer, "state"][microbatch.lanes, :local_size], local_places, queries.dtype
            )
        else:
            rows = gather_places(keys, local_places).to(queries.dtype)
        rows = store.share.combine(rows, places)
        if options.compat_head_layout:
            rows = rows.where(entries.exists[..., None], self._empty_row(rows))
        return Retrieved(rows, entries.exists, joined)

    def _empty_row(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the row, [C] or [], that the authors' program reads for a missing entry.

        In training it compresses zeros.
        """
        if self.training and self.h_norm is not None:
            return self.h_norm(rows.new_zeros(rows.shape[-1]))
        return rows.new_zeros(())

    def _with_earlier(self, layer: int, entries: EntryAges, kernel: nn.Module) -> tuple[EntryAges, bool]:
        """Add the entries of preceding tokens if these tokens are only part of a segment; and if so, return True."""
        context, is_sharded = self.options.context, isinstance(kernel, ContextParallelAttention)
        if context == 1 or not (is_sharded or self.decodes):
            return entries, False
        full_entries = _gather_entries(kernel, entries)
        if layer in self.tail:
            full_entries = EntryAges(
                *(torch.cat(pair, dim=1) for pair in zip(self.tail[layer], full_entries, strict=True))
            )
        if self.decodes:
            self.tail[layer] = EntryAges(*(tensor[:, -(context - 1) :] for tensor in full_entries))
        repeat = self.options.compat_head_layout
        with_earlier = [
            torch.cat([shift_tokens(tensor, offset, repeat) for offset in range(context)], dim=-1)
            for tensor in full_entries
        ]
        if is_sharded:
            return EntryAges(*(kernel.layout.shard(tensor, kernel.rank) for tensor in with_earlier)), True
        return EntryAges(*(tensor[:, -entries.ages.shape[1] :] for tensor in with_earlier)), True

    def _compress_again(self, states: torch.Tensor, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Gather states [B or 1, M, D] at places [B, S, N] and compress them with the current weights: [B, S, N, C].

        All states are compressed before the gather if that is less work.
        """
        if states.shape[1] <= places[0].numel():
            return gather_places(self.encode(states.to(dtype)), places)
        return self.encode(gather_places(states, places).to(dtype))

    @torch.no_grad()
    def commit(self) -> None:
        """Store the states of the pending microbatches, which do not read the old cache any more."""
        for microbatch in [_join_pieces(self.pending)] if self.decodes and self.pending else self.pending:
            if not microbatch.states:  # a pipeline stage without storing layers, or no cache
                continue
            length = next(iter(microbatch.states.values())).shape[1]
            filled = microbatch.filled
            if filled is None:
                filled = torch.full_like(microbatch.counts, length)
            if self.options.scope == "lane":
                arguments = (microbatch.lanes, microbatch.counts, filled, microbatch.states, microbatch.used)
                microbatch.store.commit(CacheSegment(*arguments))
                continue
            for row in range(len(filled)):  # one cache for all
                states = {key: tensor[row : row + 1] for key, tensor in microbatch.states.items()}
                counts = microbatch.store.counts.clone()
                microbatch.store.commit(CacheSegment(slice(0, 1), counts, filled[row : row + 1], states, {}))
        self.pending = []


def _join_pieces(pieces: list[Microbatch]) -> Microbatch:
    """Join the pieces of one segment."""
    first = pieces[0]
    states = {key: torch.cat([piece.states[key] for piece in pieces], dim=1) for key in first.states}
    used = {
        layer: EntryAges(
            *(torch.cat(parts, dim=1) for parts in zip(*(piece.used[layer] for piece in pieces), strict=True))
        )
        for layer in first.used
    }
    return replace(first, states=states, used=used)


def gather_places(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Gather rows [B or 1, M, W] at places [B, S, N]: [B, S, N, W]."""
    rows = rows.expand(len(places), -1, -1)
    index = places.flatten(1)[..., None].expand(-1, -1, rows.shape[-1])
    return rows.gather(1, index).unflatten(1, places.shape[1:])


def _concatenate(first: EntryAges, second: EntryAges) -> EntryAges:
    return EntryAges(*(torch.cat(pair, dim=-1) for pair in zip(first, second, strict=True)))


def _gather_entries(kernel: nn.Module, entries: EntryAges) -> EntryAges:
    ages = _gather_sequence(kernel, entries.ages.where(entries.exists, -1))
    return EntryAges(ages, ages >= 0)


def _gather_sequence(kernel: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Gather x [B, s, ...] over the context-parallel ranks to [B, S, ...]."""
    if not isinstance(kernel, ContextParallelAttention):
        return x
    return GatherSequence.apply(x, kernel.layout, kernel.group_name)
