"""Random numbers from a 32-bit hash of a key, independent of the drawing order.

The hash is two rounds of multiply and shift, in int64 so that no product overflows and all devices agree; the
multipliers are below 2^31.
"""

import hashlib
import math
from collections.abc import Sequence

import torch

from torchtitan.core.fused import NEVER, Fused

MASK = 2**32 - 1
MULTIPLIERS = (0x7FEB352D, 0x21F0AAAD)  # odd, by C. Wellons' search for hashes without bias
STRIDES = (0x1E3779B1, 0x2545F491, 0x3C6EF35F)  # odd; one for each quantity that is counted in parallel


def key_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def scrambled(x: torch.Tensor) -> torch.Tensor:
    """Permute 32-bit numbers, element by element of an int64 tensor of any shape. Higher bits are ignored."""
    x = x & MASK
    for multiplier, shift in zip(MULTIPLIERS, (16, 15), strict=True):
        x = ((x ^ (x >> shift)) * multiplier) & MASK
    return x ^ (x >> 15)


def scramble_int32_(x: torch.Tensor) -> torch.Tensor:
    """Apply `scrambled` in place to 32-bit numbers in an int32 tensor of any shape, in half of the memory.

    Products wrap around to the same 32 bits; shifts keep the sign, so a mask clears the bits that they shift in.
    """
    for multiplier, shift in zip(MULTIPLIERS, (16, 15), strict=True):
        x ^= (x >> shift).bitwise_and_(MASK >> shift)
        x *= multiplier
    x ^= (x >> 15).bitwise_and_(MASK >> 15)
    return x


def of_tokens(key: str, samples: torch.Tensor, length: int) -> torch.Tensor:
    """Return a 32-bit number, int64 [B, length], for each token of the samples with indices [B]."""
    tokens = torch.arange(length, device=samples.device) * STRIDES[0]
    return scrambled(scrambled(samples ^ key_of(key))[:, None] + tokens)


def bits(key: str, offset: Sequence[int], shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return 32 random bits for each element of a shard, int64 of that `shape`.

    They depend on the key and on the element's index in the full tensor; `offset` is the index of the shard's start.
    """
    return hashed(key_of(key), offset, shape, device)


def hashed(number: int, offset: Sequence[int], shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return `bits`, int64 of that `shape`, for a key that is already a number.

    A compiled function takes another number without compiling again.
    """
    values = torch.full((), number, dtype=torch.int64, device=device)
    for start, size in zip(offset, shape, strict=True):
        values = scrambled(values[..., None] ^ scrambled(torch.arange(start, start + size, device=device)))
    return values


def normal(key: str, offset: Sequence[int], shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return standard normal values of a shard, float32 of that `shape`, by inverting the distribution function.

    Arguments as for `bits`.
    """
    values = torch.empty(tuple(shape), dtype=torch.float32, device=device)
    _fused_normal(values, key_of(key), tuple(offset))
    return values


def _fill_with_normal(values: torch.Tensor, number: int, offset: tuple[int, ...]) -> None:
    """Fill a shard of any shape; `number` and `offset` as for `hashed`."""
    centred = (hashed(number, offset, values.shape, values.device).double() + 0.5) / 2**31 - 1  # within (-1, 1)
    values.copy_(torch.erfinv(centred) * math.sqrt(2))


_fused_normal = Fused(_fill_with_normal, dynamic=True, after=NEVER)
