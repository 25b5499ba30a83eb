"""The module that remembers for a model: it looks up before the layers that read, and keeps what is to be stored.

All of it is done between the blocks. There a block's recompute does not come by again and find another cache, the
compiler sees none of it, and the blocks get what was found as they get their rotary angles. Nothing is stored until
`commit`, after the microbatch's backward: so a token never finds one of its own segment, whichever layer stores, and
states that were found are read where they lie.

Letters of the shapes: B lanes, S tokens, D width of the model, C = D / compression, M entries, N found by a token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.adapters.neurocache.attention import Retrieved, of_earlier_token
from torchtitan.adapters.neurocache.hits import Hits, followed, pairs
from torchtitan.adapters.neurocache.lookup import Found, Share, beside, nearest, places_of
from torchtitan.adapters.neurocache.sizes import BUCKETS, Layers, widths
from torchtitan.adapters.neurocache.store import Segment, Store
from torchtitan.config.sections.adapter import Neurocache as Options
from torchtitan.core.initialization import Constant, Init, Normal
from torchtitan.models.layers import Shared
from torchtitan.parallelisms.context.context_parallel import ContextParallelAttention, GatherSequence

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NORM_EPS = 1e-5


@dataclass
class Microbatch:
    """One whose forward has begun, and whose states are not stored yet."""

    store: Store
    lanes: slice
    counts: torch.Tensor  # [B], entries stored before this segment
    filled: torch.Tensor | None  # [B]; None: all tokens are there
    states: dict[tuple[int, str], torch.Tensor]
    used: dict[int, Found]
    pairs: torch.Tensor | None  # int32 [B, S, 2], tokens and labels, where hits are counted


class Compression(nn.Linear):
    """W_c, normal with a deviation of 1 / sqrt(D) in the beginning."""

    def own_init(self, name: str) -> Init:
        return Normal(self.in_features**-0.5)


class KeyNorm(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., C] -> [..., C], in the type of its input"""
        return F.layer_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)

    def own_init(self, name: str) -> Init:
        return Constant(1.0 if name == "weight" else 0.0)


class Memory(nn.Module):
    """Of a decoder, its `memory`. One compression and norm serve all storing layers; with a compression of 1 there is
    neither, and keys are the states.
    """

    border: Any = None  # under tensor parallel, between this rank's tokens and all of them

    def __init__(self, options: Options, layers: Layers, dim: int, reads_stream: bool):
        super().__init__()
        self.options, self.layers, self.dim, self.reads_stream = options, layers, dim, reads_stream
        self.h_proj = self.h_norm = None
        if options.compression > 1:
            width = dim // options.compression
            self.h_proj, self.h_norm = Compression(dim, width, bias=False), KeyNorm(width, NORM_EPS)
        self.cache_size = {True: options.cache_size, False: options.cache_size}  # in training, and else
        self.stores: dict[tuple[bool, int], Store] = {}  # each also by the first of its lanes
        self.pending: list[Microbatch] = []
        self.hits = Hits() if options.track_hits else None
        self.moments: torch.Tensor | None = None  # float64 [D, D] of the states seen, while they are looked at
        self.decodes = False  # whether a batch goes on within a segment, whose last tokens are `tail`
        self.tail: dict[int, Found] = {}
        self.clocks: dict[tuple[bool, int], torch.Tensor] = {}

    def train(self, mode: bool = True) -> "Memory":
        """What was read in evaluation is forgotten behind it; the documents that are trained on stay."""
        if mode:
            self.forget_evaluated()
        return super().train(mode)

    def kept(self) -> dict[str, torch.Tensor]:
        """Of the documents that are trained on, by names for a checkpoint."""
        groups = {group: store for (training, group), store in self.stores.items() if training}
        return {f"{group}.{name}": each for group, store in groups.items() for name, each in store.tensors().items()}

    def take_back(
        self, shapes: Mapping[str, list[int]], rows: int, device: torch.device
    ) -> dict[str, torch.Tensor] | None:
        """Tensors on the device to be filled as `kept` gave them, which had these shapes; None where `rows` need
        others.
        """
        lanes = {int(name.split(".")[0]): shape[0] for name, shape in shapes.items() if name.endswith(".counts")}
        stores = {(True, group): self._empty(count, device) for group, count in lanes.items()}
        wanted, self.stores = self.stores, stores
        back = self.kept()
        if {name: list(each.shape) for name, each in back.items()} != shapes or sum(lanes.values()) != rows:
            self.stores = wanted
            return None
        self.clocks = {key: back[f"{key[1]}.clock"] for key in stores}
        return back

    def go_on(self) -> None:
        """What `take_back` gave has been filled."""
        for key, clock in self.clocks.items():
            self.stores[key].set_clock(clock)
        self.pending = []

    def forget_evaluated(self) -> None:
        self.stores = {key: store for key, store in self.stores.items() if key[0]}

    def forget(self) -> None:
        self.stores, self.pending, self.tail = {}, [], {}

    # A microbatch

    def begin(self, tokens: torch.Tensor, told: Mapping[str, torch.Tensor], labels: torch.Tensor | None) -> None:
        """One comes, of tokens [B, S] (in later parts of a pipeline hidden states) with their labels, where there are
        any; a batch says `told` of it (LANES of models/decoder.py).
        """
        size, device = len(tokens), tokens.device
        key = self.training, int(told["lanes"][0]) if "lanes" in told else 0
        if key not in self.stores:
            self.stores[key] = self._empty(size, device)
        store = self.stores[key]
        assert size <= store.lanes or self.options.scope == "global", "batches of one group of lanes are alike"
        which = slice(0, min(size, store.lanes))
        counts = store.counts[which].expand(size)
        if "begins" in told and self.options.scope == "lane":
            counts = counts.masked_fill(told["begins"].bool(), 0)
        if not self.decodes:  # a microbatch of these lanes that nobody has stored was given up
            self.pending = [other for other in self.pending if other.store is not store]
        own = None
        if self.counts_hits and labels is not None and tokens.dim() == 2:
            own = pairs(tokens, labels)
            self.hits.note_filled(counts, store.size)
        self.pending.append(Microbatch(store, which, counts, told.get("filled"), {}, {}, own))

    @property
    def counts_hits(self) -> bool:
        return self.training and self.hits is not None

    def _empty(self, lanes: int, device: torch.device) -> Store:
        options = self.options
        return Store(
            1 if options.scope == "global" else lanes,
            self.cache_size[self.training],
            self.layers.storing,
            widths(options, self.dim, self.training),
            DTYPES[options.cache_dtype],
            device,
            options.ordering,
            self.counts_hits,
            Share(self.border if options.cache_shard == "tp" else None),
        )

    @torch.compiler.disable
    def ahead_of(self, layer: int, block: nn.Module, x: torch.Tensor, shared: Shared, kernel: nn.Module) -> Shared:
        """Before a block gets its input x [B, S, D], of which parallelisms leave a rank a part: what its layer stores
        is noted, and what its tokens find stands in the result.
        """
        stores = layer in self.layers.storing
        if self.moments is not None:
            self._look_at(block, x, kernel) if stores else None
            return shared
        if not self.cache_size[self.training] or not (stores or layer in self.layers.readers):
            return shared
        now = self.pending[-1]
        with torch.no_grad():
            states = self._states(block, x)
            keys = self.encode(states)
            if stores:
                named = {"key": keys, "state": states}
                kept = widths(self.options, self.dim, self.training)
                if now.pairs is not None:
                    named["pairs"], kept["pairs"] = now.pairs, 2
                now.states |= {(layer, name): _in_sequence(kernel, named[name]) for name in kept}
        if layer not in self.layers.readers:
            return shared
        return shared._replace(retrieved=self._retrieve(now, layer, keys, kernel))

    def _states(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The input of the block's attention; under tensor parallel of all tokens."""
        if not self.reads_stream:
            if hasattr(block, "unshard"):  # FSDP's, which the block then need not do
                block.unshard()
            x = block.attention_norm(x)
        return x if self.border is None else self.border.enter(x)

    @torch.no_grad()
    def _look_at(self, block: nn.Module, x: torch.Tensor, kernel: nn.Module) -> None:
        states, filled = _in_sequence(kernel, self._states(block, x)), self.pending[-1].filled
        if filled is not None:
            states = states[torch.arange(states.shape[1], device=states.device) < filled[:, None]]
        states = states.flatten(0, -2).double()
        self.moments = self.moments.to(states.device) + states.t() @ states  # weights may be offloaded

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., C]"""
        return states if self.h_proj is None else self.h_norm(self.h_proj(states))

    def _retrieve(self, now: Microbatch, reader: int, queries: torch.Tensor, kernel: nn.Module) -> Retrieved:
        """queries [B, S, C] before the layer `reader` -> what they find."""
        options, store, layer = self.options, now.store, self.layers.readers[reader]
        bucketed = options.lookup == "bucketed"
        size = max(store.reach, 1)  # further places are empty
        step = BUCKETS if bucketed else store.share.ranks
        size = -(-size // step) * step
        kept = size // store.share.ranks  # by this rank
        keys = store.kept[layer, "key"][now.lanes, :kept]
        with torch.no_grad():
            hits = nearest(
                queries,
                keys,
                now.counts,
                options.topk,
                similarity=options.similarity,
                bucketed=bucketed,
                block_bytes=options.score_block_bytes,
                share=store.share,
            )
            if now.pairs is not None:
                places = places_of(hits, size, now.counts)
                own = gathered(store.kept[layer, "pairs"][now.lanes, :kept], places // store.share.ranks)
                self.hits.note(reader, followed(now.pairs, store.share.whole(own, places), hits.there))
            found = beside(hits, options.window, size, now.counts)
            if options.ordering == "lru":
                whole = _everywhere(kernel, found)
                before = now.used.get(layer)
                now.used[layer] = whole if before is None else _joined(before, whole)
            found, joined = self._with_earlier(layer, found, kernel)
            places = places_of(found, size, now.counts)
        own = places // store.share.ranks
        if self.training and self.h_proj is not None:
            rows = self._reencoded(store.kept[layer, "state"][now.lanes, :kept], own, queries.dtype)
        else:
            rows = gathered(keys, own).to(queries.dtype)
        rows = store.share.whole(rows, places)
        if options.compat_head_layout:
            rows = rows.where(found.there[..., None], self._empty_row(rows))
        return Retrieved(rows, found.there, joined)

    def _empty_row(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the row, [C] or [], that the authors' program reads in a place without an entry. It compresses
        zeros in training.
        """
        if self.training and self.h_norm is not None:
            return self.h_norm(rows.new_zeros(rows.shape[-1]))
        return rows.new_zeros(())

    def _with_earlier(self, layer: int, found: Found, kernel: nn.Module) -> tuple[Found, bool]:
        """What tokens before these found too, where these are not a whole segment; and whether it is there."""
        context, part = self.options.context, isinstance(kernel, ContextParallelAttention)
        if context == 1 or not (part or self.decodes):
            return found, False
        whole = _everywhere(kernel, found)
        if layer in self.tail:
            whole = Found(*(torch.cat(pair, dim=1) for pair in zip(self.tail[layer], whole, strict=True)))
        if self.decodes:
            self.tail[layer] = Found(*(each[:, -(context - 1) :] for each in whole))
        repeat = self.options.compat_head_layout
        seen = [torch.cat([of_earlier_token(each, by, repeat) for by in range(context)], dim=-1) for each in whole]
        if part:
            return Found(*(kernel.layout.share(each, kernel.rank) for each in seen)), True
        return Found(*(each[:, -found.ages.shape[1] :] for each in seen)), True

    def _reencoded(self, states: torch.Tensor, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """states [B or 1, M, D], of which each token takes those at places [B, S, N] -> [B, S, N, C], compressed with
        the weights as they are. Before they are taken, where that is less work.
        """
        if states.shape[1] <= places[0].numel():
            return gathered(self.encode(states.to(dtype)), places)
        return self.encode(gathered(states, places).to(dtype))

    @torch.no_grad()
    def commit(self) -> None:
        """Store what the microbatches brought; all they need of the cache has been read."""
        for microbatch in [_of_pieces(self.pending)] if self.decodes and self.pending else self.pending:
            if not microbatch.states:  # a pipeline part, or no cache
                continue
            length = next(iter(microbatch.states.values())).shape[1]
            filled = microbatch.filled
            if filled is None:
                filled = torch.full_like(microbatch.counts, length)
            if self.options.scope == "lane":
                told = (microbatch.lanes, microbatch.counts, filled, microbatch.states, microbatch.used)
                microbatch.store.commit(Segment(*told))
                continue
            for row in range(len(filled)):  # one cache for all
                states = {key: each[row : row + 1] for key, each in microbatch.states.items()}
                counts = microbatch.store.counts.clone()
                microbatch.store.commit(Segment(slice(0, 1), counts, filled[row : row + 1], states, {}))
        self.pending = []


def _of_pieces(pieces: list[Microbatch]) -> Microbatch:
    """Those of one segment, which was read piece by piece."""
    first = pieces[0]
    states = {key: torch.cat([piece.states[key] for piece in pieces], dim=1) for key in first.states}
    used = {
        layer: Found(*(torch.cat(parts, dim=1) for parts in zip(*(piece.used[layer] for piece in pieces), strict=True)))
        for layer in first.used
    }
    return replace(first, states=states, used=used)


def gathered(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """rows [B or 1, M, W] at places [B, S, N] -> [B, S, N, W]"""
    rows = rows.expand(len(places), -1, -1)
    index = places.flatten(1)[..., None].expand(-1, -1, rows.shape[-1])
    return rows.gather(1, index).unflatten(1, places.shape[1:])


def _joined(before: Found, found: Found) -> Found:
    return Found(*(torch.cat(pair, dim=-1) for pair in zip(before, found, strict=True)))


def _everywhere(kernel: nn.Module, found: Found) -> Found:
    ages = _in_sequence(kernel, found.ages.where(found.there, -1))
    return Found(ages, ages >= 0)


def _in_sequence(kernel: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """x [B, s, ...] of a context-parallel rank -> [B, S, ...], that of all."""
    if not isinstance(kernel, ContextParallelAttention):
        return x
    return GatherSequence.apply(x, kernel.layout, kernel.group_name)
