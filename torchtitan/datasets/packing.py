"""Documents to samples: tokens packed end to end, with positions, document numbers and labels.

What a token's label is, by what the task learns: the next token (packing.batch_arrays), the token itself, or the
class of its record.
"""

import logging
from dataclasses import dataclass
from typing import Literal

import numpy as np

from torchtitan.datasets.records import NO_TOKENS, Tokens, encode
from torchtitan.datasets.sources import BadRecord, DataError, Document, Item, Unreachable
from torchtitan.datasets.streams import EMPTY_EPOCHS, LaneReader, Lanes, Place, no_text
from torchtitan.datasets.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

IGNORE = -100
"""A label that does not count (torch's default for cross-entropy)."""
SHOWN_ERRORS = 10


@dataclass(frozen=True)
class Cursor:
    """Where a lane goes on: its next sample begins at a token of a document. Also counts what it has met so far."""

    samples: int = 0
    place: Place = Place()
    offset: int = 0
    skipped: int = 0

    def to_list(self) -> list[int]:
        return [self.samples, *self.place, self.offset, self.skipped]

    @classmethod
    def from_list(cls, numbers: list[int]) -> "Cursor":
        samples, epoch, part, ordinal, offset, skipped = numbers
        return cls(samples, Place(epoch, part, ordinal), offset, skipped)


class LanePacker:
    """Packs the documents of one lane. A sample begins with the last label of the one before, so every token is
    input once and label once. `stop`: raise at a record that cannot be read instead of counting it."""

    def __init__(
        self, lanes: Lanes, reader: LaneReader, lane: int, cursor: Cursor, tokenizer: Tokenizer, stop: bool
    ) -> None:
        self.lanes, self.reader, self.lane, self.tokenizer, self.stop = lanes, reader, lane, tokenizer, stop
        self.samples, self.skipped = cursor.samples, cursor.skipped
        self._place, self._tokens, self._offset = cursor.place, NO_TOKENS, 0
        if cursor.samples:
            # The rest of the document in which the last sample ended.
            self._next_document()
            if self._place != cursor.place or cursor.offset >= len(self._tokens.ids):
                raise DataError(
                    f"the document at {tuple(cursor.place)} of lane {lane}, where the checkpoint ends, is not what it "
                    "was; the data have changed since; bring back the old data, or start a new job"
                )
            self._offset = cursor.offset

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.samples, self._place, self._offset, self.skipped)

    def sample(self, number: int, row: np.ndarray, trained: np.ndarray) -> list[int]:
        """Fill the rows with the lane's sample of that number: the next, or, if other ranks have the lane too, one
        further on."""
        while self.samples <= number:
            columns = self.fill(row, trained)
        return columns

    def fill(self, row: np.ndarray, trained: np.ndarray) -> list[int]:
        """Write the next sample's seq_len + 1 ids, and whether each is trained, into rows; returns the columns at
        which documents begin."""
        filled, begins = 0, []
        while filled < len(row):
            if self._offset == len(self._tokens.ids):
                self._next_document()
            if self._offset == 0:
                begins.append(filled)
            count = min(len(self._tokens.ids) - self._offset, len(row) - filled)
            for target, tokens in zip((row, trained), self._tokens, strict=True):
                target[filled : filled + count] = tokens[self._offset : self._offset + count]
            filled += count
            self._offset += count
        self._offset -= 1
        self.samples += 1
        return begins

    def _next_document(self) -> None:
        epoch = self._place.epoch
        while True:
            self._place, item = self.reader.next(self.lane)
            tokens = self._tokens_of(item)
            if len(tokens.ids):
                self._tokens, self._offset = tokens, 0
                return
            if self._place.epoch - epoch > EMPTY_EPOCHS:
                raise no_text(self.lanes.source.name, self.lane, self.lanes.count)

    def _tokens_of(self, item: Item) -> Tokens:
        if isinstance(item, Document):
            try:
                return encode(self.tokenizer, item)
            except BadRecord as error:
                item = error
        return self._skip(item)

    def _skip(self, error: DataError) -> Tokens:
        if self.stop or isinstance(error, Unreachable):
            raise error
        self.skipped += 1
        if self.skipped <= SHOWN_ERRORS:
            logger.warning("left out (%d in lane %d so far): %s", self.skipped, self.lane, error)
        return NO_TOKENS


def batch_arrays(
    rows: np.ndarray,
    begins: tuple[np.ndarray, np.ndarray],
    document_mask: bool,
    vocab_size: int,
    trained: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Tokens, labels and document numbers, each [n, S] int64, from [n, S + 1] ids, the (row, column) at which
    documents begin, and [n, S + 1] whether the tokens are trained (None: all). The label of one that is not is IGNORE.

    With document_mask also positions, which restart with each document; and the label that would be the next
    document's first token is IGNORE, as it cannot be known from the document before. Raises DataError at an id outside
    the vocabulary.
    """
    if rows.max() >= vocab_size or (rows.dtype.kind == "i" and rows.min() < 0):
        raise DataError(
            f"the data hold the ids {rows.min()} to {rows.max()}, but the tokenizer's vocabulary has {vocab_size}; "
            "prepare the data with the job's tokenizer"
        )
    n, length = rows.shape[0], rows.shape[1] - 1
    row, column = begins
    inside = (column > 0) & (column < length)
    row_borders = np.arange(n + 1) * length
    borders = np.concatenate([row_borders, row[inside] * length + column[inside]])
    borders.sort()
    starts, lengths = borders[:-1], borders[1:] - borders[:-1]
    numbers = np.arange(len(starts)) - starts.searchsorted(row_borders)[starts // length]

    arrays = [rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64), numbers.repeat(lengths)]
    if document_mask:
        arrays.append(np.arange(n * length) - starts.repeat(lengths))
        after = column > 0
        arrays[1][row[after], column[after] - 1] = IGNORE
    if trained is not None:
        arrays[1][~trained[:, 1:]] = IGNORE
    return [array.reshape(n, length) for array in arrays]


Labels = Literal["next", "same", "first", "last"]
"""The next token, the token itself, or the class of a record as that of its first or its last token."""
Begins = tuple[np.ndarray, np.ndarray]


def own_arrays(
    rows: np.ndarray, begins: Begins, document_mask: bool, vocab_size: int, trained: np.ndarray | None
) -> list[np.ndarray]:
    """As batch_arrays, but each trained token is its own label, for a model from which some are hidden."""
    arrays = batch_arrays(rows, begins, document_mask, vocab_size)
    known = True if trained is None else trained[:, :-1]
    arrays[1] = np.where(known, arrays[0], IGNORE)
    return arrays


def class_arrays(
    rows: np.ndarray, begins: Begins, vocab_size: int, trained: np.ndarray, pad_id: int, first: bool
) -> list[np.ndarray]:
    """As batch_arrays with a document mask, of records that end with their class, which alone is trained: the class is
    the label of the record's first token, or of its last one, and in its own place stands padding.
    """
    row, column = np.nonzero(trained)
    classes, rows = rows[row, column], rows.copy()
    rows[row, column] = pad_id
    apart = np.concatenate([begins[0], row]), np.concatenate([begins[1], column])
    arrays = batch_arrays(rows, apart, True, vocab_size)
    _, labels, _, positions = arrays
    labels[:] = IGNORE
    last = column - 1
    labels[row, last - positions[row, last] if first else last] = classes
    return arrays
