"""Dropout that no plan changes: each draw is a function of (seed, step, sample, token, layer, place in it, feature), of
an attention's probabilities one of (seed, step, sample, query, layer, head, key).

A generator's numbers would depend on which rank draws how many before. Here each token of a step has a key, one number,
which comes with the batch and is split with its tokens; a layer makes its own keys of them, and a feature is kept or
not by a hash of key and feature. So microbatches, ranks, recompute and a resume meet the same draws.

STRIDES are apart for tokens, layers, and places or heads.

Noise on the embeddings of words in training (NEFTune, arXiv:2310.05914), which no plan changes.

It is drawn as what dropout.py drops: by (seed, step, sample, token, feature). A record gets as much of it whether it
has a sample for itself or shares one, and padding makes it no less: its own length decides.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from torchtitan.core.errors import JobError
from torchtitan.core.keyed_rng import STRIDES, of_tokens, scrambled
from torchtitan.models.attention import AttentionKernel
from torchtitan.parallelisms.context.kernel import Tokens
from torchtitan.parallelisms.plan import ParallelPlan


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


PLACE = 1  # among what is drawn before the first layer: dropout of embeddings is 0


def record_lengths(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """tokens [B, S] and perhaps document_ids [B, S], from 0 to at most S -> of each token, how many tokens the document
    has that attention keeps it to, or the sample where there is no such mask: int64 [B, S].
    """
    tokens, documents = batch["tokens"], batch.get("document_ids")
    if documents is None:
        return torch.full_like(tokens, tokens.shape[1])
    counts = documents.new_zeros(len(documents), documents.shape[1] + 1)
    return counts.scatter_add(1, documents, torch.ones_like(documents)).gather(1, documents)


class EmbeddingNoise(nn.Module):
    """Uniform between -b and b, where b = alpha / sqrt(L D): of a record of L tokens the noise has a norm of about
    alpha / sqrt(3).
    """

    def __init__(self, alpha: float):
        super().__init__()
        self.alpha = alpha

    def forward(self, x: torch.Tensor, keys: torch.Tensor | None, lengths: torch.Tensor | None) -> torch.Tensor:
        """x [B, S, D], keys [B, S] of its tokens, those of what comes before the first layer, and lengths [B, S] of
        their records -> x with noise, in training.
        """
        if not self.training:
            return x
        assert keys is not None and lengths is not None, "noise is drawn with the keys of the tokens, by their records"
        features = scrambled(torch.arange(x.shape[-1], device=x.device) + PLACE * STRIDES[2])
        drawn = scrambled(keys[..., None] ^ features) >> 8  # [B, S, D], of 24 bits, which float32 holds
        bound = self.alpha * (lengths * x.shape[-1]).to(torch.float32).rsqrt()  # [B, S]
        return x + ((drawn.to(torch.float32) / 2**23 - 1) * bound[..., None]).to(x.dtype)


def add_noise(model: nn.Module, plan: ParallelPlan, alpha: float) -> ParallelPlan:
    """Give the model noise, none for 0, in place; the plan that fits it then. JobError where it has no place for it."""
    if not alpha:
        return plan
    if not hasattr(model, "noise"):
        raise JobError(
            f"training.neftune_alpha: given {alpha:g}; allowed: 0 for {type(model).__name__}, which is no Decoder of "
            "torchtitan/models; leave it out"
        )
    model.noise = EmbeddingNoise(alpha)
    return replace(plan, with_embedding=(*plan.with_embedding, "noise"))
