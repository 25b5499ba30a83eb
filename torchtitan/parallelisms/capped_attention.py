"""Attention with capped scores, cap tanh(score / cap) (arXiv:2408.00118, 2), which no fused kernel of torch computes.

Queries attend a chunk at a time, and backward computes each chunk's scores again. So at most SCORES of them exist at
once: 64 MiB in float32, and five times that in backward, at any number of mask.

Letters of the shapes: see attention_kernels.py.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import register_flop_formula

from torchtitan.parallelisms.attention_kernels import accumulation_dtype

SCORES = 2**24
"""Scores of a chunk of queries, of all samples and heads, if one query has no more."""
FEW, PARTS = 256, 8
"""A chunk has at most so many queries, or this part of them: later keys are then left out."""


class VisibleKeys(NamedTuple):
    """The keys that queries may attend to: those of their document, and of its earlier mask."""

    indices: torch.Tensor  # [Q], places of the queries among the keys
    segments: torch.Tensor  # [B or 1, Q], numbers of the queries' documents
    key_segments: torch.Tensor  # [B or 1, S]
    causal: bool
    window: int  # number of keys up to its own that a query attends to; 0: all
    in_order: bool  # the queries are the tokens of the keys


@torch.library.custom_op("torchtitan::capped_attention", mutates_args=())
def capped_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    segments: torch.Tensor,
    key_segments: torch.Tensor,
    causal: bool,
    window: int,
    in_order: bool,
    cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend: q [B, H, Q, E], k [B, K, S, E], v [B, K, S, V] -> output [B, H, Q, V], logsumexp [B, H, Q].

    Scores are q k' / sqrt(E), capped. The arguments after v: see VisibleKeys. The logsumexp has no gradient.
    """
    mask = VisibleKeys(indices, segments, key_segments, causal, window, in_order)
    out, logsumexp = _empty_results(q, v)
    for chunk in _chunks(q, k, mask):
        scores, _ = _capped_scores(q, k, mask, cap, chunk)
        chunk_logsumexp = scores.logsumexp(-1)
        weights = (scores - chunk_logsumexp[..., None]).exp().to(v.dtype)
        chunk.of_queries(out).copy_((_rows(weights) @ chunk.of_keys(v)).view(*weights.shape[:-1], -1).flatten(1, 2))
        chunk.of_queries(logsumexp[..., None]).copy_(chunk_logsumexp.flatten(1, 2)[..., None])
    return out, logsumexp


@capped_attention.register_fake
def _(q, k, v, indices, segments, key_segments, causal, window, in_order, cap):  # type: ignore[no-untyped-def]
    return _empty_results(q, v)


@torch.library.custom_op("torchtitan::capped_attention_backward", mutates_args=())
def capped_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    indices: torch.Tensor,
    segments: torch.Tensor,
    key_segments: torch.Tensor,
    causal: bool,
    window: int,
    in_order: bool,
    cap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, of their shapes, summed in float32 or wider over the chunks."""
    mask = VisibleKeys(indices, segments, key_segments, causal, window, in_order)
    wide = accumulation_dtype(k.dtype)
    grad_q, grad_k, grad_v = torch.empty_like(q), *(torch.zeros_like(x, dtype=wide) for x in (k, v))
    for chunk in _chunks(q, k, mask):
        scores, slopes = _capped_scores(q, k, mask, cap, chunk)
        weights = (scores - _grouped(chunk.of_queries(logsumexp[..., None]), k)).exp()
        of_out = _grouped(chunk.of_queries(grad), k)
        mean = (of_out * _grouped(chunk.of_queries(out), k)).sum(-1, keepdim=True, dtype=wide)
        of_weights = (_rows(of_out) @ chunk.of_keys(v).mT).view_as(weights)
        of_products = (weights * (of_weights - mean) * slopes * q.shape[-1] ** -0.5).to(q.dtype)
        chunk.of_keys(grad_v).add_(_rows(weights.to(v.dtype)).mT @ _rows(of_out))
        chunk.of_keys(grad_k).add_(_rows(of_products).mT @ _rows(_grouped(chunk.of_queries(q), k)))
        of_queries = (_rows(of_products) @ chunk.of_keys(k)).view(*weights.shape[:-1], -1)
        chunk.of_queries(grad_q).copy_(of_queries.flatten(1, 2))
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


@capped_attention_backward.register_fake
def _(grad, q, k, v, *results):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(x) for x in (q, k, v))


def _save_inputs(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, indices, segments, key_segments, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, indices, segments, key_segments)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: torch.Tensor, _: object) -> tuple[torch.Tensor | None, ...]:
    return *capped_attention_backward(grad, *ctx.saved_tensors, *ctx.numbers), *[None] * 7


capped_attention.register_autograd(_gradients, setup_context=_save_inputs)


def _flops(q: torch.Size, k: torch.Size, v: torch.Size) -> int:
    """Return the FLOPs of forward with all keys of shapes q, k and v."""
    return 2 * math.prod(q[:3]) * k[2] * (q[3] + v[3])


@register_flop_formula(torch.ops.torchtitan.capped_attention)
def _forward_flops(q: torch.Size, k: torch.Size, v: torch.Size, *_: object, **__: object) -> int:
    return _flops(q, k, v)


@register_flop_formula(torch.ops.torchtitan.capped_attention_backward)
def _backward_flops(grad: torch.Size, q: torch.Size, k: torch.Size, v: torch.Size, *_: object, **__: object) -> int:
    """Return the FLOPs without the scores that are computed again."""
    return 2 * _flops(q, k, v)


class _Chunk(NamedTuple):
    """Consecutive queries, and the keys that any of them may attend to."""

    queries: slice
    keys: slice

    def of_queries(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, self.queries]

    def of_keys(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, self.keys]


def _chunks(q: torch.Tensor, k: torch.Tensor, mask: VisibleKeys) -> Iterator[_Chunk]:
    samples, heads, queries, _ = q.shape
    keys, window = k.shape[2], mask.window
    most = max(FEW, window) if window else max(FEW, -(-queries // PARTS))
    size = max(1, min(most, SCORES // (samples * heads * (min(keys, most + window) if window else keys))))
    for start in range(0, queries, size):
        end = min(start + size, queries)
        first, last = 0, keys
        if mask.causal and (mask.in_order or q.device.type == "cpu"):  # elsewhere, reading indices would wait
            places = (start, end - 1) if mask.in_order else map(int, mask.indices[start:end].aminmax())
            least, greatest = places
            first, last = max(0, least - window + 1) if window else 0, greatest + 1
        yield _Chunk(slice(start, end), slice(first, last))


def _capped_scores(
    q: torch.Tensor, k: torch.Tensor, mask: VisibleKeys, cap: float, chunk: _Chunk
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return capped scores [B, K, H / K, n, s] of a chunk, -inf where a key is hidden, and the slopes of the caps."""
    grouped = _grouped(chunk.of_queries(q), k)
    products = (_rows(grouped) @ chunk.of_keys(k).mT).view(*grouped.shape[:-1], -1)
    tangents = (products.to(accumulation_dtype(q.dtype)) * (q.shape[-1] ** -0.5 / cap)).tanh()
    visible = mask.segments[:, chunk.queries, None] == mask.key_segments[:, None, chunk.keys]  # [B or 1, n, s]
    if mask.causal:
        places = torch.arange(chunk.keys.start, chunk.keys.stop, device=q.device)
        distance = mask.indices[chunk.queries, None] - places
        visible = visible & (distance >= 0)
        visible = visible & (distance < mask.window) if mask.window else visible
    return (cap * tangents).masked_fill(~visible[:, None, None], -torch.inf), 1 - tangents.square()


def _grouped(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Split heads by the key head that they share: [B, H, n, ...] -> [B, K, H / K, n, ...]."""
    return x.unflatten(1, (k.shape[1], -1))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Join the rows of the heads of a group: [B, K, H / K, n, E] -> [B, K, H / K n, E]."""
    return x.flatten(2, 3)


def _empty_results(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    return out, q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
