"""Where data end: the samples and steps of whole passes over prepared shards, or of a budget of tokens, and the blocks
of several folders as one.

With training.epochs every block of every source (or every document, where these are packed) is met once in a pass,
whatever the number of ranks. The last step may want more samples than are left: it is filled with samples of which no
label counts.
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
    """Global samples of so many passes, which with packing depend on the seed. Raises DataError for shards that are
    shorter than a sample, or documents that are longer than a pack."""
    if packing is not None:
        return PackReader(sources, seq_len, seed, shuffle, packing).samples(epochs)
    return epochs * sum(source.blocks(seq_len) for source in sources)


def samples_of(tokens: int, seq_len: int) -> int:
    """Those of a budget of tokens, where samples are full: one that is begun is whole."""
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
    """The global sample before which data end; None where they do not. Raises as `samples_in`."""
    if tokens is not None and packing is not None:
        return PackReader(sources, seq_len, seed, shuffle, packing).samples_with(tokens)
    if tokens is not None:
        return samples_of(tokens, seq_len)
    return None if epochs is None else samples_in(sources, seq_len, epochs, seed, shuffle, packing)


def steps_for(samples: int, global_batch_size: int) -> int:
    """The last one may be filled up."""
    return -(-samples // global_batch_size)


class JoinedBlocks:
    """As a BlockReader, of several folders: their blocks are numbered through, and every pass shuffles all of them."""

    def __init__(self, sources: Sequence[TokenShards], seq_len: int, seed: int, shuffle: bool) -> None:
        self.seq_len, self.seed, self.shuffle = seq_len, seed, shuffle
        self.readers = [BlockReader(source, seq_len, seed, shuffle=False) for source in sources]
        self.firsts = np.array([0, *accumulate(reader.blocks for reader in self.readers)])
        self.blocks = int(self.firsts[-1])

    def order(self, samples: np.ndarray) -> np.ndarray:
        """Global sample indices to the numbers of their blocks."""
        epochs, blocks = np.divmod(samples, self.blocks)
        return permute(blocks, self.blocks, key(self.seed, epochs)) if self.shuffle else blocks

    def read(self, blocks: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """As BlockReader.read."""
        rows = np.empty((len(blocks), self.seq_len + 1), dtype=np.int64)
        begin_rows, begin_columns = [], []
        for reader, here, starts in self._by_reader(blocks):
            rows[here], (within, columns) = reader.read(starts)
            begin_rows.append(here[within])
            begin_columns.append(columns)
        return rows, (np.concatenate(begin_rows), np.concatenate(begin_columns))

    def trained(self, blocks: np.ndarray) -> np.ndarray:
        """As BlockReader.trained."""
        flags = np.ones((len(blocks), self.seq_len + 1), dtype=bool)
        for reader, here, starts in self._by_reader(blocks):
            own = reader.trained(starts)
            if own is not None:
                flags[here] = own
        return flags

    def _by_reader(self, blocks: np.ndarray) -> list[tuple[BlockReader, np.ndarray, np.ndarray]]:
        """Each reader with the rows that are its, and where their blocks begin in it."""
        numbers = self.firsts.searchsorted(blocks, side="right") - 1
        rows = [np.flatnonzero(numbers == number) for number in range(len(self.readers))]
        return [
            (reader, here, (blocks[here] - first) * self.seq_len)
            for reader, first, here in zip(self.readers, self.firsts[:-1], rows, strict=True)
            if len(here)
        ]
