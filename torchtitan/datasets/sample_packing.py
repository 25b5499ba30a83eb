"""Whole documents as samples, several in one where they fit: for what is learned record by record.

A document is never cut and never read behind another: attention, positions and labels keep to it, and what is left of a
sample is padding that nobody learns. Which documents share a sample is a function of their lengths, the seed and the
epoch alone, worked out anew for each epoch, window by window of its shuffled documents. So the number of samples is
known before the first one, and the position in the data is a number, for any number of ranks.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from torchtitan.datasets.shuffle import key, permute
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.tokens import TokenReader, TokenShards

Split = float | int
"""A share of each source's documents, below 1; or how many documents of all sources together."""
PACKS, SPLIT, GROUPS = 0x7061636B, 0x73706C69, 0x67726F75
"""Keep the order of packs and of groups, and who is held out, apart from the order of documents under the same seed."""
GROUPED_STEPS = 64
"""Steps whose samples are put in order of their length together."""
KEPT_EPOCHS = 2


class Packing(NamedTuple):
    """How documents become samples. `window`: documents that are packed together; 1: each is a sample of its own.
    `split`: what of the documents is held out, and `held_out` whether these are read, or the others. `left`: padding
    stands before them. `together`: neighbours that stay so, as pairs do; each is a sample then. `multiple`: batches are
    as long as their longest sample, up to a multiple of this; 0: all as long as a sample may be. `group`: samples of a
    step, where those of one are to be about as long; else 0. `shard`: which of how many equal parts of the documents
    that are not held out is read.
    """

    window: int
    pad_id: int
    split: Split | None = None
    held_out: bool = False
    left: bool = False
    together: int = 1
    multiple: int = 0
    group: int = 0
    shard: tuple[int, int] = (1, 1)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the order of samples depends on, JSON-able."""
        said: dict[str, Any] = {} if self.split is None else {"split": self.split}
        said |= {"group": self.group} if self.group else {}
        said |= {"shard": list(self.shard)} if self.shard != (1, 1) else {}
        return {"window": self.window} | said


def best_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """[n] lengths, none above the room -> the number of the pack that each goes into, [n].

    The longest first, each into the pack that it leaves the least room in (best fit decreasing, which needs at most
    11/9 of the fewest possible packs and one more: D. S. Johnson, 1973). O(n log n).
    """
    packs = np.empty(len(lengths), dtype=np.int64)
    rooms: list[int] = []  # that packs have left, sorted
    having: dict[int, list[int]] = {}  # such a room, the packs
    sizes, count = lengths.tolist(), 0
    for index in np.argsort(-lengths, kind="stable").tolist():
        place = bisect_left(rooms, sizes[index])
        if place == len(rooms):
            left, pack, count = room, count, count + 1
        else:
            left = rooms[place]
            pack = having[left].pop()
            if not having[left]:
                del having[left], rooms[place]
        packs[index] = pack
        left -= sizes[index]
        if left not in having:
            having[left] = []
            insort(rooms, left)
        having[left].append(pack)
    return packs


def held_out_of(sizes: Sequence[int], split: Split) -> list[int]:
    """How many documents of each source are held out, as large a share of every one. DataError unless some are held
    out and some left."""
    whole = sum(sizes)
    share = Fraction(str(split)) if split < 1 else Fraction(int(split), max(whole, 1))
    exact = [share * size for size in sizes]
    counts = [int(part) for part in exact]
    behind = sorted(range(len(sizes)), key=lambda i: counts[i] - exact[i])
    for i in behind[: int(sum(exact) + Fraction(1, 2)) - sum(counts)]:
        counts[i] += 1
    if not 0 < sum(counts) < whole:
        raise DataError(
            f"validation.split = {split}: {sum(counts)} of {whole} documents would be held out; allowed: at least one "
            "and not all; correct it, or give more data"
        )
    return counts


class _Epoch(NamedTuple):
    documents: np.ndarray
    """Numbers of documents, pack after pack."""
    begins: np.ndarray
    """[packs + 1] Where in these each pack begins."""


class PackReader:
    """As a BlockReader, of packs of seq_len + 1 tokens from one or several folders, whose documents are numbered
    through. DataError for documents that are longer than that."""

    def __init__(
        self, sources: Sequence[TokenShards], seq_len: int, seed: int, shuffle: bool, packing: Packing
    ) -> None:
        self.room, self.seed, self.shuffle, self.packing = seq_len + 1, seed, shuffle, packing
        self.readers = [TokenReader(source) for source in sources]
        self.firsts = np.array([0, *accumulate(len(reader.documents) for reader in self.readers)])
        self.starts = np.concatenate([reader.documents for reader in self.readers])
        self.lengths = np.concatenate([lengths_of(reader, seq_len) for reader in self.readers])
        self.numbers = self._chosen()
        self._epochs: dict[int, _Epoch] = {}
        self._ends: list[int] = []  # of the epochs that were worked out: packs up to their end

    def samples(self, epochs: int) -> int:
        """In so many passes."""
        return self._end(epochs - 1) if epochs else 0

    def samples_with(self, tokens: int) -> int:
        """How many of the first samples hold so many tokens of documents; a sample that is begun is whole."""
        epoch, before = 0, 0
        while True:
            documents, begins = self._epoch(epoch)
            held = before + np.cumsum(self.lengths[documents])[begins[1:] - 1]
            if held[-1] >= tokens:
                return (self._end(epoch - 1) if epoch else 0) + int(held.searchsorted(tokens)) + 1
            epoch, before = epoch + 1, int(held[-1])

    @property
    def efficiency(self) -> float:
        """The share of the first pass that is no padding."""
        return float(self.lengths[self.numbers].sum()) / (self.samples(1) * self.room)

    def order(self, samples: np.ndarray) -> np.ndarray:
        """Global samples are found by their numbers."""
        return samples

    def read(self, samples: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """As BlockReader.read. Padding counts as a document."""
        rows, _, begins = self._read(samples)
        return rows, begins

    def trained(self, samples: np.ndarray) -> np.ndarray:
        """As BlockReader.trained."""
        return self._read(samples)[1]

    def _read(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
        for reader in self.readers:
            reader.refuse_shrunk()
        ids = np.full((len(samples), self.room), self.packing.pad_id, dtype=np.int64)
        trained = np.zeros(ids.shape, dtype=bool)
        rows, columns = [], []
        for row, sample in enumerate(samples.tolist()):
            documents = self._pack(sample)
            filled = self.room - int(self.lengths[documents].sum()) if self.packing.left else 0
            if filled:
                rows.append(row)
                columns.append(0)
            for document in documents.tolist():
                end = filled + int(self.lengths[document])
                reader = self.readers[int(self.firsts.searchsorted(document, side="right")) - 1]
                reader.copy(int(self.starts[document]), ids[row, filled:end], trained[row, filled:end])
                rows.append(row)
                columns.append(filled)
                filled = end
            if filled < self.room:
                rows.append(row)
                columns.append(filled)
        return ids, trained, (np.array(rows, dtype=np.int64), np.array(columns, dtype=np.int64))

    def _pack(self, sample: int) -> np.ndarray:
        epoch = 0
        while self._end(epoch) <= sample:
            epoch += 1
        documents, begins = self._epoch(epoch)
        place = sample - (self._ends[epoch - 1] if epoch else 0)
        return documents[begins[place] : begins[place + 1]]

    def _end(self, epoch: int) -> int:
        for number in range(len(self._ends), epoch + 1):
            self._ends.append((self._ends[-1] if number else 0) + len(self._epoch(number).begins) - 1)
        return self._ends[epoch]

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            for old in list(self._epochs)[: 1 - KEPT_EPOCHS]:
                del self._epochs[old]
            self._epochs[epoch] = self._packed(epoch)
        return self._epochs[epoch]

    def _packed(self, epoch: int) -> _Epoch:
        order = np.arange(len(self.numbers) // self.packing.together)
        if self.shuffle:
            order = permute(order, len(order), key(self.seed, epoch))
        order = self._members(order)
        if self.packing.group:
            order = self._grouped(order, epoch)
        documents, counts = self.numbers[order], []
        if self.packing.window == 1:
            return _Epoch(documents, np.arange(len(documents) + 1))
        for first in range(0, len(documents), self.packing.window):
            window = documents[first : first + self.packing.window]
            packs = best_fit(self.lengths[window], self.room)
            if self.shuffle:
                packs = permute(packs, int(packs.max()) + 1, key(self.seed, PACKS, epoch, first))
            else:  # by the first document of each
                found = np.unique(packs, return_index=True)[1]
                packs = np.argsort(np.argsort(found))[packs]
            documents[first : first + len(window)] = window[np.argsort(packs, kind="stable")]
            counts.append(np.bincount(packs))
        return _Epoch(documents, np.concatenate([[0], np.cumsum(np.concatenate(counts))]))

    def _grouped(self, order: np.ndarray, epoch: int) -> np.ndarray:
        """An epoch's order with steps of samples of about the same length: those of GROUPED_STEPS steps by length, then
        the steps drawn anew. What does not fill a step stays at the end."""
        step, together = self.packing.group, self.packing.together
        found = []
        for first in range(0, len(order), GROUPED_STEPS * step):
            rows = order[first : first + GROUPED_STEPS * step].reshape(-1, together)
            longest = self.lengths[self.numbers[rows]].max(1)
            own = rows[np.argsort(-longest, kind="stable")].ravel()
            whole = len(own) // step * step
            steps, rest = own[:whole].reshape(-1, step), own[whole:]
            if len(steps):
                steps = steps[permute(np.arange(len(steps)), len(steps), key(self.seed, GROUPS, epoch, first))]
            found += [steps.ravel(), rest]
        return np.concatenate(found)

    def _chosen(self) -> np.ndarray:
        """The numbers of the documents that are read, in their order."""
        sizes = [len(reader.documents) for reader in self.readers]
        for reader, size in zip(self.readers, sizes, strict=True):
            if size % self.packing.together:
                raise DataError(
                    f"{reader.shards.folder}: {size} documents, which are no groups of {self.packing.together}; give "
                    "records of pairs as text, which the job tokenizes itself"
                )
        if self.packing.split is None and self.packing.shard == (1, 1):
            return np.arange(sum(sizes))
        sizes = [size // self.packing.together for size in sizes]
        numbers = []
        split, (shard, shards) = self.packing.split, self.packing.shard
        held_out_each = [0] * len(sizes) if split is None else held_out_of(sizes, split)
        for first, size, held_out in zip(self.firsts, sizes, held_out_each, strict=False):
            order = permute(np.arange(size), size, key(self.seed, SPLIT)) if size else np.arange(0)
            own = order[:held_out] if self.packing.held_out else order[held_out:][shard - 1 :: shards]
            numbers.append(first + self._members(np.sort(own)))
        if not sum(map(len, numbers)):
            raise DataError(
                f"data.shards = {shard}/{shards}: none of {sum(sizes)} records are in it; give fewer shards, or more "
                "data"
            )
        return np.concatenate(numbers)

    def _members(self, groups: np.ndarray) -> np.ndarray:
        """The numbers of the documents in groups that stay together."""
        together = self.packing.together
        return (groups[:, None] * together + np.arange(together)).ravel()


def lengths_of(reader: TokenReader, seq_len: int) -> np.ndarray:
    """Of each document, in tokens. DataError for those that no sample has room for."""
    lengths = np.diff(reader.documents, append=reader.shards.tokens)
    if len(lengths) and lengths.min() < 1:
        raise reader.damaged()
    too_long = int((lengths > seq_len + 1).sum())
    if too_long:
        raise DataError(
            f"{reader.shards.folder}: {too_long} of {len(lengths)} documents have more than {seq_len + 1} tokens, the "
            f"longest {lengths.max()}; raise training.seq_len to {lengths.max() - 1}, or let the job read the text "
            "itself, where data.too_long says what becomes of them"
        )
    return lengths
