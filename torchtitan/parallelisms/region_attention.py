"""Attention by regions of a batch on a CPU: documents, windows and groups without a mask over all pairs of tokens.

A token attends to tokens of its segment: a document, or a group of tokens in it. So a batch is a list of
rectangles of queries x keys, and each is a slice that torch's kernel computes without a mask. The list is a tensor of
host numbers, computed once per forward of the model: its shape depends only on the batch's, so a compiled graph serves
all batches. Regions of equal size are computed in one call if they are small. There are at most sqrt(2 B S) sizes of
segments, however many segments there are.

Letters of the shapes: see attention_kernels.py.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torchtitan.parallelisms.attention_kernels import (
    MASKED_SCORE,
    accumulation_dtype,
    block_backward,
    block_forward,
    fastest_cpu_dtype,
    mask_bias,
)

SMALL = 512
"""Regions with at most this many keys are computed together: then copying them costs less than the calls."""
MIN_CHUNK = 64
"""Minimum number of queries that attend together beyond the start of a window."""
EVERY_ROW = -1


class RegionTable(NamedTuple):
    """The regions that queries attend to, from `region_table`."""

    regions: torch.Tensor  # int32 [N, 6]; for the keys of each rank of a ring [ranks, N, 6]


@torch.library.custom_op("torchtitan::region_table", mutates_args=())
def region_table(
    query_segments: torch.Tensor,
    query_indices: torch.Tensor,
    key_segments: torch.Tensor,
    key_indices: torch.Tensor,
    causal: bool,
    window: int,
) -> torch.Tensor:
    """Return the regions that queries attend to: int32 [rows x Q, 6], unused rows of the table are zero.

    `query_segments` [rows, Q] and `key_segments` [rows, S] are numbers of segments; the keys of a segment are
    consecutive. With one row of segments all samples of a batch share it if `rows` is 1 (EVERY_ROW). `query_indices`
    [Q] and `key_indices` [S] are the tokens' places in the sequence, and `window` is the number of tokens that a query
    attends to (0: all before it, if `causal`). A region is: sample, first and last query, first and last key (last ones
    exclusive), and 1 if causal. Its last query attends to its last key then, and each earlier one to one key less.
    """
    rows, length = query_segments.shape
    table = torch.zeros(rows * length, 6, dtype=torch.int32)
    keys: dict[tuple[int, int], tuple[int, int, int]] = {}
    for row, first, last in _runs(key_segments):
        segment = (row, int(key_segments[row, first]))
        if segment in keys:
            raise ValueError("the tokens of a document must be consecutive")
        keys[segment] = (first, last, int(key_indices[first]))
    regions = []
    for row, first, last in _runs(query_segments, query_indices):
        first_key, last_key, index = keys.get((row, int(query_segments[row, first])), (0, 0, 0))
        if causal:
            before = int(query_indices[first]) - index  # keys of the segment that precede the first query
            chunks = _chunks(first, last, before, window)
            regions += [(row, a, b, first_key + c, first_key + d, 1) for a, b, c, d in chunks]
        elif first_key < last_key:
            regions.append((row, first, last, first_key, last_key, 0))
    if regions:
        table[: len(regions)] = torch.tensor(regions, dtype=torch.int32)
    if rows == 1:
        table[: len(regions), 0] = EVERY_ROW
    return table


@region_table.register_fake
def _(query_segments, query_indices, key_segments, key_indices, causal, window):  # type: ignore[no-untyped-def]
    return query_segments.new_empty(query_segments.numel(), 6, dtype=torch.int32)


def _runs(segments: torch.Tensor, indices: torch.Tensor | None = None) -> list[tuple[int, int, int]]:
    """Return (row, first, last) of the runs of equal numbers in segments [rows, S], at consecutive indices [S]."""
    changes = segments[:, 1:] != segments[:, :-1]  # [rows, S - 1]
    if indices is not None:
        changes = changes | (indices[1:] - indices[:-1] != 1)
    length, runs = segments.shape[1], []
    for row, inner in enumerate(changes):
        borders = [0, *(inner.nonzero().flatten() + 1).tolist(), length]
        runs += [(row, first, last) for first, last in zip(borders, borders[1:], strict=False)]
    return runs


def _chunks(first: int, last: int, before: int, window: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first and last query, first and last key) of causal queries `first` to `last` that follow `before` keys.

    Keys are counted from the segment's start. Without a window that is one region; with it, all queries that see the
    start, and then a few at a time, so that few keys outside of the window are computed.
    """
    a, position = first, before
    while a < last:
        sees_start = not window or position < window
        room = (window - position if window else last) if sees_start else max(MIN_CHUNK, window // 4)
        b = min(a + room, last)
        yield a, b, 0 if sees_start else position - window + 1, position + b - a
        a, position = b, position + b - a


@torch.library.custom_op("torchtitan::attend_by_regions", mutates_args=())
def attend_by_regions(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend on a CPU: q [B, H, Q, E], k [B, K, S, E], v [B, K, S, V] -> output [B, H, Q, V], logsumexp [B, H, Q].

    `table` and `window`: from and as for `region_table`. A query is in one region at most; without one, its output is 0
    and its logsumexp MASKED_SCORE. The logsumexp has no gradient.
    """
    out = _tokens_first(q, (*q.shape[:3], v.shape[-1])).zero_()
    logsumexp = _tokens_first(q, (*q.shape[:3], 1), accumulation_dtype(q.dtype)).fill_(MASKED_SCORE)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # the kernel does not check strides
    for queries, keys, causal in _calls(table, q.shape[0], (q.shape[2], k.shape[2])):
        parts = _in_fastest_dtype(queries.select(q), keys.select(k), keys.select(v))
        part, part_logsumexp, _ = block_forward(*parts, *_mask(*parts[:2], causal, window))
        queries.put(out, part)
        queries.put(logsumexp, part_logsumexp[..., None])
    return out, logsumexp.squeeze(-1)


@attend_by_regions.register_fake
def _(q, k, v, table, window):  # type: ignore[no-untyped-def]
    out = _tokens_first(q, (*q.shape[:3], v.shape[-1]))
    return out, _tokens_first(q, (*q.shape[:3], 1), accumulation_dtype(q.dtype)).squeeze(-1)


@torch.library.custom_op("torchtitan::attend_by_regions_backward", mutates_args=())
def attend_by_regions_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    table: torch.Tensor,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, of their shapes, summed in float32 or wider over the regions of a key."""
    wide = accumulation_dtype(k.dtype)
    grad_q, grad_k, grad_v = _tokens_first(q, q.shape), *(_tokens_first(x, x.shape, wide) for x in (k, v))
    for total in (grad_q, grad_k, grad_v):
        total.zero_()
    grad = grad.transpose(1, 2).contiguous().transpose(1, 2)  # it may be expanded, which the kernel does not support
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # the kernel does not check strides
    for queries, keys, causal in _calls(table, q.shape[0], (q.shape[2], k.shape[2])):
        parts = _in_fastest_dtype(queries.select(q), keys.select(k), keys.select(v))
        results = (queries.select(x).to(parts[0].dtype) for x in (grad, out))
        results = (*results, queries.select(logsumexp[..., None]).squeeze(-1))
        part_q, part_k, part_v = block_backward(*parts, *_mask(*parts[:2], causal, window), *results, ())
        queries.put(grad_q, part_q)
        keys.add(grad_k, part_k)
        keys.add(grad_v, part_v)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


@attend_by_regions_backward.register_fake
def _(grad, q, k, v, out, logsumexp, table, window):  # type: ignore[no-untyped-def]
    return tuple(_tokens_first(x, x.shape) for x in (q, k, v))


def _save_inputs(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, table, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, table)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: torch.Tensor, _: object) -> tuple[torch.Tensor | None, ...]:
    return *attend_by_regions_backward(grad, *ctx.saved_tensors, ctx.window), None, None


attend_by_regions.register_autograd(_gradients, setup_context=_save_inputs)


def _tokens_first(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an empty tensor of the shape [B, H, S, E], stored as [B, S, H, E]."""
    samples, heads, length, width = shape
    return like.new_empty(samples, length, heads, width, dtype=dtype or like.dtype).transpose(1, 2)


class _Slice(NamedTuple):
    """Consecutive tokens of one sample, or of every sample, of tensors [B, H, S, E]."""

    samples: slice
    tokens: slice

    def select(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.samples, :, self.tokens]

    def put(self, x: torch.Tensor, part: torch.Tensor) -> None:
        self.select(x).copy_(part)

    def add(self, x: torch.Tensor, part: torch.Tensor) -> None:
        self.select(x).add_(part)


class _Selection(NamedTuple):
    """Runs of equally many tokens, as a batch [runs, H, tokens, E], of tensors made by _tokens_first."""

    indices: torch.Tensor  # [runs x tokens], in [B S]
    runs: int

    def select(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.transpose(1, 2).flatten(0, 1)[self.indices]  # [runs x tokens, H, E]
        return rows.unflatten(0, (self.runs, -1)).transpose(1, 2)

    def put(self, x: torch.Tensor, part: torch.Tensor) -> None:
        self._rows(x)[self.indices] = part.transpose(1, 2).flatten(0, 1).to(x.dtype)

    def add(self, x: torch.Tensor, part: torch.Tensor) -> None:
        self._rows(x).index_add_(0, self.indices, part.transpose(1, 2).flatten(0, 1).to(x.dtype))

    @staticmethod
    def _rows(x: torch.Tensor) -> torch.Tensor:
        """Return a view [B S, H, E] of x [B, H, S, E]."""
        return x.transpose(1, 2).view(-1, x.shape[1], x.shape[3])


def _calls(
    table: torch.Tensor, samples: int, lengths: tuple[int, int]
) -> Iterator[tuple[_Slice | _Selection, _Slice | _Selection, bool]]:
    """Yield the queries, the keys and whether it is causal, of each call of the kernel on tensors of some `samples`.

    `table` [N, 6]: from `region_table`. `lengths`: number of tokens of a sample's queries and keys.
    """
    sizes = defaultdict(list)
    for sample, first_query, last_query, first_key, last_key, causal in table[table[:, 2] > 0].tolist():
        sizes[last_query - first_query, last_key - first_key, bool(causal)].append((sample, first_query, first_key))
    for (queries, keys, causal), regions in sizes.items():
        if len(regions) > 1 and keys <= SMALL:
            firsts = [(i, *both) for sample, *both in regions for i in _samples(sample, samples)]
            sample, first_query, first_key = torch.tensor(firsts).unbind(1)
            query_indices = sample * lengths[0] + first_query + torch.arange(queries)[:, None]  # [queries, runs]
            key_indices = sample * lengths[1] + first_key + torch.arange(keys)[:, None]
            yield *(_Selection(x.mT.flatten(), len(firsts)) for x in (query_indices, key_indices)), causal
            continue
        for sample, first_query, first_key in regions:
            rows = slice(None) if sample == EVERY_ROW else slice(sample, sample + 1)
            query_slice, key_slice = slice(first_query, first_query + queries), slice(first_key, first_key + keys)
            yield _Slice(rows, query_slice), _Slice(rows, key_slice), causal


def _samples(sample: int, samples: int) -> Iterable[int]:
    return range(samples) if sample == EVERY_ROW else (sample,)


def _in_fastest_dtype(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Convert a region's queries [B, H, Q, E], keys [B, K, S, E] and values to the dtype of the fastest kernel."""
    q, k, _ = tensors
    dtype = fastest_cpu_dtype(q.dtype, q.shape[-1], k.shape[2])
    return [x.to(dtype) for x in tensors]


def _mask(q: torch.Tensor, k: torch.Tensor, causal: bool, window: int) -> tuple[bool, torch.Tensor | None]:
    """Return the kernel's `causal` and its bias [1, 1, Q, S] for a region of queries q [B, H, Q, E] and keys k."""
    queries, keys = q.shape[2], k.shape[2]
    has_band = 0 < window < keys
    if not causal or (queries in (1, keys) and not has_band):
        return causal and queries > 1, None
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    visible = distance >= 0
    return True, mask_bias(visible & (distance < window) if has_band else visible, q)[None, None]
