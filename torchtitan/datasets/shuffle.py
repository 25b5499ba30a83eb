"""Seeded permutations that are computed instead of stored.

The k-th element of a shuffle of any length costs O(1) time and memory, so an order of 1e10 samples needs no table and a
resume needs no replay. A Feistel network over 2b bits is a bijection whatever its round function; results beyond the
length go through the network again until they fall inside ("cycle walking"), which keeps it one. The domain is less
than four times the length, so a few passes do. Nothing here depends on NumPy's generators, whose streams may change.
"""

import numpy as np

ROUNDS = 6
_WORD = 2**64 - 1


def key(*numbers: int | np.ndarray) -> int | np.ndarray:
    """64 bits from a seed and from what it is used for (epoch, part, block). Arrays (of uint64) give arrays."""
    value: int | np.ndarray = 0
    for number in numbers:
        value = _mix(value ^ number)
    return value


def permute(index: np.ndarray, length: int, key: int | np.ndarray) -> np.ndarray:
    """Where a shuffle of range(length) sends each index, as int64; with a key for each, in the shuffle of that key. The
    indices must be below the length."""
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    out = np.array(index, dtype=np.uint64)
    round_keys = [np.broadcast_to(np.asarray(_mix(key ^ i), dtype=np.uint64), out.shape) for i in range(ROUNDS)]
    outside = np.arange(len(out))
    while len(outside):
        x = out[outside]
        left, right = x >> half, x & low
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key[outside]) & low)
        out[outside] = left << half | right
        outside = outside[out[outside] >= length]
    return out.astype(np.int64)


def _mix(x):
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014), for a Python int or an array of uint64."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)
