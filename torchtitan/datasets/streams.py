"""The order of documents: each epoch's shuffled documents are distributed over streams, which advance independently.

mixing.py decides which stream a sample comes from. The number of streams depends only on the data, so the order is the
same for any number of ranks and workers. A stream that has used up its documents begins its next epoch without waiting
for the others.

* An IndexedSource: the epoch's permutation of all documents, distributed one by one.
* A SequentialSource with few parts: one pass over the parts in shuffled order, documents distributed one by one. A
  reader queues the documents of its other streams until they need them. Documents are shuffled within blocks of BLOCK.
* A SequentialSource with many parts of even size (the shards of a big dataset): each stream has its own parts.

Without shuffling there is one stream, because several streams would pack documents that are not adjacent into one
sample.
"""

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from torchtitan.datasets.encoding import NO_TOKENS, EncodedTokens, encode
from torchtitan.datasets.shuffle import key, permute
from torchtitan.datasets.sources import (
    BadRecord,
    DataError,
    Document,
    DocumentOrError,
    IndexedSource,
    Part,
    SequentialSource,
    UnreachableData,
    document_or_error,
)
from torchtitan.datasets.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
MAX_LOGGED_ERRORS = 10


MAX_STREAMS = 64
MIN_DOCUMENTS = 8
"""Minimum number of documents per stream; a small source has fewer streams instead. The fewer documents streams have,
the more they differ in length, and the sooner a short one repeats."""
BLOCK = 1024
MAX_EMPTY_EPOCHS = 8
"""A stream raises an error after this many epochs without text."""


class DocumentPosition(NamedTuple):
    """A document's position in its stream. Stable between runs, because checkpoints store it."""

    epoch: int = 0
    part: int = 0
    ordinal: int = 0


REREAD = "the reading of records of this form has changed"
SINCE = "since the checkpoint's run began, so the same records have other token ids now: finish with the program that "
SINCE += "began it, or start the data from the beginning"


class IndexedStreams:
    refuses_reread = False
    """Refuse records that an earlier version, with which the run began, read otherwise."""

    def __init__(self, source: IndexedSource, seed: int, shuffle: bool) -> None:
        self.source, self.seed, self.shuffle = source, seed, shuffle
        self.count = stream_count(len(source)) if shuffle else 1

    def reader(self, positions: dict[int, DocumentPosition]) -> "IndexedStreamReader":
        """Return a reader that continues from these positions; the keys are the streams it will serve."""
        return IndexedStreamReader(self, dict(positions))

    def first_epoch(self) -> Iterator[tuple[int, DocumentOrError]]:
        """Yield every document once, with its stream."""
        for n, index in enumerate(self.order(0, np.arange(len(self.source))).tolist()):
            yield n % self.count, document_or_error(self.source.get, index)

    def order(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return permute(positions, len(self.source), key(self.seed, epoch)) if self.shuffle else positions


class IndexedStreamReader:
    """A reader that computes the order of AHEAD documents of a stream at a time."""

    AHEAD = 64

    def __init__(self, streams: IndexedStreams, positions: dict[int, DocumentPosition]) -> None:
        self.streams, self.positions = streams, positions
        self._ahead: dict[int, tuple[int, int, list[int]]] = {}

    def next(self, stream: int) -> tuple[DocumentPosition, DocumentOrError]:
        epoch, _, ordinal = self.positions[stream]
        if stream + ordinal * self.streams.count >= len(self.streams.source):
            epoch, ordinal = epoch + 1, 0
        self.positions[stream] = DocumentPosition(epoch, 0, ordinal + 1)
        return DocumentPosition(epoch, 0, ordinal), document_or_error(
            self.streams.source.get, self._index(stream, epoch, ordinal)
        )

    def _index(self, stream: int, epoch: int, ordinal: int) -> int:
        cached_epoch, first, indices = self._ahead.get(stream, (-1, 0, []))
        if epoch != cached_epoch or not first <= ordinal < first + len(indices):
            positions = stream + np.arange(ordinal, ordinal + self.AHEAD) * self.streams.count
            first, indices = (
                ordinal,
                self.streams.order(epoch, positions[positions < len(self.streams.source)]).tolist(),
            )
            self._ahead[stream] = (epoch, first, indices)
        return indices[ordinal - first]


class SequentialStreams:
    """The streams of a SequentialSource. `stop`: raise an error that occurs while documents are counted."""

    refuses_reread = False

    def __init__(self, source: SequentialSource, seed: int, shuffle: bool, stop: bool) -> None:
        self.source, self.seed, self.shuffle = source, seed, shuffle
        self.parts_per_stream = shuffle and _even(source.parts)
        documents = 0 if self.parts_per_stream else self._records(MAX_STREAMS * MIN_DOCUMENTS, stop)
        self.count = MAX_STREAMS if self.parts_per_stream else stream_count(documents) if shuffle else 1

    def reader(self, positions: dict[int, DocumentPosition]) -> "SequentialStreamReader":
        return SequentialStreamReader(self, dict(positions))

    def first_epoch(self) -> Iterator[tuple[int, DocumentOrError]]:
        for stream in range(self.count) if self.parts_per_stream else [0]:
            for position, item in self.read(stream, DocumentPosition()):
                yield stream if self.parts_per_stream else self.stream_of(position), item

    def stream_of(self, position: DocumentPosition) -> int:
        # The assignment changes with every round and part. With a fixed one, alternating data (question, answer) would
        # give each stream documents of one kind, and streams of short documents would run epochs ahead. Parts of only a
        # few documents reach all streams too.
        turn, index_in_turn = divmod(position.ordinal, self.count)
        return _deal(self.seed, position.part, turn, self.count)[index_in_turn]

    def read(self, group: int, start: DocumentPosition) -> Iterator[tuple[DocumentPosition, DocumentOrError]]:
        """Yield an epoch's documents from a position on. `group`: a stream with its own parts; 0 if all share them."""
        epoch, first_part, first_ordinal = start
        parts = self._parts(group, epoch)
        for part in range(first_part, len(parts)):
            number, begin = parts[part], first_ordinal // BLOCK * BLOCK
            records = self.source.parts[number].read(begin)
            while block := list(islice(records, BLOCK)):
                order = np.arange(len(block))
                if self.shuffle:
                    order = permute(order, len(block), key(self.seed, epoch, number, begin // BLOCK))
                for i in order[max(0, first_ordinal - begin) :].tolist():
                    yield DocumentPosition(epoch, part, first_ordinal), block[i]
                    first_ordinal += 1
                begin += BLOCK
            first_ordinal = 0

    def _parts(self, group: int, epoch: int) -> list[int]:
        numbers = list(range(len(self.source.parts)))
        if self.parts_per_stream:
            numbers = sorted(numbers, key=lambda i: -self.source.parts[i].size)[group :: self.count]
        if not self.shuffle:
            return sorted(numbers)
        order = permute(np.arange(len(numbers)), len(numbers), key(self.seed, epoch, group))
        return [numbers[i] for i in order.tolist()]

    def _records(self, enough: int, stop: bool) -> int:
        """Count the records, up to `enough`."""
        count = 0
        for part in self.source.parts:
            for item in islice(part.read(0), enough - count):
                if stop and isinstance(item, DataError):
                    raise item
                count += 1
            if count == enough:
                break
        if not count:
            raise DataError(f"{self.source.name}: there are no documents in it; give data with text")
        return count


class SequentialStreamReader:
    """A reader with one pass over the source per active epoch; documents of other streams wait in queues."""

    def __init__(self, streams: SequentialStreams, positions: dict[int, DocumentPosition]) -> None:
        self.streams, self.positions = streams, positions
        self._passes: dict[tuple[int, int], Iterator[tuple[DocumentPosition, DocumentOrError]]] = {}
        self._waiting: dict[tuple[int, int], deque[tuple[DocumentPosition, DocumentOrError]]] = {}

    def next(self, stream: int) -> tuple[DocumentPosition, DocumentOrError]:
        epoch = self.positions[stream].epoch
        for later in range(epoch, epoch + MAX_EMPTY_EPOCHS):
            result = self._next_of_epoch(stream, later)
            if result is not None:
                position = result[0]
                self.positions[stream] = position._replace(ordinal=position.ordinal + 1)
                return result
        raise no_text(self.streams.source.name, stream, self.streams.count)

    def _next_of_epoch(self, stream: int, epoch: int) -> tuple[DocumentPosition, DocumentOrError] | None:
        group = stream if self.streams.parts_per_stream else 0
        if (group, epoch) not in self._passes:
            self._open(group, epoch)
        queue = self._waiting[stream, epoch]
        for position, item in () if queue else self._passes[group, epoch]:
            owner = stream if self.streams.parts_per_stream else self.streams.stream_of(position)
            if owner in self.positions and position >= self._start(owner, epoch):
                self._waiting[owner, epoch].append((position, item))
                if owner == stream:
                    break
        if queue:
            return queue.popleft()
        self.positions[stream] = DocumentPosition(epoch + 1)
        self._close_finished(group)
        return None

    def _group(self, group: int) -> list[int]:
        return [group] if self.streams.parts_per_stream else list(self.positions)

    def _start(self, stream: int, epoch: int) -> DocumentPosition:
        """Return the earliest position of a stream's next document in an epoch, or in a later one."""
        return max(self.positions[stream], DocumentPosition(epoch))

    def _open(self, group: int, epoch: int) -> None:
        starts = [self._start(stream, epoch) for stream in self._group(group)]
        self._passes[group, epoch] = self.streams.read(group, min(starts))
        for stream in self._group(group):
            self._waiting[stream, epoch] = deque()

    def _close_finished(self, group: int) -> None:
        oldest = min(self.positions[stream].epoch for stream in self._group(group))
        for epoch in [e for g, e in self._passes if g == group and e < oldest]:
            del self._passes[group, epoch]
            for stream in self._group(group):
                del self._waiting[stream, epoch]


@lru_cache(maxsize=256)
def _deal(seed: int, part: int, turn: int, streams: int) -> list[int]:
    """Return the stream of each of a round's documents."""
    return permute(np.arange(streams), streams, key(seed, part, turn)).tolist()


Streams = IndexedStreams | SequentialStreams
StreamReader = IndexedStreamReader | SequentialStreamReader


def no_text(source: str, stream: int, streams: int) -> DataError:
    return DataError(
        f"{source}: no text in {MAX_EMPTY_EPOCHS} epochs of stream {stream} of {streams}; give documents with text (or "
        "set training.text_field to the field that holds it), or spread them over files more evenly"
    )


def stream_count(documents: int) -> int:
    """Return the largest power of two that leaves at least MIN_DOCUMENTS per stream."""
    return 1 << (min(max(documents // MIN_DOCUMENTS, 1), MAX_STREAMS).bit_length() - 1)


def _even(parts: list[Part]) -> bool:
    """Return True if each stream can have its own parts without some documents being read much more often."""
    if len(parts) < MAX_STREAMS or len({type(part) for part in parts}) > 1:
        return False
    sizes = sorted((part.size for part in parts), reverse=True)
    stream_sizes = [sum(sizes[stream::MAX_STREAMS]) for stream in range(MAX_STREAMS)]
    return max(stream_sizes) <= 1.1 * min(stream_sizes)


@dataclass(frozen=True)
class Cursor:
    """The position of a stream: the document and token at which its next sample begins, and counts so far."""

    samples: int = 0
    document: DocumentPosition = DocumentPosition()
    offset: int = 0
    skipped: int = 0

    def to_list(self) -> list[int]:
        return [self.samples, *self.document, self.offset, self.skipped]

    @classmethod
    def from_list(cls, numbers: list[int]) -> "Cursor":
        samples, epoch, part, ordinal, offset, skipped = numbers
        return cls(samples, DocumentPosition(epoch, part, ordinal), offset, skipped)


class StreamPacker:
    """Packs the documents of one stream into samples.

    A sample begins with the last label of the previous one, so every token is an input once and a label once. `stop`:
    raise at an unreadable record instead of counting it."""

    def __init__(
        self, streams: Streams, reader: StreamReader, stream: int, cursor: Cursor, tokenizer: Tokenizer, stop: bool
    ) -> None:
        self.streams, self.reader, self.stream, self.tokenizer, self.stop = streams, reader, stream, tokenizer, stop
        self.samples, self.skipped = cursor.samples, cursor.skipped
        self._position, self._tokens, self._offset = cursor.document, NO_TOKENS, 0
        if cursor.samples:
            # the last sample ended inside this document: continue with its rest
            self._next_document()
            if self._position != cursor.document or cursor.offset >= len(self._tokens.ids):
                raise DataError(
                    f"the document at {tuple(cursor.document)} of stream {stream}, where the checkpoint ends, differs "
                    "from the one that was read: the data have changed since; bring back the old data, or start "
                    "a new job"
                )
            self._offset = cursor.offset

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.samples, self._position, self._offset, self.skipped)

    def sample(self, number: int, row: np.ndarray, trained: np.ndarray) -> list[int]:
        """Fill the rows with the stream's sample of this number; return the columns at which documents begin.

        It is the next sample, or a later one if other ranks read the stream too."""
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
        epoch = self._position.epoch
        while True:
            self._position, item = self.reader.next(self.stream)
            tokens = self._tokens_of(item)
            if len(tokens.ids):
                self._tokens, self._offset = tokens, 0
                return
            if self._position.epoch - epoch > MAX_EMPTY_EPOCHS:
                raise no_text(self.streams.source.name, self.stream, self.streams.count)

    def _tokens_of(self, item: DocumentOrError) -> EncodedTokens:
        if isinstance(item, Document):
            if item.is_reread and self.streams.refuses_reread:
                raise DataError(f"{item.location}: {REREAD} {SINCE}")
            try:
                return encode(self.tokenizer, item)
            except BadRecord as error:
                item = error
        return self._skip(item)

    def _skip(self, error: DataError) -> EncodedTokens:
        if self.stop or isinstance(error, UnreachableData):
            raise error
        self.skipped += 1
        if self.skipped <= MAX_LOGGED_ERRORS:
            logger.warning("left out (%d in stream %d so far): %s", self.skipped, self.stream, error)
        return NO_TOKENS
