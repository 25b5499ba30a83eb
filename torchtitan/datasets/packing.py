"""Packing of documents into samples: concatenated tokens, with positions, document numbers and labels.

The label of a token depends on the task: the next token (batch_arrays), the token itself (own_arrays), or the class of
its record (class_arrays).
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
"""Label without a loss (PyTorch's default ignore_index of cross-entropy)."""
SHOWN_ERRORS = 10


@dataclass(frozen=True)
class Cursor:
    """The position of a lane: the document and token at which its next sample begins, and counts so far."""

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
    """Packs the documents of one lane into samples.

    A sample begins with the last label of the previous one, so every token is an input once and a label once. `stop`:
    raise at an unreadable record instead of counting it."""

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
        """Fill the rows with the lane's sample of this number; return the columns at which documents begin.

        It is the next sample, or a later one if other ranks read the lane too."""
        while self.samples <= number:
            columns = self.fill(row, trained)
        return columns

    def fill(self, row: np.ndarray, trained: np.ndarray) -> list[int]:
        """Write the next sample's seq_len + 1 ids and loss mask; return the columns at which documents begin."""
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
    """Return tokens, labels and document numbers, each [n, S] int64.

    `rows`: [n, S + 1] ids; `begins`: (row, column) of each document's first token; `trained`: [n, S + 1] loss mask
    (None: all trained). Labels of tokens that are not trained are IGNORE.

    With document_mask it also returns positions, which restart at each document, and the label that would be the next
    document's first token is IGNORE, because it cannot be predicted. Raises DataError for an id outside the vocabulary.
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
"""The label: the next token, the token itself, or the record's class at its first or last token."""
Begins = tuple[np.ndarray, np.ndarray]


def own_arrays(
    rows: np.ndarray, begins: Begins, document_mask: bool, vocab_size: int, trained: np.ndarray | None
) -> list[np.ndarray]:
    """Return arrays like batch_arrays, with each trained token as its own label (masked language modelling)."""
    arrays = batch_arrays(rows, begins, document_mask, vocab_size)
    mask = True if trained is None else trained[:, :-1]
    arrays[1] = np.where(mask, arrays[0], IGNORE)
    return arrays


def class_arrays(
    rows: np.ndarray, begins: Begins, vocab_size: int, trained: np.ndarray, pad_id: int, first: bool
) -> list[np.ndarray]:
    """Return arrays like batch_arrays with a document mask, for classification.

    Each record ends with its class, its only trained id. The class becomes the label of the record's first or last
    token, and is replaced by padding in the tokens.
    """
    row, column = np.nonzero(trained)
    classes, rows = rows[row, column], rows.copy()
    rows[row, column] = pad_id
    all_begins = np.concatenate([begins[0], row]), np.concatenate([begins[1], column])
    arrays = batch_arrays(rows, all_begins, True, vocab_size)
    _, labels, _, positions = arrays
    labels[:] = IGNORE
    last = column - 1
    labels[row, last - positions[row, last] if first else last] = classes
    return arrays
