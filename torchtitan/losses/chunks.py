"""The number of chunks of the head and the loss, by the size of the logits. Imports no torch."""

CHUNK_BYTES = {"cpu": 2**29, "cuda": 2**30}
"""Limit of a chunk's float32 logits, by type of device; others have cuda's.

Each chunk reads and writes the head's gradient once, and while it is computed its logits exist two to three times.
"""


def auto_chunks(rows: int, width: int, device_type: str) -> int:
    """Return the number of chunks, at least 1, that keeps float32 logits [rows, width] within CHUNK_BYTES each."""
    rows_of_chunk = max(1, CHUNK_BYTES.get(device_type, CHUNK_BYTES["cuda"]) // max(1, 4 * width))
    return max(1, -(-rows // rows_of_chunk))
