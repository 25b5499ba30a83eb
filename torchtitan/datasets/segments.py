"""Segment batches: each batch row reads one document from start to end, a segment per step, and then the next document.

A document stays in its row, so a stateful model can carry its memory from batch to batch.
Documents are tokenized before the run and their lengths are known, so every rank can compute what all rows of the
global batch read, and builds only its own batches. A row that has finished its document takes the next one of the
shuffled order, which continues from epoch to epoch.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from torchtitan.datasets.position import VERSION, check_same_data
from torchtitan.datasets.samples import IGNORE
from torchtitan.datasets.shuffle import key, permute
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.token_shards import TokenReader, TokenShards, Verification

logger = logging.getLogger(__name__)
Batch = dict[str, torch.Tensor]
STAGGER = 0x5E6
"""Salt: the offsets at which rows begin are independent of the document order of the same seed."""


class RowPosition(NamedTuple):
    """A row's document, the offset of its next token, and the offset at which the row began."""

    document: int
    offset: int = 0
    start: int = 0


class Documents:
    """The documents of several folders, numbered consecutively; only the `selected` ones, if set."""

    def __init__(self, sources: Sequence[TokenShards], selected: np.ndarray | None = None) -> None:
        self.readers = [TokenReader(source) for source in sources]
        starts = [reader.documents for reader in self.readers]
        ends = [np.append(values[1:], source.tokens) for values, source in zip(starts, sources, strict=True)]
        self.starts, self.ends = np.concatenate(starts), np.concatenate(ends)
        self.owners = np.repeat(np.arange(len(starts)), [len(values) for values in starts])
        if selected is not None:
            self.starts, self.ends, self.owners = self.starts[selected], self.ends[selected], self.owners[selected]
        if len(self.starts) == 0 or (self.ends < self.starts).any():
            raise DataError("there is no document, or their starts do not ascend; prepare the data again")

    def __len__(self) -> int:
        return len(self.starts)

    def length(self, document: int) -> int:
        return int(self.ends[document] - self.starts[document])

    def segments(self, document: int, seq_len: int) -> int:
        """Return the number of segments of `seq_len` input tokens; 0 for a document without a label."""
        return max(0, -(-(self.length(document) - 1) // seq_len))

    def label_ids(self, document: int) -> np.ndarray:
        """Return the ids [tokens] of a document that are labels: all trained tokens except the first token."""
        ids = np.empty(self.length(document), dtype=np.int64)
        trained = np.zeros(len(ids), dtype=bool)
        self.copy(RowPosition(document), ids, trained)
        return ids[1:][trained[1:]]

    def most_segments(self, seq_len: int) -> int:
        """Return the number of segments of the longest document."""
        return -(-(int((self.ends - self.starts).max()) - 1) // seq_len)

    def copy(self, position: RowPosition, ids: np.ndarray, trained: np.ndarray) -> None:
        reader = self.readers[self.owners[position.document]]
        reader.check_not_shrunk()
        reader.copy(int(self.starts[position.document]) + position.offset, ids, trained)


@dataclass(frozen=True)
class SegmentPosition:
    """A position in the data.

    `samples` and `documents_started` count over all ranks; `rows` are the positions of this rank's rows."""

    samples: int
    fingerprint: dict[str, Any]
    rank: int
    ranks: int
    documents_started: int
    rows: tuple[RowPosition | None, ...]

    def to_dict(self) -> dict[str, Any]:
        reading = {"taken": self.documents_started, "rows": [None if row is None else list(row) for row in self.rows]}
        state = {"version": VERSION, "samples": self.samples, "lanes": 0, "cursors": {}, "ranks": self.ranks}
        return state | {"fingerprint": self.fingerprint, "read": {str(self.rank): reading}}


class SegmentLoader:
    """An endless iterator over segment batches.

    Each batch has tokens, labels and positions [rows, seq_len], and per row [rows]: `lanes`, the row's number;
    `begins`, True if its document begins here; `filled`, the number of real tokens; `offsets`, the position of the
    first token in its document. All are int64 on the CPU except `begins`. Raises DataError.

    `stagger`: start each row at a random offset in its first document, so that rows do not all finish together.
    `rows`: number of rows of this rank; what all ranks read depends only on `rows` x `ranks`.
    """

    skipped = 0

    verification: Verification | None = None
    """Background check of the prepared shards."""

    def __init__(
        self,
        documents: Documents,
        *,
        seq_len: int,
        rows: int,
        rank: int,
        ranks: int,
        seed: int,
        shuffle: bool,
        fingerprint: dict[str, Any],
        stagger: bool = True,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.documents, self.seq_len, self.rank, self.ranks = documents, seq_len, rank, ranks
        self.seed, self.shuffle, self.fingerprint = seed, shuffle, fingerprint
        self.samples, self.documents_started, self.resumed = 0, 0, state is not None
        self.all_rows: list[RowPosition | None] = [None] * (rows * ranks)
        if not any(documents.segments(document, seq_len) for document in range(len(documents))):
            raise DataError("no document has two tokens, so there is nothing to predict; give longer documents")
        if state is not None:
            self._resume(state)
        elif stagger:
            self.all_rows = [self._begin_inside(row) for row in range(rows * ranks)]

    @property
    def rows(self) -> list[RowPosition | None]:
        """Return the positions of this rank's rows."""
        return self.all_rows[self.rank :: self.ranks]

    def _resume(self, state: dict[str, Any]) -> None:
        check_same_data(state, self.fingerprint)
        self.samples, read = state["samples"], state.get("read", {})
        self.documents_started = max((reading["taken"] for reading in read.values()), default=0)
        ranks = state.get("ranks", 1)
        by_rank = [read[str(rank)]["rows"] for rank in range(ranks) if str(rank) in read]
        if sum(map(len, by_rank)) == len(self.all_rows) and len(by_rank) == ranks:
            for rank, rows in enumerate(by_rank):
                self.all_rows[rank::ranks] = [None if row is None else RowPosition(*row) for row in rows]
            return
        logger.warning("all ranks together have other rows than in the checkpoint: all rows begin with new documents")

    def _begin_inside(self, row: int) -> RowPosition:
        reading = self._next_document()
        room = self.documents.length(reading.document) - 1 - self.seq_len
        if room <= 0:
            return reading
        offset = int(key(self.seed, STAGGER, row)[0] % np.uint64(room))
        return RowPosition(reading.document, offset, offset)

    def _next_document(self) -> RowPosition:
        while True:
            epoch, number = divmod(self.documents_started, len(self.documents))
            self.documents_started += 1
            if self.shuffle:
                (number,) = permute(np.array([number]), len(self.documents), key(self.seed, epoch)).tolist()
            if self.documents.segments(number, self.seq_len):
                return RowPosition(number)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            if self.verification is not None:
                self.verification.raise_if_damaged()
            self.all_rows = [row or self._next_document() for row in self.all_rows]
            local_rows = self.rows
            starting_rows = {
                index for index, row in enumerate(local_rows) if row is not None and row.offset == row.start
            }
            batch = segment_batch(self.documents, local_rows, self.seq_len, starting_rows)
            self.all_rows = [next_segment(row, self.documents, self.seq_len) for row in self.all_rows]
            self.samples += len(self.all_rows)
            yield batch

    def replay(self, tokens: int) -> Iterator[Batch]:
        """Yield again the segments that the rows read last, up to `tokens` tokens of their current documents.

        Used to rebuild the state of a model, such as a cache, after a restore.
        """
        max_segments = -(-tokens // self.seq_len)
        local_rows = self.rows
        num_segments = [
            0 if row is None else min(max_segments, (row.offset - row.start) // self.seq_len) for row in local_rows
        ]
        for ago in range(max_segments, 0, -1):  # the same number on all ranks, because the model may communicate
            rows = [
                row._replace(offset=row.offset - ago * self.seq_len) if row is not None and ago <= count else None
                for row, count in zip(local_rows, num_segments, strict=True)
            ]
            yield segment_batch(self.documents, rows, self.seq_len, {i for i, n in enumerate(num_segments) if n == ago})

    def position(self) -> SegmentPosition:
        return SegmentPosition(
            self.samples, self.fingerprint, self.rank, self.ranks, self.documents_started, tuple(self.rows)
        )

    def state_dict(self) -> dict[str, Any]:
        return self.position().to_dict()

    def close(self) -> None:
        """Do nothing: there are no workers to stop."""


def next_segment(row: RowPosition | None, documents: Documents, seq_len: int) -> RowPosition | None:
    """Return the row's position after this segment; None at the end of its document."""
    if row is None or row.offset + seq_len >= documents.length(row.document) - 1:
        return None
    return row._replace(offset=row.offset + seq_len)


def segment_batch(
    documents: Documents, rows: Sequence[RowPosition | None], seq_len: int, starting_rows: set[int]
) -> Batch:
    """Return the batch of the rows' segments; `starting_rows` begin a document.

    Idle rows and positions after a document's end are 0 without loss.
    """
    ids = np.zeros((len(rows), seq_len + 1), dtype=np.int64)
    trained = np.zeros((len(rows), seq_len + 1), dtype=bool)
    filled = np.zeros(len(rows), dtype=np.int64)
    for index, row in enumerate(rows):
        if row is not None:
            length = min(seq_len + 1, documents.length(row.document) - row.offset)
            documents.copy(row, ids[index, :length], trained[index, :length])
            filled[index] = length - 1
    tokens, labels = ids[:, :-1].copy(), np.where(trained[:, 1:], ids[:, 1:], IGNORE)
    tokens[np.arange(seq_len) >= filled[:, None]] = 0
    return {
        "tokens": torch.from_numpy(tokens),
        "labels": torch.from_numpy(labels),
        "positions": torch.arange(seq_len).repeat(len(rows), 1),
        "lanes": torch.arange(len(rows)),
        "begins": torch.tensor([index in starting_rows for index in range(len(rows))]),
        "filled": torch.from_numpy(filled),
        "offsets": torch.tensor([0 if row is None else row.offset for row in rows]),
    }


class HeldOutSegments:
    """The held-out batches of one data-parallel rank: the first documents in stored order.

    Reads as many documents as it takes to have `samples` segments (0: all), each to its end. Ranks and rows that finish
    early yield empty rows until all others have finished.
    """

    def __init__(self, documents: Documents, samples: int, *, seq_len: int, rows: int, rank: int, ranks: int) -> None:
        self.documents, self.seq_len, self.rows, self.rank, self.ranks = documents, seq_len, rows, rank, ranks
        counts = [documents.segments(document, seq_len) for document in range(len(documents))]
        enough = np.searchsorted(np.cumsum(counts), samples) + 1 if samples else len(counts)
        self.order = [document for document in range(min(int(enough), len(counts))) if counts[document]]
        self.batches = max(sum(1 for _ in self._row_positions(any_rank)) for any_rank in range(ranks))

    def _row_positions(self, rank: int) -> Iterator[list[RowPosition | None]]:
        remaining = iter(self.order[rank :: self.ranks])
        rows: list[RowPosition | None] = [None] * self.rows
        while True:
            for index, row in enumerate(rows):
                if row is None and (document := next(remaining, None)) is not None:
                    rows[index] = RowPosition(document)
            if not any(row is not None for row in rows):
                return
            yield rows
            rows = [next_segment(row, self.documents, self.seq_len) for row in rows]

    def __iter__(self) -> Iterator[Batch]:
        positions = self._row_positions(self.rank)
        for _ in range(self.batches):
            rows = next(positions, [None] * self.rows)
            starting_rows = {index for index, row in enumerate(rows) if row is not None and not row.offset}
            yield segment_batch(self.documents, rows, self.seq_len, starting_rows)

    def close(self) -> None:
        """Do nothing: there are no workers to stop."""
