"""The samples of one rank as pieces of batches, from streams of documents or from prepared shards.

Global sample i is a function of i alone. Data-parallel rank r of n takes the samples r, r + n, r + 2n, ... (counted
from the sample at which the run began or was resumed), local_batch_size of them per batch. After any number of batches
the ranks together have consumed a contiguous range of samples, so any other number of ranks can continue from there.
Adjacent samples that share a loss, such as pairs, go to the same rank.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Literal, TypeVar

import numpy as np
import torch

from torchtitan.datasets.mixing import Mixture
from torchtitan.datasets.sample_packing import Packing, PackReader
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.streams import Cursor, StreamPacker, Streams
from torchtitan.datasets.token_shards import BlockReader, JoinedBlockReader, TokenShards
from torchtitan.datasets.tokenizer import Tokenizer

IGNORE = -100
"""Label of a position without a loss (the default ignore_index of PyTorch's cross-entropy)."""


def next_token_arrays(
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
    return next(next_token_pieces(rows, begins, document_mask, vocab_size, trained, len(rows)))


def next_token_pieces(
    rows: np.ndarray,
    begins: tuple[np.ndarray, np.ndarray],
    document_mask: bool,
    vocab_size: int,
    trained: np.ndarray | None,
    size: int,
) -> Iterator[list[np.ndarray]]:
    """Yield the arrays of next_token_arrays for `size` rows after each other, and for the remaining ones.

    What concerns documents is computed for all rows at once. The arrays, which are 24 bytes or more a token, are made
    when they are asked for, in parts that stay in the processor's cache.
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
    starts, lengths = borders[:-1], np.diff(borders)
    first_of_row = starts.searchsorted(row_borders)
    rows_of_starts, columns = np.divmod(starts, length)
    numbers = np.arange(len(starts)) - first_of_row[rows_of_starts]
    last_tokens = np.sort((row * length + column - 1)[column > 0])  # of documents with a next one in the row
    small = np.min_scalar_type(length)  # memory bounds the speed: positions are computed in few bytes
    columns, index = columns.astype(small), np.arange(length, dtype=small)
    tops = np.array([*range(0, n, size), n])
    parts = np.stack([tops, first_of_row[tops], last_tokens.searchsorted(tops * length)], axis=1).tolist()
    for (top, first, first_end), (bottom, stop, stop_end) in pairwise(parts):
        shape = bottom - top, length
        arrays = [rows[top:bottom, :-1].astype(np.int64), rows[top:bottom, 1:].astype(np.int64)]
        arrays.append(numbers[first:stop].repeat(lengths[first:stop]).reshape(shape))
        if document_mask:
            positions = columns[first:stop].repeat(lengths[first:stop]).reshape(shape)
            arrays.append(np.subtract(index, positions, out=positions).astype(np.int64))
            arrays[1].reshape(-1)[last_tokens[first_end:stop_end] - top * length] = IGNORE
        if trained is not None:
            arrays[1][~trained[top:bottom, 1:]] = IGNORE
        yield arrays


Labels = Literal["next", "same", "first", "last", "ends"]
"""The label: the next token, the token itself, the record's class at its first or last token, or 0 at the last."""
Begins = tuple[np.ndarray, np.ndarray]


def masked_lm_arrays(
    rows: np.ndarray, begins: Begins, document_mask: bool, vocab_size: int, trained: np.ndarray | None
) -> list[np.ndarray]:
    """Return arrays like next_token_arrays, with each trained token as its own label (masked language modelling)."""
    arrays = next_token_arrays(rows, begins, document_mask, vocab_size)
    mask = True if trained is None else trained[:, :-1]
    arrays[1] = np.where(mask, arrays[0], IGNORE)
    return arrays


def class_arrays(
    rows: np.ndarray, begins: Begins, vocab_size: int, trained: np.ndarray, pad_id: int, first: bool
) -> list[np.ndarray]:
    """Return arrays like next_token_arrays with a document mask, for classification.

    Each record ends with its class, its only trained id. The class becomes the label of the record's first or last
    token, and is replaced by padding in the tokens.
    """
    row, column = np.nonzero(trained)
    classes, rows = rows[row, column], rows.copy()
    rows[row, column] = pad_id
    all_begins = np.concatenate([begins[0], row]), np.concatenate([begins[1], column])
    arrays = next_token_arrays(rows, all_begins, True, vocab_size)
    _, labels, _, positions = arrays
    labels[:] = IGNORE
    last = column - 1
    labels[row, last - positions[row, last] if first else last] = classes
    return arrays


def end_arrays(rows: np.ndarray, begins: Begins, vocab_size: int, trained: np.ndarray) -> list[np.ndarray]:
    """Return arrays like next_token_arrays with a document mask, and 0 as the label of each row's last token alone.

    A row is one record, padded on the right by at least a token. One without trained tokens, which fills a step up, has
    no label.
    """
    arrays = next_token_arrays(rows, begins, True, vocab_size)
    _, labels, documents, _ = arrays
    labels[:] = IGNORE
    last = (documents == documents[:, :1]).sum(1) - 1
    labels[np.arange(len(rows)), last] = np.where(trained.any(1), 0, IGNORE)
    return arrays


# A part of a batch: its rows (None: one or more complete batches), a [rows, S] tensor per name (or none), and the new
# cursors of the streams it was read from.
Piece = tuple[list[int] | None, Sequence[torch.Tensor] | torch.Tensor, dict[int, Cursor]]


Numbers = TypeVar("Numbers", np.ndarray, torch.Tensor)


def global_sample_numbers(local_numbers: Numbers, rank: int, ranks: int, group_size: int) -> Numbers:
    """Map a rank's local sample numbers, counted from 0, to sample numbers over all ranks.

    `group_size`: number of adjacent samples that go to the same rank.
    """
    return (local_numbers // group_size * ranks + rank) * group_size + local_numbers % group_size


@dataclass(frozen=True)
class RankSamples:
    """One rank's share of the global samples from `start` on: `batch_size` per batch, `group_size` adjacent ones."""

    start: int
    rank: int
    ranks: int
    batch_size: int
    group_size: int = 1

    def samples(self, batches: np.ndarray) -> np.ndarray:
        """Map [n] batch numbers to [n, batch_size] global samples."""
        local_samples = batches[:, None] * self.batch_size + np.arange(self.batch_size)
        return self.start + global_sample_numbers(local_samples, self.rank, self.ranks, self.group_size)

    def streams(self, mixture: Mixture) -> list[int]:
        """Return the streams that this rank's samples come from."""
        first, stride = self.start + self.rank * self.group_size, self.ranks * self.group_size
        return list(
            dict.fromkeys(
                stream for offset in range(self.group_size) for stream in mixture.streams_of(first + offset, stride)
            )
        )


@dataclass(frozen=True)
class BatchFormat:
    """The length, number, packing and labels of batches.

    `batches`: number of batches (None: endless). `packing`: pack whole documents from prepared shards; None: cut
    samples from the concatenation of all documents. `labels`: kind of labels, see `Labels`."""

    tokenizer: Tokenizer
    seq_len: int
    document_mask: bool
    batches: int | None
    packing: Packing | None = None
    labels: Labels = "next"

    def numbers(self, start: int = 0, step: int = 1) -> Iterable[int]:
        return count(start, step) if self.batches is None else range(start, self.batches, step)

    def tensors(
        self, rows: np.ndarray, begins: tuple[np.ndarray, np.ndarray], trained: np.ndarray | None, size: int
    ) -> Iterator[list[torch.Tensor]]:
        """Convert ids [n, seq_len + 1] to batch tensors, each [size, seq_len], as `next_token_pieces` does."""
        vocab_size = self.tokenizer.vocab_size
        pieces: Iterable[Sequence[np.ndarray]]
        if self.labels == "next":
            pieces = next_token_pieces(rows, begins, self.document_mask, vocab_size, trained, size)
        else:
            if self.labels == "same":
                arrays = masked_lm_arrays(rows, begins, self.document_mask, vocab_size, trained)
            elif self.labels == "ends":
                assert trained is not None, "rewards are of whole records"
                arrays = end_arrays(rows, begins, vocab_size, trained)
            else:
                assert self.packing is not None and trained is not None, "classes are of whole records"
                arrays = class_arrays(rows, begins, vocab_size, trained, self.packing.pad_id, self.labels == "first")
            borders = range(size, len(rows), size)
            pieces = zip(*(np.split(array, borders) for array in arrays), strict=True)
        return ([torch.from_numpy(array) for array in arrays] for arrays in pieces)

    def reader(self, sources: Sequence[TokenShards], seed: int, shuffle: bool) -> "Reader":
        """Return a reader of prepared shards from one folder, or from several joined folders."""
        if self.packing is not None:
            return PackReader(sources, self.seq_len, seed, shuffle, self.packing)
        if len(sources) == 1:
            return BlockReader(sources[0], self.seq_len, seed, shuffle)
        return JoinedBlockReader(sources, self.seq_len, seed, shuffle)


Reader = BlockReader | JoinedBlockReader | PackReader


class StreamPieces:
    """Pieces of batches packed from text, of one or several sources.

    Prepared shards among several sources count as a source of one stream with random access. `stop`: raise at an
    unreadable record instead of skipping it. From global sample `end` on nothing is read, and no label has a loss."""

    def __init__(
        self,
        sources: Sequence[Streams | TokenShards],
        mixture: Mixture,
        share: RankSamples,
        batch_format: BatchFormat,
        cursors: dict[int, Cursor],
        seed: int,
        shuffle: bool,
        stop: bool,
        end: int | None = None,
    ) -> None:
        self.sources, self.mixture, self.share, self.batch_format, self.cursors = (
            sources,
            mixture,
            share,
            batch_format,
            cursors,
        )
        self.seed, self.shuffle, self.stop, self.end = seed, shuffle, stop, end
        self.local_streams = share.streams(mixture)

    def pieces_per_batch(self, workers: int) -> int:
        return workers

    def pieces(self, worker: int, workers: int) -> Iterator[Piece]:
        packers = self._packers(self.local_streams[worker::workers])
        for batch in self.batch_format.numbers():
            samples = self.share.samples(np.array([batch]))[0]
            streams, numbers = (array.tolist() for array in self.mixture.locate(samples))
            local_rows = [row for row, stream in enumerate(streams) if stream in packers]
            ids = np.zeros((len(local_rows), self.batch_format.seq_len + 1), dtype=np.int64)
            trained = np.zeros(ids.shape, dtype=bool)
            begin_rows, begin_columns, cursors = [], [], {}
            for i, row in enumerate(local_rows):
                if self.end is not None and samples[row] >= self.end:
                    continue
                packer = packers[streams[row]]
                columns = packer.sample(numbers[row], ids[i], trained[i])
                begin_rows += [i] * len(columns)
                begin_columns += columns
                if isinstance(packer, StreamPacker):
                    cursors[streams[row]] = packer.cursor
            begins = np.array(begin_rows, dtype=np.int64), np.array(begin_columns, dtype=np.int64)
            tensors = next(self.batch_format.tensors(ids, begins, trained, len(ids))) if local_rows else []
            yield local_rows, tensors, cursors

    def _packers(self, local_streams: list[int]) -> dict[int, "StreamPacker | ShardStream"]:
        packers: dict[int, StreamPacker | ShardStream] = {}
        for source, first, end in zip(
            self.sources, self.mixture.first_streams.tolist(), self.mixture.first_streams[1:].tolist(), strict=False
        ):
            streams = [stream for stream in local_streams if first <= stream < end]
            if isinstance(source, TokenShards):
                reader = self.batch_format.reader([source], self.seed, self.shuffle) if streams else None
                packers |= {stream: ShardStream(reader) for stream in streams if reader is not None}
                continue
            cursors = {stream: self.cursors.get(stream, Cursor()) for stream in streams}
            documents = source.reader({stream - first: cursor.document for stream, cursor in cursors.items()})
            for stream, cursor in cursors.items():
                packers[stream] = StreamPacker(
                    source, documents, stream - first, cursor, self.batch_format.tokenizer, self.stop
                )
        return packers


class ShardStream:
    """A stream of prepared shards, which are one of several sources."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def sample(self, number: int, row: np.ndarray, trained: np.ndarray) -> list[int]:
        """Fill the rows with a sample, like StreamPacker.sample."""
        start = self.reader.order(np.array([number]))
        ids, (_, columns) = self.reader.read(start)
        flags = self.reader.trained(start)
        row[:], trained[:] = ids[0], True if flags is None else flags[0]
        return columns.tolist()


class ShardPieces:
    """Pieces of batches from prepared shards, with random access to samples.

    A piece contains several batches, because handing a piece over costs more than reading a few thousand tokens. From
    global sample `end` on, no label has a loss."""

    PIECE_TOKENS = 2**17
    PIECE_BATCHES = 64
    READ_TOKENS = 2**20
    """Tokens that are looked up and read together, for several pieces. The first reads are shorter, as the first batch
    waits for them: a piece, then twice as much each time."""
    AHEAD = 2**14
    """Number of samples per computation of their order."""
    local_streams: list[int] = []

    def __init__(
        self,
        sources: Sequence[TokenShards],
        share: RankSamples,
        batch_format: BatchFormat,
        seed: int,
        shuffle: bool,
        end: int | None = None,
    ) -> None:
        self.sources, self.share, self.batch_format, self.end = sources, share, batch_format, end
        self.seed, self.shuffle = seed, shuffle

    def pieces_per_batch(self, workers: int) -> int:
        return 1

    def pieces(self, worker: int, workers: int) -> Iterator[Piece]:
        reader = self.batch_format.reader(self.sources, self.seed, self.shuffle)
        size, limit = self.share.batch_size, self.batch_format.batches
        per_piece = min(max(1, self.PIECE_TOKENS // (size * self.batch_format.seq_len)), self.PIECE_BATCHES)
        per_read = per_piece * max(1, self.READ_TOKENS // (per_piece * size * self.batch_format.seq_len))
        num_reads = max(1, self.AHEAD // (per_read * size))
        num_pieces = num_reads * per_read // per_piece
        reading = per_piece
        for first in count(worker, workers * num_pieces):
            batches = (first + np.arange(num_pieces)[:, None] * workers) * per_piece + np.arange(per_piece)
            samples = self.share.samples(batches.ravel()).ravel()
            past = np.zeros(len(samples), dtype=bool) if self.end is None else samples >= self.end
            starts = reader.order(np.where(past, 0, samples))
            remaining = len(starts) if limit is None else int((batches < limit).sum()) * size
            begin = 0
            while begin < remaining:
                read = slice(begin, min(begin + reading * size, remaining))
                begin, reading = read.stop, min(2 * reading, per_read)
                trained = reader.trained(starts[read])
                if past[read].any():
                    shape = len(starts[read]), self.batch_format.seq_len + 1
                    trained = np.ones(shape, dtype=bool) if trained is None else trained
                    trained = trained & ~past[read, None]
                rows, begins = reader.read(starts[read])
                for tensors in self.batch_format.tensors(rows, begins, trained, per_piece * size):
                    yield None, tensors, {}
            if remaining < len(starts):
                return
