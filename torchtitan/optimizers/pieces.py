"""Pieces of a shard that are computed one after the other, so that temporaries stay small."""

from collections.abc import Iterator, Sequence
from math import prod

import torch

from torchtitan.torch_internals.dispatch import FakeTensor

ON_CPU, ELSEWHERE = 2**18, 2**21
"""Elements of a piece: a temporary in float32 takes 1 MiB, which stays in the cache of a CPU, or 8 MiB."""
FEWEST_REHEARSED = 16
"""Pieces of a large shard without values."""

Index = tuple[slice, ...]


def piece_size(shard: torch.Tensor) -> int:
    """Return the number of elements of a piece of a shard of any shape."""
    if isinstance(shard, FakeTensor):
        # In a rehearsal an operator takes 0.2 ms at any size, so there are few pieces, yet small against the shard.
        return max(ELSEWHERE, shard.numel() // FEWEST_REHEARSED)
    return ON_CPU if shard.device.type == "cpu" else ELSEWHERE


def pieces(shape: Sequence[int], size: int) -> Iterator[Index]:
    """Yield indices that cut a tensor of this shape into pieces of at most `size` elements, if a row has as many."""
    if not shape:
        yield ()
        return
    row = prod(shape[1:])
    if row > size and len(shape) > 1:
        for start in range(shape[0]):
            for inner in pieces(shape[1:], size):
                yield slice(start, start + 1), *inner
    else:
        rows = max(1, size // max(1, row))
        for start in range(0, shape[0], rows):
            yield (slice(start, start + rows),)
