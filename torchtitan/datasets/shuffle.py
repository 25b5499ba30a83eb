"""Seeded permutations that are computed instead of stored.

The k-th element of a shuffle of any length costs O(1) time and memory, so an order of 1e10 samples needs no table and a
resume needs no replay. A Feistel network over b bits is a bijection whatever its round function; results beyond the
length go through the network again until they fall inside ("cycle walking"), which keeps it one. As 2^b is less than
twice the length, two passes do on average. NumPy's generators are not used, because their streams may change.
"""

from __future__ import annotations

from torchtitan.core.lazy_numpy import np

ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 2**64 - 1


def key(*numbers: int | np.ndarray) -> np.ndarray:
    """Return a 64-bit key from a seed and its uses (epoch, part, block); arrays give one key per element."""
    value = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        bits = number & _WORD if isinstance(number, int) else number.astype(np.uint64)
        value = _mix((value ^ bits) + _GOLDEN)
    return value


def permute(index: np.ndarray, length: int, key: np.ndarray) -> np.ndarray:
    """Return where a shuffle of range(length) sends each index, as int64.

    `key`: one for all indices, or one per index. The indices must be below the length."""
    bits = max(2, (length - 1).bit_length())
    key = np.broadcast_to(key, index.shape)
    out = _network(index.astype(np.uint64), bits, key)
    outside = np.flatnonzero(out >= length)
    while len(outside):
        out[outside] = _network(out[outside], bits, key[outside])
        outside = outside[out[outside] >= length]
    return out.astype(np.int64)


def _network(x: np.ndarray, bits: int, key: np.ndarray) -> np.ndarray:
    """Apply a Feistel network. Its halves, which may differ by one bit in width, change each other in turn."""
    low_bits = bits // 2
    high_mask, low_mask = (1 << (bits - low_bits)) - 1, (1 << low_bits) - 1
    high, low = x >> low_bits, x & low_mask
    for i in range(1, ROUNDS, 2):
        high ^= _mix((low ^ key) + (i * _GOLDEN & _WORD)) & high_mask
        low ^= _mix((high ^ key) + ((i + 1) * _GOLDEN & _WORD)) & low_mask
    return high << low_bits | low


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply the finalizer of splitmix64 (Steele, Lea, Flood 2014), which needs the wrap-around of uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
