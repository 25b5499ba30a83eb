"""The end of the data: the number of samples and steps of whole epochs or of a token budget, and joined folders.

With training.epochs every block of every source (or every document, with packing) is read once per epoch for any number
of ranks. If too few samples are left for the last step, it is filled with samples without loss.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from torchtitan.datasets.sample_packing import Packing, PackReader
from torchtitan.datasets.shuffle import key, permute
from torchtitan.datasets.tokens import BlockReader, TokenShards


def samples_in(
    sources: Sequence[TokenShards],
    seq_len: int,
    epochs: int,
    seed: int = 0,
    shuffle: bool = True,
    packing: Packing | None = None,
) -> int:
    """Return the number of global samples in `epochs` passes; with packing it depends on the seed.

    Raises DataError for shards shorter than a sample, or documents longer than a pack."""
    if packing is not None:
        return PackReader(sources, seq_len, seed, shuffle, packing).samples(epochs)
    return epochs * sum(source.blocks(seq_len) for source in sources)


def samples_of(tokens: int, seq_len: int) -> int:
    """Return the number of full samples in a token budget, rounded up."""
    return -(-tokens // seq_len)


def end_of(
    sources: Sequence[TokenShards],
    seq_len: int,
    epochs: int | None,
    tokens: int | None,
    seed: int = 0,
    shuffle: bool = True,
    packing: Packing | None = None,
) -> int | None:
    """Return the number of global samples in the data; None if endless. Raises errors like `samples_in`."""
    if tokens is not None and packing is not None:
        return PackReader(sources, seq_len, seed, shuffle, packing).samples_with(tokens)
    if tokens is not None:
        return samples_of(tokens, seq_len)
    return None if epochs is None else samples_in(sources, seq_len, epochs, seed, shuffle, packing)


def steps_for(samples: int, global_batch_size: int) -> int:
    """Return the number of steps, rounded up: the last one may be filled up."""
    return -(-samples // global_batch_size)


class JoinedBlocks:
    """A reader like BlockReader for several folders: blocks are numbered consecutively and shuffled together."""

    def __init__(self, sources: Sequence[TokenShards], seq_len: int, seed: int, shuffle: bool) -> None:
        self.seq_len, self.seed, self.shuffle = seq_len, seed, shuffle
        self.readers = [BlockReader(source, seq_len, seed, shuffle=False) for source in sources]
        self.firsts = np.array([0, *accumulate(reader.blocks for reader in self.readers)])
        self.blocks = int(self.firsts[-1])

    def order(self, samples: np.ndarray) -> np.ndarray:
        """Map global sample indices to block numbers."""
        epochs, blocks = np.divmod(samples, self.blocks)
        return permute(blocks, self.blocks, key(self.seed, epochs)) if self.shuffle else blocks

    def read(self, blocks: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """Read blocks like BlockReader.read."""
        rows = np.empty((len(blocks), self.seq_len + 1), dtype=np.int64)
        begin_rows, begin_columns = [], []
        for reader, indices, starts in self._by_reader(blocks):
            rows[indices], (within, columns) = reader.read(starts)
            begin_rows.append(indices[within])
            begin_columns.append(columns)
        return rows, (np.concatenate(begin_rows), np.concatenate(begin_columns))

    def trained(self, blocks: np.ndarray) -> np.ndarray:
        """Return loss masks like BlockReader.trained."""
        flags = np.ones((len(blocks), self.seq_len + 1), dtype=bool)
        for reader, indices, starts in self._by_reader(blocks):
            mask = reader.trained(starts)
            if mask is not None:
                flags[indices] = mask
        return flags

    def _by_reader(self, blocks: np.ndarray) -> list[tuple[BlockReader, np.ndarray, np.ndarray]]:
        """Return each reader with its rows and the start tokens of their blocks."""
        numbers = self.firsts.searchsorted(blocks, side="right") - 1
        rows = [np.flatnonzero(numbers == number) for number in range(len(self.readers))]
        return [
            (reader, indices, (blocks[indices] - first) * self.seq_len)
            for reader, first, indices in zip(self.readers, self.firsts[:-1], rows, strict=True)
            if len(indices)
        ]
