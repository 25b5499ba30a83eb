"""Sample packing: whole documents as samples, several in one sample where they fit.

A document is never cut, and never sees another one: attention, positions and labels stay within the document. The rest
of a sample is padding without loss. Which documents share a sample depends only on their lengths, the seed and the
epoch. It is computed once per epoch, for one window of the shuffled documents after the other. So the number of samples
is known before the first one, and the position in the data is a single number for any number of ranks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any, NamedTuple

from torchtitan.core.lazy_numpy import np
from torchtitan.datasets.shuffle import key, permute
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.token_shards import TokenReader, TokenShards

Split = float | int
"""A fraction of each source's documents (below 1), or a number of documents over all sources."""
PACKS, SPLIT, GROUPS = 0x7061636B, 0x73706C69, 0x67726F75
"""Salts: the orders of packs and groups and the held-out split are independent of the order of documents."""
GROUPED_STEPS = 64
"""Number of steps with samples sorted by length in one list."""
CACHED_EPOCHS = 2


class Packing(NamedTuple):
    """Options of sample packing.

    `window`: number of documents packed together; 1: one document per sample. `split`: the documents that are held out;
    `held_out`: read these instead of the others. `pad_left`: pad on the left. `group_size`: number of adjacent
    documents that stay adjacent, such as pairs; each is then one sample. `multiple`: pad batches to their longest
    sample, rounded up to this multiple; 0: pad to the full sample length. `step_samples`: samples per step if the
    samples of a step should have similar lengths, else 0. `shard`: (number, count) of the equal part of the documents
    to read, without the held-out ones.
    """

    window: int
    pad_id: int
    split: Split | None = None
    held_out: bool = False
    pad_left: bool = False
    group_size: int = 1
    multiple: int = 0
    step_samples: int = 0
    shard: tuple[int, int] = (1, 1)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Return the options that the order of samples depends on, JSON-able."""
        options: dict[str, Any] = {} if self.split is None else {"split": self.split}
        options |= {"group": self.step_samples} if self.step_samples else {}
        options |= {"shard": list(self.shard)} if self.shard != (1, 1) else {}
        return {"window": self.window} | options


def best_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """Assign documents of [n] lengths, none above `room`, to packs; return pack numbers [n].

    Best fit decreasing: the longest document first, each into the pack that then has the least room left. It needs at
    most 11/9 of the fewest possible packs plus one (D. S. Johnson, 1973). O(n log n).
    """
    packs = np.empty(len(lengths), dtype=np.int64)
    rooms: list[int] = []  # sorted room left in the open packs
    packs_by_room: dict[int, list[int]] = {}  # room left -> pack numbers
    sizes, count = lengths.tolist(), 0
    for index in np.argsort(-lengths, kind="stable").tolist():
        index_of_room = bisect_left(rooms, sizes[index])
        if index_of_room == len(rooms):
            remaining, pack, count = room, count, count + 1
        else:
            remaining = rooms[index_of_room]
            pack = packs_by_room[remaining].pop()
            if not packs_by_room[remaining]:
                del packs_by_room[remaining], rooms[index_of_room]
        packs[index] = pack
        remaining -= sizes[index]
        if remaining not in packs_by_room:
            packs_by_room[remaining] = []
            insort(rooms, remaining)
        packs_by_room[remaining].append(pack)
    return packs


def held_out_counts(sizes: Sequence[int], split: Split) -> list[int]:
    """Return how many documents of each source are held out, the same fraction of every source.

    Raises DataError unless some documents are held out and some are left."""
    total = sum(sizes)
    fraction = Fraction(str(split)) if split < 1 else Fraction(int(split), max(total, 1))
    exact = [fraction * size for size in sizes]
    counts = [int(part) for part in exact]
    most_rounded_down = sorted(range(len(sizes)), key=lambda i: counts[i] - exact[i])
    for i in most_rounded_down[: int(sum(exact) + Fraction(1, 2)) - sum(counts)]:
        counts[i] += 1
    if not 0 < sum(counts) < total:
        raise DataError(
            f"validation.split = {split}: {sum(counts)} of {total} documents would be held out; allowed: at least one "
            "and not all; correct it, or give more data"
        )
    return counts


class _Epoch(NamedTuple):
    documents: np.ndarray
    """Document numbers, in the order of the packs."""
    begins: np.ndarray
    """[packs + 1] Start of each pack in `documents`."""


class PackReader:
    """A reader with BlockReader's interface for packs of seq_len + 1 tokens, from one or several folders.

    Documents are numbered consecutively over all folders. Raises DataError for documents longer than a pack."""

    def __init__(
        self, sources: Sequence[TokenShards], seq_len: int, seed: int, shuffle: bool, packing: Packing
    ) -> None:
        self.room, self.seed, self.shuffle, self.packing = seq_len + 1, seed, shuffle, packing
        self.readers = [TokenReader(source) for source in sources]
        self.firsts = np.array([0, *accumulate(len(reader.documents) for reader in self.readers)])
        self.starts = np.concatenate([reader.documents for reader in self.readers])
        self.lengths = np.concatenate([document_lengths(reader, seq_len) for reader in self.readers])
        self.numbers = self._chosen()
        self._epochs: dict[int, _Epoch] = {}
        self._ends: list[int] = []  # per computed epoch: number of packs up to its end

    def samples(self, epochs: int) -> int:
        """Return the number of samples in `epochs` passes."""
        return self._end(epochs - 1) if epochs else 0

    def samples_with(self, tokens: int) -> int:
        """Return how many samples it takes to read `tokens` document tokens; a partly needed sample counts."""
        epoch, before = 0, 0
        while True:
            documents, begins = self._epoch(epoch)
            cumulative = before + np.cumsum(self.lengths[documents])[begins[1:] - 1]
            if cumulative[-1] >= tokens:
                return (self._end(epoch - 1) if epoch else 0) + int(cumulative.searchsorted(tokens)) + 1
            epoch, before = epoch + 1, int(cumulative[-1])

    @property
    def efficiency(self) -> float:
        """Return the fraction of the first pass that is not padding."""
        return float(self.lengths[self.numbers].sum()) / (self.samples(1) * self.room)

    def order(self, samples: np.ndarray) -> np.ndarray:
        """Return the samples unchanged: they are read by their global numbers."""
        return samples

    def read(self, samples: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """Read samples like BlockReader.read. Padding counts as a document."""
        rows, _, begins = self._read(samples)
        return rows, begins

    def trained(self, samples: np.ndarray) -> np.ndarray:
        """Return loss masks like BlockReader.trained."""
        return self._read(samples)[1]

    def _read(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
        for reader in self.readers:
            reader.check_not_shrunk()
        ids = np.full((len(samples), self.room), self.packing.pad_id, dtype=np.int64)
        trained = np.zeros(ids.shape, dtype=bool)
        rows, columns = [], []
        for row, sample in enumerate(samples.tolist()):
            documents = self._pack(sample)
            filled = self.room - int(self.lengths[documents].sum()) if self.packing.pad_left else 0
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
        while not self._ends or self._ends[-1] <= sample:
            self._end(len(self._ends))
        epoch = bisect_right(self._ends, sample)  # a small source has thousands of epochs
        documents, begins = self._epoch(epoch)
        pack = sample - (self._ends[epoch - 1] if epoch else 0)
        return documents[begins[pack] : begins[pack + 1]]

    def _end(self, epoch: int) -> int:
        for number in range(len(self._ends), epoch + 1):
            self._ends.append((self._ends[-1] if number else 0) + len(self._epoch(number).begins) - 1)
        return self._ends[epoch]

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            for oldest in list(self._epochs)[: 1 - CACHED_EPOCHS]:
                del self._epochs[oldest]
            self._epochs[epoch] = self._packed(epoch)
        return self._epochs[epoch]

    def _packed(self, epoch: int) -> _Epoch:
        order = np.arange(len(self.numbers) // self.packing.group_size)
        if self.shuffle:
            order = permute(order, len(order), key(self.seed, epoch))
        order = self._members(order)
        if self.packing.step_samples:
            order = self._grouped(order, epoch)
        documents, counts = self.numbers[order], []
        if self.packing.window == 1:
            return _Epoch(documents, np.arange(len(documents) + 1))
        for first in range(0, len(documents), self.packing.window):
            window = documents[first : first + self.packing.window]
            packs = best_fit(self.lengths[window], self.room)
            if self.shuffle:
                packs = permute(packs, int(packs.max()) + 1, key(self.seed, PACKS, epoch, first))
            else:  # order packs by their first document
                first_documents = np.unique(packs, return_index=True)[1]
                packs = np.argsort(np.argsort(first_documents))[packs]
            documents[first : first + len(window)] = window[np.argsort(packs, kind="stable")]
            counts.append(np.bincount(packs))
        return _Epoch(documents, np.concatenate([[0], np.cumsum(np.concatenate(counts))]))

    def _grouped(self, order: np.ndarray, epoch: int) -> np.ndarray:
        """Reorder an epoch so that the samples of a step have similar lengths.

        The samples of GROUPED_STEPS steps are sorted by length, then these steps are shuffled. Samples that do not fill
        a step stay at the end."""
        step, group_size = self.packing.step_samples, self.packing.group_size
        ordered = []
        for first in range(0, len(order), GROUPED_STEPS * step):
            rows = order[first : first + GROUPED_STEPS * step].reshape(-1, group_size)
            longest = self.lengths[self.numbers[rows]].max(1)
            by_length = rows[np.argsort(-longest, kind="stable")].ravel()
            num_full = len(by_length) // step * step
            steps, remainder = by_length[:num_full].reshape(-1, step), by_length[num_full:]
            if len(steps):
                steps = steps[permute(np.arange(len(steps)), len(steps), key(self.seed, GROUPS, epoch, first))]
            ordered += [steps.ravel(), remainder]
        return np.concatenate(ordered)

    def _chosen(self) -> np.ndarray:
        """Return the numbers of the documents to read, in stored order."""
        sizes = [len(reader.documents) for reader in self.readers]
        for reader, size in zip(self.readers, sizes, strict=True):
            if size % self.packing.group_size:
                raise DataError(
                    f"{reader.shards.folder}: {size} documents, which are no groups of {self.packing.group_size}; give "
                    "records of pairs as text, which the job tokenizes itself"
                )
        if self.packing.split is None and self.packing.shard == (1, 1):
            return np.arange(sum(sizes))
        sizes = [size // self.packing.group_size for size in sizes]
        numbers = []
        split, (shard, shards) = self.packing.split, self.packing.shard
        num_held_out = [0] * len(sizes) if split is None else held_out_counts(sizes, split)
        for first, size, held_out in zip(self.firsts, sizes, num_held_out, strict=False):
            order = permute(np.arange(size), size, key(self.seed, SPLIT)) if size else np.arange(0)
            selected = order[:held_out] if self.packing.held_out else order[held_out:][shard - 1 :: shards]
            numbers.append(first + self._members(np.sort(selected)))
        if not sum(map(len, numbers)):
            raise DataError(
                f"data.shards = {shard}/{shards}: none of {sum(sizes)} records are in it; give fewer shards, or more "
                "data"
            )
        return np.concatenate(numbers)

    def _members(self, groups: np.ndarray) -> np.ndarray:
        """Return the document numbers of the given groups, `group_size` adjacent documents each."""
        group_size = self.packing.group_size
        return (groups[:, None] * group_size + np.arange(group_size)).ravel()


def document_lengths(reader: TokenReader, seq_len: int) -> np.ndarray:
    """Return the length of each document in tokens. Raises DataError for documents longer than a sample."""
    lengths = np.diff(reader.documents, append=reader.shards.tokens)
    if len(lengths) and lengths.min() < 1:
        raise reader.damaged()
    too_long = int((lengths > seq_len + 1).sum())
    if too_long:
        raise DataError(
            f"{reader.shards.folder}: {too_long} of {len(lengths)} documents have more than {seq_len + 1} tokens, the "
            f"longest {lengths.max()}; raise training.seq_len to {lengths.max() - 1}, or let the job read the text "
            "itself, where data.too_long applies"
        )
    return lengths


def samples_in_epochs(
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


def samples_in_budget(tokens: int, seq_len: int) -> int:
    """Return the number of full samples in a token budget, rounded up."""
    return -(-tokens // seq_len)


def total_samples(
    sources: Sequence[TokenShards],
    seq_len: int,
    epochs: int | None,
    tokens: int | None,
    seed: int = 0,
    shuffle: bool = True,
    packing: Packing | None = None,
) -> int | None:
    """Return the number of global samples in the data; None if endless. Raises errors like `samples_in_epochs`."""
    if tokens is not None and packing is not None:
        return PackReader(sources, seq_len, seed, shuffle, packing).samples_with(tokens)
    if tokens is not None:
        return samples_in_budget(tokens, seq_len)
    return None if epochs is None else samples_in_epochs(sources, seq_len, epochs, seed, shuffle, packing)


def steps_for(samples: int, global_batch_size: int) -> int:
    """Return the number of steps, rounded up: the last one may be filled up."""
    return -(-samples // global_batch_size)
