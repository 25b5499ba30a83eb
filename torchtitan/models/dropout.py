"""Dropout that no plan changes: each draw is a function of (seed, step, sample, token, layer, place in it, feature), of
an attention's probabilities one of (seed, step, sample, query, layer, head, key).

A generator's numbers would depend on which rank draws how many before. Here each token of a step has a key, one number,
which comes with the batch and is split with its tokens; a layer makes its own keys of them, and a feature is kept or
not by a hash of key and feature. So microbatches, ranks, recompute and a resume meet the same draws.

STRIDES are apart for tokens, layers, and places or heads.
"""

import torch
from torch import nn

from torchtitan.keyed import STRIDES, of_tokens, scrambled
from torchtitan.models.layers import AttentionKernel
from torchtitan.parallelisms.context.kernel import Tokens


def token_keys(seed: int, step: int, samples: torch.Tensor, length: int) -> torch.Tensor:
    """samples [B], their numbers among all samples of the step -> a key for each of their tokens, int64 [B, length]."""
    return of_tokens(f"{seed}/dropout/{step}", samples, length)


def layer_keys(keys: torch.Tensor, layer: int) -> torch.Tensor:
    """The keys [B, S] of a batch's tokens -> those of a layer, which may be -1 for what comes before the first."""
    return scrambled(keys + (layer + 2) * STRIDES[1])


def head_keys(keys: torch.Tensor, first: int, heads: int) -> torch.Tensor:
    """The layer's keys [B, Q] of the queries -> those of so many heads, [B, H, Q]. `first`: the number of the first."""
    numbers = torch.arange(first + 1, first + heads + 1, device=keys.device)
    return scrambled(keys[:, None] + numbers[:, None] * STRIDES[2])


class Dropout(nn.Module):
    """`place`: tells apart what is dropped in one layer."""

    def __init__(self, p: float, place: int = 0):
        super().__init__()
        self.p, self.place = p, place

    def forward(self, x: torch.Tensor, keys: torch.Tensor | None, first: int = 0) -> torch.Tensor:
        """x [..., D], as a rule [B, S, D], and keys [...] for each row of it, as a rule the layer's of its tokens
        [B, S] -> x with a share p of its features zero, the others multiplied by 1 / (1 - p). Outside of training x.
        `first`: the number of x's first feature, where it is a part.
        """
        if not self.training or not self.p:
            return x
        assert keys is not None, "a model with dropout is trained with the keys of its tokens"
        numbers = torch.arange(first, first + x.shape[-1], device=x.device)
        features = scrambled(numbers + self.place * STRIDES[2])
        drawn = scrambled(keys[..., None] ^ features)  # [..., D]
        return torch.where(drawn >= int(self.p * 2**32), x / (1 - self.p), 0)


class DroppingKernel(AttentionKernel):
    """Attention of which training drops a share p of the probabilities, behind their softmax (arXiv:1706.03762, 5.4).

    Library kernels draw by a generator of their own, if they drop at all. So in training all probabilities are written
    out, [B, H, Q, S], and kept for backward, twice in float32: at 12 heads and 1024 tokens 100 MB for each sample and
    layer. Elsewhere it is AttentionKernel.
    """

    takes_parts = drops = True

    def __init__(self, p: float, backend: str = "auto", causal: bool = True, window: int = 0):
        super().__init__(backend, causal, window)
        self.dropout = Dropout(p)
        self.share = 0  # which of as many equal shares of the heads as tensor parallel has made is here

    def with_backend(self, backend: str) -> AttentionKernel:
        return DroppingKernel(self.dropout.p, backend, self.causal, self.window).train(self.training)

    def uses_flex(self, queries: Tokens) -> bool:
        return not self.training and super().uses_flex(queries)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: object,
        keys: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As AttentionKernel's; `keys` [B, Q] are the layer's, of the queries. The tokens of k and v are the whole
        sequence, in its order.
        """
        if not self.training:
            return super().forward(q, k, v, mask)
        assert keys is not None, "a model with dropout is trained with the keys of its tokens"
        heads = q.shape[1]
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        scores = (q @ k.mT) * q.shape[-1] ** -0.5  # [B, H, Q, S]
        if mask is None and self.causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
        weights = self.dropout(weights, head_keys(keys, self.share * heads, heads))
        return weights.to(v.dtype) @ v
