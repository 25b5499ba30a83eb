"""The samples of one rank as pieces of batches, from lanes of documents or from prepared shards.

Global sample i is a function of i alone. Data-parallel rank r of n takes the samples r, r + n, r + 2n, ... (counted
from the sample at which the run began or was resumed), local_batch_size of them for a batch. So after any number of
batches the ranks together have taken an unbroken run of samples, and any other number of ranks can go on from there.
Samples of which one loss is made, such as pairs, are dealt out together.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

import numpy as np
import torch

from torchtitan.datasets.epochs import JoinedBlocks
from torchtitan.datasets.mixing import Mixture
from torchtitan.datasets.packing import Cursor, Labels, LanePacker, batch_arrays, class_arrays, own_arrays
from torchtitan.datasets.sample_packing import Packing, PackReader
from torchtitan.datasets.streams import Lanes
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.datasets.tokens import BlockReader, TokenShards

# A part of a batch: its rows (None: all of one batch or more), [rows, S] for each name (or nothing), and the new
# cursors of the lanes that it is from.
Piece = tuple[list[int] | None, Sequence[torch.Tensor] | torch.Tensor, dict[int, Cursor]]


Numbers = TypeVar("Numbers", np.ndarray, torch.Tensor)


def dealt(own: Numbers, rank: int, ranks: int, together: int) -> Numbers:
    """Of a rank's own samples, numbered from 0, their numbers among those of all ranks."""
    return (own // together * ranks + rank) * together + own % together


@dataclass(frozen=True)
class Share:
    """Which global samples a rank takes from `start` on, batch_size for a batch, `together` at a time."""

    start: int
    rank: int
    ranks: int
    batch_size: int
    together: int = 1

    def samples(self, batches: np.ndarray) -> np.ndarray:
        """[n] numbers of batches to [n, batch_size] global samples."""
        own = batches[:, None] * self.batch_size + np.arange(self.batch_size)
        return self.start + dealt(own, self.rank, self.ranks, self.together)

    def lanes(self, mixture: Mixture) -> list[int]:
        """Those that its samples are from."""
        first, stride = self.start + self.rank * self.together, self.ranks * self.together
        return list(
            dict.fromkeys(lane for place in range(self.together) for lane in mixture.own(first + place, stride))
        )


@dataclass(frozen=True)
class Form:
    """What a batch looks like, and how many there are (None: no end). `packing`: of whole documents, from prepared
    shards; None: samples are cut from all documents, end to end. `labels`: what they are, see packing.py."""

    tokenizer: Tokenizer
    seq_len: int
    document_mask: bool
    batches: int | None
    packing: Packing | None = None
    labels: Labels = "next"

    def numbers(self, start: int = 0, step: int = 1) -> Iterable[int]:
        return count(start, step) if self.batches is None else range(start, self.batches, step)

    def tensors(
        self, rows: np.ndarray, begins: tuple[np.ndarray, np.ndarray], trained: np.ndarray | None
    ) -> list[torch.Tensor]:
        """What `batch_arrays` makes of ids [n, seq_len + 1]: each [n, seq_len]."""
        words = self.tokenizer.vocab_size
        if self.labels in ("first", "last"):
            assert self.packing is not None and trained is not None, "classes are of whole records"
            arrays = class_arrays(rows, begins, words, trained, self.packing.pad_id, self.labels == "first")
        else:
            make = own_arrays if self.labels == "same" else batch_arrays
            arrays = make(rows, begins, self.document_mask, words, trained)
        return [torch.from_numpy(array) for array in arrays]

    def reader(self, sources: Sequence[TokenShards], seed: int, shuffle: bool) -> "Reader":
        """Of prepared shards, one folder or several as one."""
        if self.packing is not None:
            return PackReader(sources, self.seq_len, seed, shuffle, self.packing)
        if len(sources) == 1:
            return BlockReader(sources[0], self.seq_len, seed, shuffle)
        return JoinedBlocks(sources, self.seq_len, seed, shuffle)


Reader = BlockReader | JoinedBlocks | PackReader


class LanePieces:
    """Samples packed from text, of one source or several; prepared shards among these are a source of one lane, in
    which each sample is found by itself. `stop`: raise at a record that cannot be read. From global sample `end` on
    nothing is read, and no label counts."""

    def __init__(
        self,
        sources: Sequence[Lanes | TokenShards],
        mixture: Mixture,
        share: Share,
        form: Form,
        cursors: dict[int, Cursor],
        seed: int,
        shuffle: bool,
        stop: bool,
        end: int | None = None,
    ) -> None:
        self.sources, self.mixture, self.share, self.form, self.cursors = sources, mixture, share, form, cursors
        self.seed, self.shuffle, self.stop, self.end = seed, shuffle, stop, end
        self.own_lanes = share.lanes(mixture)

    def per_batch(self, workers: int) -> int:
        return workers

    def pieces(self, worker: int, workers: int) -> Iterator[Piece]:
        packers = self._packers(self.own_lanes[worker::workers])
        for batch in self.form.numbers():
            samples = self.share.samples(np.array([batch]))[0]
            lanes, numbers = (found.tolist() for found in self.mixture.locate(samples))
            own = [row for row, lane in enumerate(lanes) if lane in packers]
            ids = np.zeros((len(own), self.form.seq_len + 1), dtype=np.int64)
            trained = np.zeros(ids.shape, dtype=bool)
            begin_rows, begin_columns, cursors = [], [], {}
            for i, row in enumerate(own):
                if self.end is not None and samples[row] >= self.end:
                    continue
                packer = packers[lanes[row]]
                columns = packer.sample(numbers[row], ids[i], trained[i])
                begin_rows += [i] * len(columns)
                begin_columns += columns
                if isinstance(packer, LanePacker):
                    cursors[lanes[row]] = packer.cursor
            begins = np.array(begin_rows, dtype=np.int64), np.array(begin_columns, dtype=np.int64)
            yield own, self.form.tensors(ids, begins, trained) if own else [], cursors

    def _packers(self, own: list[int]) -> dict[int, "LanePacker | ShardLane"]:
        packers: dict[int, LanePacker | ShardLane] = {}
        for source, first, end in zip(
            self.sources, self.mixture.first_lanes.tolist(), self.mixture.first_lanes[1:].tolist(), strict=False
        ):
            lanes = [lane for lane in own if first <= lane < end]
            if isinstance(source, TokenShards):
                reader = self.form.reader([source], self.seed, self.shuffle) if lanes else None
                packers |= {lane: ShardLane(reader) for lane in lanes if reader is not None}
                continue
            cursors = {lane: self.cursors.get(lane, Cursor()) for lane in lanes}
            documents = source.reader({lane - first: cursor.place for lane, cursor in cursors.items()})
            for lane, cursor in cursors.items():
                packers[lane] = LanePacker(source, documents, lane - first, cursor, self.form.tokenizer, self.stop)
        return packers


class ShardLane:
    """Prepared shards as one of several sources."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def sample(self, number: int, row: np.ndarray, trained: np.ndarray) -> list[int]:
        """As LanePacker.sample."""
        start = self.reader.order(np.array([number]))
        ids, (_, columns) = self.reader.read(start)
        flags = self.reader.trained(start)
        row[:], trained[:] = ids[0], True if flags is None else flags[0]
        return columns.tolist()


class BlockPieces:
    """Samples of prepared shards; each is found by itself. Several batches go into a piece, as handing one over costs
    more than reading a few thousand tokens. From global sample `end` on, no label counts."""

    PIECE_TOKENS = 2**16
    PIECE_BATCHES = 64
    AHEAD = 2048
    """Samples whose places are worked out at a time."""
    own_lanes: list[int] = []

    def __init__(
        self, sources: Sequence[TokenShards], share: Share, form: Form, seed: int, shuffle: bool, end: int | None = None
    ) -> None:
        self.sources, self.share, self.form, self.end = sources, share, form, end
        self.seed, self.shuffle = seed, shuffle

    def per_batch(self, workers: int) -> int:
        return 1

    def pieces(self, worker: int, workers: int) -> Iterator[Piece]:
        reader = self.form.reader(self.sources, self.seed, self.shuffle)
        size, limit = self.share.batch_size, self.form.batches
        together = min(max(1, self.PIECE_TOKENS // (size * self.form.seq_len)), self.PIECE_BATCHES)
        ahead = max(1, self.AHEAD // (together * size))
        for first in count(worker, workers * ahead):
            batches = (first + np.arange(ahead)[:, None] * workers) * together + np.arange(together)
            samples = self.share.samples(batches.ravel()).ravel()
            past = np.zeros(len(samples), dtype=bool) if self.end is None else samples >= self.end
            starts = reader.order(np.where(past, 0, samples))
            together_of = zip(batches.tolist(), np.split(starts, ahead), np.split(past, ahead), strict=True)
            for numbers, own, filling in together_of:
                left = together if limit is None else max(0, min(together, limit - numbers[0]))
                if left == 0:
                    return
                own, filling = own[: left * size], filling[: left * size]
                trained = reader.trained(own)
                if filling.any():
                    trained = np.ones((len(own), self.form.seq_len + 1), dtype=bool) if trained is None else trained
                    trained = trained & ~filling[:, None]
                yield None, self.form.tensors(*reader.read(own), trained), {}
