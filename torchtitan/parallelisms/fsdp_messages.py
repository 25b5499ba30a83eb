"""FSDP's messages: when there are any, and their sizes. Imports no torch, so that ranks and the planner count alike."""

from collections.abc import Iterator, Sequence

BLOCK = 32
"""Numbers that share a scale."""
PIECE = 2**26
"""Numbers of an FSDP unit, of all ranks together, that are packed, sent and unpacked at once: 256 MiB in float32."""


BITS = {"none": 0, "int8": 8, "int4": 4}
"""Names of the integers in quantized messages -> bits; 0: not quantized."""


def block_bytes(bits: int) -> int:
    """Return the bytes of a block and its scale."""
    return BLOCK * bits // 8 + 1


def resharding(policy: str | int, pp: int) -> bool | int:
    """Return True if blocks free their gathered parameters after forward, or the ranks that then share a second copy.

    `policy`: parallelism.fsdp_reshard_after_forward. By default they stay in a pipeline, which would gather them again
    for every microbatch.
    """
    if isinstance(policy, int):
        return policy
    return pp == 1 if policy == "default" else policy == "always"


def may_gather_float8(reshard: bool | int, cpu_offload: bool, gather_int8: bool) -> bool:
    """Return True if FSDP may gather weights in float8, which it cannot from second shards or from the host."""
    return isinstance(reshard, bool) and not (cpu_offload or gather_int8)


def message_bytes(sizes: Sequence[int], bits: int) -> int:
    """Return the bytes of a message of parts of these sizes."""
    return sum(-(-size // BLOCK) for size in sizes) * block_bytes(bits)


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
