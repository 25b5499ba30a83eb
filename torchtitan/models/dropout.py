"""Dropout and embedding noise that are independent of the parallelism plan.

Each dropout draw is a function of (seed, step, sample, token, layer, stream, feature), and for attention
probabilities of (seed, step, sample, query, layer, head, key). The numbers of a generator would depend on how many this
rank drew before. Here each token of a step has a random key, which comes with the batch and is sharded with its tokens.
A layer derives its own keys from these, and a hash of key and feature decides whether a feature is dropped. So
microbatches, ranks, recomputation and resumed runs use the same draws. STRIDES keep keys of tokens, layers, and streams
or heads apart.

Noise on embeddings in training (NEFTune, arXiv:2310.05914) is drawn in the same way, by (seed, step, sample, token,
feature). Its magnitude depends on the length of a token's record, so packing and padding do not change it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchtitan.core.errors import JobError
from torchtitan.core.fused import Fused, pieces
from torchtitan.core.random_draws import STRIDES, of_tokens, scramble_int32_, scrambled
from torchtitan.models.attention import AttentionKernel
from torchtitan.parallelisms.plan import ParallelPlan
from torchtitan.parallelisms.sequence_layout import Tokens

PIECE = 2**18
"""Elements that are drawn at once in eager, so that the draws stay in the cache."""


def token_keys(seed: int, step: int, samples: torch.Tensor, length: int) -> torch.Tensor:
    """Return a random key for each token, int64 [B, length]; samples [B] are their numbers within the step."""
    return of_tokens(f"{seed}/dropout/{step}", samples, length)


def layer_keys(keys: torch.Tensor, layer: int) -> torch.Tensor:
    """Derive a layer's keys [B, S] from the keys [B, S] of a batch's tokens; layer -1 is the input embedding."""
    return scrambled(keys + (layer + 2) * STRIDES[1])


def head_keys(keys: torch.Tensor, first: int, heads: int) -> torch.Tensor:
    """Derive keys [B, H, Q] of heads `first` to `first + heads - 1` from the layer's keys [B, Q] of queries."""
    numbers = torch.arange(first + 1, first + heads + 1, device=keys.device)
    return scrambled(keys[:, None] + numbers[:, None] * STRIDES[2])


def feature_keys(keys: torch.Tensor, first: int, width: int, stream: int) -> torch.Tensor:
    """Return keys int32 [width] of features from `first`, on the device of the tokens' keys."""
    numbers = torch.arange(first, first + width, device=keys.device)
    return scrambled(numbers + stream * STRIDES[2]).int()


def _threshold(p: float) -> int:
    """Return the limit for 32 random bits, read as a signed number with the highest bit flipped, to keep a feature."""
    return int(p * 2**32) - 2**31


def _drop(x: torch.Tensor, keys: torch.Tensor, features: torch.Tensor, threshold: int, share: float) -> torch.Tensor:
    """Drop features of x [N, D] by keys [N] and the features' keys int32 [D]; divide the others by `share`."""
    drawn = scramble_int32_(keys.int()[:, None] ^ features)
    return torch.where(drawn.bitwise_xor_(-(2**31)) >= threshold, x / share, 0)


def _drop_in_pieces(x: torch.Tensor, keys: torch.Tensor, *arguments: Any) -> torch.Tensor:
    if x.numel() <= PIECE:
        return _drop(x, keys, *arguments)
    dropped = torch.empty_like(x)
    for piece in pieces(len(x), max(1, PIECE // x.shape[-1])):
        dropped[piece] = _drop(x[piece], keys[piece], *arguments)
    return dropped


_fused_drop = Fused(_drop, _drop_in_pieces, dynamic=True)
_fused_feature_keys = Fused(feature_keys, dynamic=True)


@torch.library.custom_op("torchtitan::drop_by_keys", mutates_args=())
def drop_by_keys(x: torch.Tensor, keys: torch.Tensor, first: int, stream: int, p: float) -> torch.Tensor:
    """Drop features of x [..., D] by keys [...]; see Dropout.

    It is an operator so that the planner sees no temporary tensors.
    """
    features = _fused_feature_keys(keys, first, x.shape[-1], stream)
    return _fused_drop(x.reshape(-1, x.shape[-1]), keys.flatten(), features, _threshold(p), 1 - p).view(x.shape)


@drop_by_keys.register_fake
def _(x: torch.Tensor, keys: torch.Tensor, first: int, stream: int, p: float) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


class _Drop(torch.autograd.Function):
    """Dropout by keys; backward draws again instead of saving a mask."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keys: torch.Tensor, *settings: Any) -> torch.Tensor:
        ctx.save_for_backward(keys)
        ctx.settings = settings
        return drop_by_keys(x, keys, *settings)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return drop_by_keys(grad, *ctx.saved_tensors, *ctx.settings), None, None, None, None


class Dropout(nn.Module):
    """Dropout by keys. `stream`: number of the random stream; dropouts in one layer have different ones."""

    def __init__(self, p: float, stream: int = 0):
        super().__init__()
        self.p, self.stream = p, stream

    def forward(self, x: torch.Tensor, keys: torch.Tensor | None, first: int = 0) -> torch.Tensor:
        """Drop features of x [..., D], usually [B, S, D], with probability p and scale the others by 1 / (1 - p).

        In evaluation x is returned unchanged. keys [...] has one key per row of x, usually the layer's keys [B, S].
        `first` is the index of x's first feature if x is a shard.
        """
        if not self.training or not self.p:
            return x
        assert keys is not None, "a model with dropout needs the keys of its tokens in training"
        if torch.compiler.is_compiling():  # fused with what surrounds it
            features = feature_keys(keys, first, x.shape[-1], self.stream)
            return _drop(x.flatten(0, -2), keys.flatten(), features, _threshold(self.p), 1 - self.p).view_as(x)
        return _Drop.apply(x, keys, first, self.stream, self.p)


class DropoutKernel(AttentionKernel):
    """Attention with dropout of its probabilities in training (arXiv:1706.03762, 5.4); else AttentionKernel.

    Library kernels draw from their own generators, if they support dropout at all. So in training all probabilities
    [B, H, Q, S] are materialized and kept for backward, twice in float32: 100 MB per sample and layer at 12 heads and
    1024 tokens.
    """

    accepts_query_slices = has_dropout = True

    def __init__(self, p: float, backend: str = "auto", causal: bool = True, window: int = 0):
        super().__init__(backend, causal, window)
        self.dropout = Dropout(p)
        self.head_shard = 0  # index of this rank's share of the heads under tensor parallel

    def with_backend(self, backend: str) -> AttentionKernel:
        return DropoutKernel(self.dropout.p, backend, self.causal, self.window).train(self.training)

    def uses_flex(self, queries: Tokens) -> bool:
        return not self.training and super().uses_flex(queries)

    def uses_regions(self, queries: Tokens) -> bool:
        return not self.training and super().uses_regions(queries)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: object,
        keys: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend as AttentionKernel does; `keys` [B, Q] are the layer's keys of the queries.

        k and v cover the full sequence in order.
        """
        if not self.training:
            return super().forward(q, k, v, mask)
        assert keys is not None, "a model with dropout needs the keys of its tokens in training"
        heads = q.shape[1]
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        scores = (q @ k.mT) * q.shape[-1] ** -0.5  # [B, H, Q, S]
        if mask is None and self.causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
        weights = self.dropout(weights, head_keys(keys, self.head_shard * heads, heads))
        return weights.to(v.dtype) @ v


NOISE_STREAM = 1
"""Random stream of the noise in the input embedding; 0 is dropout of the embeddings."""


def record_lengths(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the length of each token's record, int64 [B, S], given tokens [B, S] and document_ids [B, S] below S.

    Without document_ids a record is the full sample.
    """
    tokens, documents = batch["tokens"], batch.get("document_ids")
    if documents is None:
        return torch.full_like(tokens, tokens.shape[1])
    counts = documents.new_zeros(len(documents), documents.shape[1] + 1)
    return counts.scatter_add(1, documents, torch.ones_like(documents)).gather(1, documents)


class EmbeddingNoise(nn.Module):
    """Uniform noise in [-b, b], b = alpha / sqrt(L D); for a record of L tokens its norm is near alpha / sqrt(3)."""

    def __init__(self, alpha: float):
        super().__init__()
        self.alpha = alpha

    def forward(self, x: torch.Tensor, keys: torch.Tensor | None, lengths: torch.Tensor | None) -> torch.Tensor:
        """Add noise to x [B, S, D] in training, given keys [B, S] (layer -1) and record lengths [B, S]."""
        if not self.training:
            return x
        assert keys is not None and lengths is not None, "embedding noise needs keys and record lengths"
        features = scrambled(torch.arange(x.shape[-1], device=x.device) + NOISE_STREAM * STRIDES[2])
        drawn = scrambled(keys[..., None] ^ features) >> 8  # [B, S, D], 24 bits, which float32 represents exactly
        bound = self.alpha * (lengths * x.shape[-1]).to(torch.float32).rsqrt()  # [B, S]
        return x + ((drawn.to(torch.float32) / 2**23 - 1) * bound[..., None]).to(x.dtype)


def add_embedding_noise(model: nn.Module, plan: ParallelPlan, alpha: float) -> ParallelPlan:
    """Attach noise to the model in place, unless alpha is 0, and return the plan that includes it.

    Raises JobError if the model is not a Decoder.
    """
    if not alpha:
        return plan
    if not hasattr(model, "noise"):
        raise JobError(
            f"training.neftune_alpha: given {alpha:g}; allowed: 0 for {type(model).__name__}, which is no Decoder of "
            "torchtitan/models; leave it out"
        )
    model.noise = EmbeddingNoise(alpha)
    return replace(plan, with_embedding=(*plan.with_embedding, "noise"))
