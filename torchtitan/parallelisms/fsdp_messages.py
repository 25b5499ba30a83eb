"""Sizes of FSDP's quantized messages (quantized_collectives). Imports no torch, so that the planner counts alike."""

from collections.abc import Iterator, Sequence

BLOCK = 32
"""Numbers that share a scale."""
PIECE = 2**26
"""Numbers of an FSDP unit, of all ranks together, that are packed, sent and unpacked at once: 256 MiB in float32."""


def message_bytes(sizes: Sequence[int], bits: int) -> int:
    """Return the bytes of a message of parts of these sizes."""
    return sum(-(-size // BLOCK) for size in sizes) * (BLOCK * bits // 8 + 1)


def split_parts(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield the sizes of the parts in each piece of a row with parts of `sizes`; a piece has at most `most` numbers.

    Parts are cut between their blocks only, so that pieces have the blocks of the row. A piece has at least one block.
    """
    most = max(BLOCK, most // BLOCK * BLOCK)
    piece: list[int] = []
    for size in sizes:
        while size:
            room = most - sum(piece)
            length = size if size <= room else room // BLOCK * BLOCK
            if length:
                piece.append(length)
                size -= length
            if size:
                yield piece
                piece = []
    if piece:
        yield piece
