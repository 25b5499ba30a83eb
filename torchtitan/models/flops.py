"""Floating-point operations per token, forward and backward, in the one convention of this project.

A multiply-add counts 2; a weight is used once forward and twice backward, so each of the N weights that a token is
multiplied with costs 6. N has the output head (also when tied) and neither the input embedding nor the norms; of
routed experts it has those that a token goes to, and the router and shared experts in full; where what they make is
added up by weights, that is a product too, of 6 k D a layer. Attention adds 12 L A K: L layers, A = heads x head_dim, K
the mean number of keys that a query looks at, which a sliding window bounds; where values are not as wide as keys,
6 L heads (d_qk + d_v) K.
Multi-token prediction counts with its layers, and the head once more for each of its depths.
Recompute and padding never count. No torch here.
"""

from dataclasses import dataclass
from typing import Protocol


class Sizes(Protocol):
    n_layers: int
    n_heads: int
    head_dim: int
    num_matmul_parameters: int


class LatentSizes(Protocol):
    n_layers: int
    n_mtp_layers: int
    n_heads: int
    qk_head_dim: int
    v_head_dim: int
    num_matmul_parameters: int


@dataclass(frozen=True)
class FlopsPerToken:
    full: float  # as if every query looked at all keys, or a whole window: what older tables print
    causal: float  # what a causal kernel has to do


def flops_per_token(sizes: Sizes, seq_len: int) -> FlopsPerToken:
    window = getattr(sizes, "sliding_window", 0) or seq_len
    full, causal = min(window, seq_len), causal_keys(seq_len, window)
    return FlopsPerToken(full=with_keys(sizes, full), causal=with_keys(sizes, causal))


def bidirectional_flops_per_token(sizes: Sizes, seq_len: int) -> FlopsPerToken:
    """Of a model whose tokens see the whole sequence, whatever the kernel."""
    full = with_keys(sizes, seq_len)
    return FlopsPerToken(full=full, causal=full)


def latent_flops_per_token(sizes: LatentSizes, seq_len: int) -> FlopsPerToken:
    full, causal = latent_with_keys(sizes, seq_len), latent_with_keys(sizes, causal_keys(seq_len))
    return FlopsPerToken(full=full, causal=causal)


def with_keys(sizes: Sizes, keys: float) -> float:
    """`keys`: mean number of keys per query."""
    return _of_weights(sizes) + 12 * sizes.n_layers * sizes.n_heads * sizes.head_dim * keys


def latent_with_keys(sizes: LatentSizes, keys: float) -> float:
    widths = sizes.qk_head_dim + sizes.v_head_dim
    layers = sizes.n_layers + sizes.n_mtp_layers
    return _of_weights(sizes) + 6 * layers * sizes.n_heads * widths * keys


def _of_weights(sizes: Sizes | LatentSizes) -> float:
    return 6 * (sizes.num_matmul_parameters + getattr(sizes, "num_summed", 0))


def causal_keys(seq_len: int, window: int | None = None) -> float:
    """Of a query's own and earlier ones, at most `window` of them, the mean over a sequence."""
    seen = min(window or seq_len, seq_len)
    return seen * (2 * seq_len - seen + 1) / (2 * seq_len)
