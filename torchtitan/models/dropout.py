"""Dropout that no plan changes: each draw is a function of (seed, step, sample, token, layer, place in it, feature).

A generator's numbers would depend on which rank draws how many before. Here each token of a step has a key, one number,
which comes with the batch and is split with its tokens; a layer makes its own keys of them, and a feature is kept or
not by a hash of key and feature. So microbatches, ranks, recompute and a resume meet the same draws.

STRIDES are apart for tokens, layers and places.
"""

import torch
from torch import nn

from torchtitan.keyed import STRIDES, key_of, scrambled


def token_keys(seed: int, step: int, samples: torch.Tensor, length: int) -> torch.Tensor:
    """samples [B], their numbers among all samples of the step -> a key for each of their tokens, int64 [B, length]."""
    tokens = torch.arange(length, device=samples.device) * STRIDES[0]
    return scrambled(scrambled(samples ^ key_of(f"{seed}/dropout/{step}"))[:, None] + tokens)


def layer_keys(keys: torch.Tensor, layer: int) -> torch.Tensor:
    """The keys [B, S] of a batch's tokens -> those of a layer, which may be -1 for what comes before the first."""
    return scrambled(keys + (layer + 2) * STRIDES[1])


class Dropout(nn.Module):
    """`place`: tells apart what is dropped in one layer."""

    def __init__(self, p: float, place: int = 0):
        super().__init__()
        self.p, self.place = p, place

    def forward(self, x: torch.Tensor, keys: torch.Tensor | None, first: int = 0) -> torch.Tensor:
        """x [B, S, D] and the layer's keys of its tokens [B, S] -> x with a share p of its features zero, the others
        multiplied by 1 / (1 - p). Outside of training x. `first`: the number of x's first feature, where it is a part.
        """
        if not self.training or not self.p:
            return x
        assert keys is not None, "a model with dropout is trained with the keys of its tokens"
        numbers = torch.arange(first, first + x.shape[-1], device=x.device)
        features = scrambled(numbers + self.place * STRIDES[2])
        drawn = scrambled(keys[..., None] ^ features)  # [B, S, D]
        return torch.where(drawn >= int(self.p * 2**32), x / (1 - self.p), 0)
