"""A hash of 32 bits, for random numbers that follow from a key instead of from the order in which they are drawn.

Two rounds of multiply and shift, held in int64 so that no product overflows and every device agrees; the multipliers
are below 2^31.
"""

import hashlib
import math
from collections.abc import Sequence

import torch

MASK = 2**32 - 1
MULTIPLIERS = (0x7FEB352D, 0x21F0AAAD)  # odd, by C. Wellons' search for hashes without bias
STRIDES = (0x1E3779B1, 0x2545F491, 0x3C6EF35F)  # odd, apart for what is counted side by side


def key_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def scrambled(x: torch.Tensor) -> torch.Tensor:
    """A permutation of the 32-bit numbers, element by element of an int64 tensor of any shape; of larger and negative
    ones the low 32 bits count.
    """
    x = x & MASK
    for multiplier, shift in zip(MULTIPLIERS, (16, 15), strict=True):
        x = ((x ^ (x >> shift)) * multiplier) & MASK
    return x ^ (x >> 15)


def of_tokens(key: str, samples: torch.Tensor, length: int) -> torch.Tensor:
    """samples [B], their numbers -> a number of 32 bits for each of their tokens, int64 [B, length]."""
    tokens = torch.arange(length, device=samples.device) * STRIDES[0]
    return scrambled(scrambled(samples ^ key_of(key))[:, None] + tokens)


def bits(key: str, offset: Sequence[int], shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """32 random bits for each place of a part of a tensor, int64 of that `shape`: a function of the key and the place
    in the whole. `offset`: where in the whole the part begins.
    """
    drawn = torch.full((), key_of(key), dtype=torch.int64, device=device)
    for start, size in zip(offset, shape, strict=True):
        drawn = scrambled(drawn[..., None] ^ scrambled(torch.arange(start, start + size, device=device)))
    return drawn


def normal(key: str, offset: Sequence[int], shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Normal with mean 0 and variance 1, float32 of that `shape`, by the inverse of its distribution function."""
    centred = (bits(key, offset, shape, device).double() + 0.5) / 2**31 - 1  # between -1 and 1, neither of them
    return (torch.erfinv(centred) * math.sqrt(2)).float()
