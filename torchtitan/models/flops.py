"""Floating-point operations per token, forward and backward. No torch.

A multiply-add counts 2. A weight is used once in forward and twice in backward, so each of the N weights that a token
is multiplied with costs 6. N includes the output head (also if tied) but neither the input embedding nor the norms. Of
the routed experts it includes those that a token is sent to, and the router and shared experts in full. The weighted
sum of the experts' outputs is a product too, of 6 k D per layer.

Attention adds 12 L A K: L layers, A = heads x head_dim, and K the mean number of keys that a query attends to, which a
sliding window or a chunk bounds; where only some layers have one, K is the mean over the layers. If values are not as
wide as keys, it adds 6 L heads (d_qk + d_v) K instead. Multi-token prediction counts with its layers, and with one more
head for each depth. Recomputation and padding never count.

A layer with the delta rule (linear_attention.py) multiplies, for each token and value head, the state three times,
18 K V, and the corrections of its chunk of C tokens, 6 C V; for each key head, keys with keys and with queries, 12 C K.
The triangular system of a chunk, convolutions and decays count as little as norms: not at all. Without the delta rule
it multiplies the state twice, 12 K V, and the values of its chunk, 6 C V; for each group of heads, keys with queries,
6 C K.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

STATE_CHUNK = 64
"""Tokens that linear attention computes at once."""


class ModelSizes(Protocol):
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
    """FLOPs per token with full and with causal attention."""

    full: float  # every query attends to all keys, or a full window, as in older tables
    causal: float  # the work of a causal kernel

    def with_adapter(self, added: float, frozen: float, removed: float = 0.0) -> "FlopsPerToken":
        """Return the FLOPs with `added` trained weights if, of the model's, some are frozen and some are removed.

        A frozen weight costs 4, as its gradient's product is not computed.
        """
        change = 6 * added - 2 * frozen - 4 * removed
        return FlopsPerToken(full=self.full + change, causal=self.causal + change)


def flops_per_token(sizes: ModelSizes, seq_len: int) -> FlopsPerToken:
    full, causal = mean_over_layers(sizes, seq_len, min), mean_over_layers(sizes, seq_len, causal_keys)
    return FlopsPerToken(full=with_keys(sizes, full), causal=with_keys(sizes, causal))


def flops_by_layer(sizes: Any, seq_len: int) -> FlopsPerToken:
    """Return the FLOPs of a model whose heads differ between layers."""

    def total(keys: Callable[[int, int], float]) -> float:
        layers = range(sizes.n_layers)
        widths = (
            sizes.attention_sizes(layer).head_dim * keys(seq_len, sizes.window_of(layer) or seq_len) for layer in layers
        )
        return _of_weights(sizes) + 12 * sizes.n_heads * sum(widths)

    return FlopsPerToken(full=total(min), causal=total(causal_keys))


def mean_over_layers(sizes: Any, seq_len: int, keys: Callable[[int, int], float]) -> float:
    """Return the mean over the layers of keys(seq_len, window): `n_global_layers` have no window, nor chunks."""
    windowed = keys(seq_len, getattr(sizes, "sliding_window", 0) or seq_len)
    if chunk := min(getattr(sizes, "chunk_size", 0), seq_len):
        last = seq_len % chunk  # tokens of the last chunk, if it is shorter
        windowed = ((seq_len - last) * keys(chunk, chunk) + (last and last * keys(last, last))) / seq_len
    without = getattr(sizes, "n_global_layers", 0)
    return windowed + (keys(seq_len, seq_len) - windowed) * without / sizes.n_layers if without else windowed


class DeltaSizes(ModelSizes, Protocol):
    n_state_layers: int
    delta_key_heads: int
    delta_value_heads: int
    delta_key_dim: int
    delta_value_dim: int


def delta_flops_per_token(sizes: DeltaSizes, seq_len: int) -> FlopsPerToken:
    """Return the FLOPs of a model in which some layers have the delta rule in place of attention."""
    keys_of_chunk = min(seq_len, STATE_CHUNK)

    def total(keys: float, chunk: float) -> float:
        attention = 12 * (sizes.n_layers - sizes.n_state_layers) * sizes.n_heads * sizes.head_dim * keys
        of_keys = 4 * chunk * sizes.delta_key_heads * sizes.delta_key_dim
        of_values = sizes.delta_value_heads * (6 * sizes.delta_key_dim + 2 * chunk) * sizes.delta_value_dim
        return _of_weights(sizes) + attention + 3 * sizes.n_state_layers * (of_keys + of_values)

    return FlopsPerToken(
        full=total(seq_len, keys_of_chunk), causal=total(causal_keys(seq_len), causal_keys(keys_of_chunk))
    )


class HybridSizes(ModelSizes, Protocol):
    n_state_layers: int
    ssm_heads: int
    ssm_head_dim: int
    ssm_groups: int
    ssm_state_dim: int


def hybrid_flops_per_token(sizes: HybridSizes, seq_len: int) -> FlopsPerToken:
    """Return the FLOPs of a model with linear attention without the delta rule, beside attention or in its place."""
    attention, keys_of_chunk = flops_per_token(sizes, seq_len), min(seq_len, STATE_CHUNK)

    def of_states(chunk: float) -> float:
        of_keys = 2 * chunk * sizes.ssm_groups * sizes.ssm_state_dim
        of_values = sizes.ssm_heads * (4 * sizes.ssm_state_dim + 2 * chunk) * sizes.ssm_head_dim
        return 3 * sizes.n_state_layers * (of_keys + of_values)

    return FlopsPerToken(
        full=attention.full + of_states(keys_of_chunk), causal=attention.causal + of_states(causal_keys(keys_of_chunk))
    )


def bidirectional_flops_per_token(sizes: ModelSizes, seq_len: int) -> FlopsPerToken:
    """Return the FLOPs of a model with attention to the full sequence, for any kernel."""
    full = with_keys(sizes, seq_len)
    return FlopsPerToken(full=full, causal=full)


def latent_flops_per_token(sizes: LatentSizes, seq_len: int) -> FlopsPerToken:
    full, causal = latent_with_keys(sizes, seq_len), latent_with_keys(sizes, causal_keys(seq_len))
    return FlopsPerToken(full=full, causal=causal)


def with_keys(sizes: ModelSizes, keys: float) -> float:
    """Return the FLOPs per token if a query attends to `keys` keys on average, in the layers that have attention."""
    layers = getattr(sizes, "n_attention_layers", sizes.n_layers)
    return _of_weights(sizes) + 12 * layers * sizes.n_heads * sizes.head_dim * keys


def latent_with_keys(sizes: LatentSizes, keys: float) -> float:
    widths = sizes.qk_head_dim + sizes.v_head_dim
    layers = sizes.n_layers + sizes.n_mtp_layers
    return _of_weights(sizes) + 6 * layers * sizes.n_heads * widths * keys


def _of_weights(sizes: ModelSizes | LatentSizes) -> float:
    return 6 * (sizes.num_matmul_parameters + getattr(sizes, "num_summed", 0))


def causal_keys(seq_len: int, window: int | None = None) -> float:
    """Return the mean number of keys that a query attends to: itself and earlier ones, at most `window`."""
    span = min(window or seq_len, seq_len)
    return span * (2 * seq_len - span + 1) / (2 * seq_len)
