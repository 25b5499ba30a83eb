"""Noise on the embeddings of words in training (NEFTune, arXiv:2310.05914), which no plan changes.

It is drawn as what dropout.py drops: by (seed, step, sample, token, feature). A record gets as much of it whether it
has a sample for itself or shares one, and padding makes it no less: its own length decides.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from torchtitan.errors import JobError
from torchtitan.keyed import STRIDES, scrambled
from torchtitan.parallelisms.plan import ParallelPlan

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
