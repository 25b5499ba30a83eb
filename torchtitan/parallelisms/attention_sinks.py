"""Attention sinks: a learned score for each head that joins the softmax, without a value (arXiv:2309.17453, 4.1).

With the logsumexp l of a query's scores and the sink s, every weight shrinks by sigmoid(l - s), and the logsumexp is
log(e^l + e^s). A kernel's backward that gets this output and this logsumexp computes the gradients of q, k and v of
attention with the sink, as it does for the regions of a ring (ring_attention.py).

Letters of the shapes: B samples, H query heads, K key/value heads, Q and S tokens of queries and of keys, E width of a
head's query and key, V width of its value.
"""

from typing import Any

import torch

from torchtitan.parallelisms.attention_kernels import block_backward, block_forward
from torchtitan.parallelisms.region_attention import attend_by_regions, attend_by_regions_backward


def join_sinks(
    out: torch.Tensor, logsumexp: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [B, H, Q, V] and the logsumexp [B, H, Q] of attention with the sinks [H], from those without.

    The output keeps its dtype, and the logsumexp is float32 or wider. Without sinks both are returned.
    """
    if sinks is None:
        return out, logsumexp
    total = torch.logaddexp(logsumexp, sinks[:, None].to(logsumexp.dtype))
    return (out * (logsumexp - total).exp()[..., None]).to(out.dtype), total


def sinks_gradient(grad: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the sinks [H], from that of the output, `grad`; both have the sinks joined."""
    products = (grad.to(logsumexp.dtype) * out).sum(-1)  # [B, H, Q]
    shares = (sinks[:, None].to(logsumexp.dtype) - logsumexp).exp()
    return -(shares * products).sum((0, 2)).to(sinks.dtype)


class SinkAttentionFunction(torch.autograd.Function):
    """Attention with sinks [H]: q [B, H, Q, E], k [B, K, S, E], v [B, K, S, V] -> [B, H, Q, V].

    `regions` and `window`: from and as for `region_table`, on a CPU; otherwise `bias` [B, 1, Q, S], from `mask_bias`,
    or neither, and then `causal`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor,
        regions: torch.Tensor | None,
        window: int,
        bias: torch.Tensor | None,
        causal: bool,
    ) -> torch.Tensor:
        extras: tuple[torch.Tensor, ...] = ()
        if regions is not None:
            results = attend_by_regions(q, k, v, regions, window)
        else:
            *results, extras = block_forward(q, k, v, causal, bias)
        results = join_sinks(*results, sinks)
        ctx.save_for_backward(q, k, v, sinks, regions, bias, *results, *extras)
        ctx.window, ctx.causal = window, causal
        return results[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, regions, bias, out, logsumexp, *extras = ctx.saved_tensors
        grad = grad.contiguous()
        if regions is not None:
            of_inputs = attend_by_regions_backward(grad, q, k, v, out, logsumexp, regions, ctx.window)
        else:
            parts = block_backward(q, k, v, ctx.causal, bias, grad, out, logsumexp, tuple(extras))
            of_inputs = tuple(part.to(x.dtype) for part, x in zip(parts, (q, k, v), strict=True))
        return *of_inputs, sinks_gradient(grad, out, logsumexp, sinks), None, None, None, None
