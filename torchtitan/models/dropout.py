"""Dropout that no plan changes: each draw is a function of (seed, step, sample, token, layer, place in it, feature).

A generator's numbers would depend on which rank draws how many before. Here each token of a step has a key, one number,
which comes with the batch and is split with its tokens; a layer makes its own keys of them, and a feature is kept or
not by a hash of key and feature. So microbatches, ranks, recompute and a resume meet the same draws.

The hash is two rounds of multiply and shift on 32 bits, held in int64 so that no product overflows and every device
agrees; the multipliers are below 2^31.
"""

import hashlib

import torch
from torch import nn

MASK = 2**32 - 1
MULTIPLIERS = (0x7FEB352D, 0x21F0AAAD)  # odd, by C. Wellons' search for hashes without bias
STRIDES = (0x1E3779B1, 0x2545F491, 0x3C6EF35F)  # odd, apart for tokens, layers and places


def token_keys(seed: int, step: int, samples: torch.Tensor, length: int) -> torch.Tensor:
    """samples [B], their numbers among all samples of the step -> a key for each of their tokens, int64 [B, length]."""
    digest = hashlib.sha256(f"{seed}/dropout/{step}".encode()).digest()[:4]
    tokens = torch.arange(length, device=samples.device) * STRIDES[0]
    return scrambled(scrambled(samples ^ int.from_bytes(digest, "little"))[:, None] + tokens)


def layer_keys(keys: torch.Tensor, layer: int) -> torch.Tensor:
    """The keys [B, S] of a batch's tokens -> those of a layer, which may be -1 for what comes before the first."""
    return scrambled(keys + (layer + 2) * STRIDES[1])


def scrambled(x: torch.Tensor) -> torch.Tensor:
    """A permutation of the 32-bit numbers; of larger and negative ones the low 32 bits count."""
    x = x & MASK
    for multiplier, shift in zip(MULTIPLIERS, (16, 15), strict=True):
        x = ((x ^ (x >> shift)) * multiplier) & MASK
    return x ^ (x >> 15)


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
