"""Batches for the trainer, and the position to resume from.

Global sample i is a function of i alone. Data-parallel rank r of n takes the samples r, r + n, r + 2n, ... (counted
from the sample at which the run began or was resumed), local_batch_size of them for a batch. So after any number of
batches the ranks together have taken an unbroken run of samples, and any other number of ranks can go on from there.

Workers: from text, every worker makes the samples of its own share of the lanes, for every batch, so no document is
tokenized twice, and the batch is put together here. Prepared shards need no shares: there a worker makes whole
batches. The position is ours and not the StatefulDataLoader's: it is what the trainer was given, whatever has been
fetched ahead, and it is free of the numbers of ranks and workers. Errors in the data come from workers as messages
and are raised here as DataError.
"""

import os
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan.datasets import DATASETS
from torchtitan.datasets.lanes import IndexedLanes, Lanes, StreamLanes
from torchtitan.datasets.packing import Cursor, LanePacker, batch_arrays, encode
from torchtitan.datasets.position import Position, merge_states, resume
from torchtitan.datasets.sources import DataError, Document, Indexed, Source, Stream
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.datasets.tokens import BlockReader, TokenShards

__all__ = ["Batch", "Loader", "build_loader", "merge_states"]

NAMES = ("tokens", "labels", "document_ids", "positions")
Batch = dict[str, torch.Tensor]
# A part of a batch: its rows (None: all of one batch or more), [rows, S] for each name (or nothing), and the new
# cursors of the lanes that it is from.
Piece = tuple[list[int] | None, Sequence[torch.Tensor], dict[int, Cursor]]


@dataclass(frozen=True)
class Share:
    """Which global samples a rank takes: first, first + stride, ...; batch_size of them for a batch."""

    first: int
    stride: int
    batch_size: int

    def samples(self, batches: np.ndarray) -> np.ndarray:
        """[n] numbers of batches to [n, batch_size] global samples."""
        own = batches[:, None] * self.batch_size + np.arange(self.batch_size)
        return self.first + own * self.stride


@dataclass(frozen=True)
class Form:
    """What a batch looks like, and how many there are (None: no end)."""

    tokenizer: Tokenizer
    seq_len: int
    document_mask: bool
    batches: int | None

    def numbers(self, start: int = 0, step: int = 1) -> Iterable[int]:
        return count(start, step) if self.batches is None else range(start, self.batches, step)

    def tensors(self, rows: np.ndarray, begins: tuple[np.ndarray, np.ndarray]) -> list[torch.Tensor]:
        arrays = batch_arrays(rows, begins, self.document_mask, self.tokenizer.vocab_size)
        return [torch.from_numpy(array) for array in arrays]


class LanePieces:
    """Samples packed from text. `stop`: raise at a record that cannot be read."""

    def __init__(self, lanes: Lanes, share: Share, form: Form, cursors: dict[int, Cursor], stop: bool) -> None:
        self.lanes, self.share, self.form, self.cursors, self.stop = lanes, share, form, cursors, stop
        period = int(np.lcm(share.stride, lanes.count)) // share.stride
        self.own_lanes = [(share.first + i * share.stride) % lanes.count for i in range(period)]

    def per_batch(self, workers: int) -> int:
        return workers

    def pieces(self, worker: int, workers: int) -> Iterator[Piece]:
        packers = self._packers(self.own_lanes[worker::workers])
        for batch in self.form.numbers():
            samples = self.share.samples(np.array([batch]))[0].tolist()
            own = [row for row, sample in enumerate(samples) if sample % self.lanes.count in packers]
            ids = np.empty((len(own), self.form.seq_len + 1), dtype=np.int64)
            begin_rows, begin_columns, cursors = [], [], {}
            for i, row in enumerate(own):
                position, lane = divmod(samples[row], self.lanes.count)
                while packers[lane].samples <= position:  # the samples between are other ranks'
                    columns = packers[lane].fill(ids[i])
                begin_rows += [i] * len(columns)
                begin_columns += columns
                cursors[lane] = packers[lane].cursor
            begins = np.array(begin_rows, dtype=np.int64), np.array(begin_columns, dtype=np.int64)
            yield own, self.form.tensors(ids, begins) if own else [], cursors

    def _packers(self, own: list[int]) -> dict[int, LanePacker]:
        cursors = {lane: self.cursors.get(lane, Cursor()) for lane in own}
        reader = self.lanes.reader({lane: cursor.place for lane, cursor in cursors.items()})
        return {
            lane: LanePacker(self.lanes, reader, lane, cursor, self.form.tokenizer, self.stop)
            for lane, cursor in cursors.items()
        }


class BlockPieces:
    """Samples of prepared shards; each is found by itself. Several batches go into a piece, as handing one over costs
    more than reading a few thousand tokens."""

    PIECE_TOKENS = 2**16
    PIECE_BATCHES = 64
    AHEAD = 2048
    """Samples whose places are worked out at a time."""
    own_lanes: list[int] = []

    def __init__(self, shards: TokenShards, share: Share, form: Form, seed: int, shuffle: bool) -> None:
        self.shards, self.share, self.form, self.seed, self.shuffle = shards, share, form, seed, shuffle

    def per_batch(self, workers: int) -> int:
        return 1

    def pieces(self, worker: int, workers: int) -> Iterator[Piece]:
        reader = BlockReader(self.shards, self.form.seq_len, self.seed, self.shuffle)
        size, limit = self.share.batch_size, self.form.batches
        together = min(max(1, self.PIECE_TOKENS // (size * self.form.seq_len)), self.PIECE_BATCHES)
        ahead = max(1, self.AHEAD // (together * size))
        for first in count(worker, workers * ahead):
            batches = (first + np.arange(ahead)[:, None] * workers) * together + np.arange(together)
            starts = reader.order(self.share.samples(batches.ravel()).ravel())
            for numbers, own in zip(batches.tolist(), np.split(starts, ahead), strict=True):
                left = together if limit is None else max(0, min(together, limit - numbers[0]))
                if left == 0:
                    return
                yield None, self.form.tensors(*reader.read(own[: left * size])), {}


class _Pieces(IterableDataset):
    def __init__(self, pieces: LanePieces | BlockPieces) -> None:
        self.pieces = pieces

    def __iter__(self) -> Iterator[Piece | str]:
        info = get_worker_info()
        pieces = self.pieces.pieces(info.id, info.num_workers) if info else self.pieces.pieces(0, 1)
        more = True
        while more:
            try:
                piece: Piece | str = next(pieces)
            except StopIteration:
                return
            except DataError as error:
                piece, more = str(error), False
            except OSError as error:
                piece, more = f"{error}; the data must stay where and as they are while a job runs", False
            if info and more and len(piece[1]):
                piece = piece[0], torch.stack(tuple(piece[1])), piece[2]  # one tensor crosses over faster than three
            yield piece


class Loader:
    """Iterating yields batches: tokens, labels, positions and document_ids, each [local_batch_size, seq_len] int64 on
    the CPU. Without document_mask all batches share one tensor of positions. Every iteration begins at the same place,
    and state_dict is about the latest one. Raises DataError."""

    def __init__(
        self, pieces: LanePieces | BlockPieces, start: Position, num_workers: int, pin_memory: bool, **options: Any
    ) -> None:
        self._pieces, self._start, self._pin_memory = pieces, start, pin_memory
        self._per_batch = pieces.per_batch(max(num_workers, 1))
        self._batches, self._cursors = 0, dict(start.cursors)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
            self._loader = StatefulDataLoader(
                _Pieces(pieces),
                batch_size=None,
                collate_fn=_as_it_is,
                num_workers=num_workers,
                worker_init_fn=_leave_signals_to_the_trainer,
                # A fork is ready in milliseconds and shares the index of the files. Elsewhere it is not safe.
                multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
                generator=torch.Generator(),  # its own: the iterator must not draw from the run's random numbers
                snapshot_every_n_steps=0,
                **options,
            )
        self._running: Any = None
        positions = torch.arange(pieces.form.seq_len).repeat(pieces.share.batch_size, 1)
        self._positions = positions.pin_memory() if pin_memory else positions

    def __iter__(self) -> Iterator[Batch]:
        if not self._loader.persistent_workers:
            self.close()
        self._batches, self._cursors = 0, dict(self._start.cursors)
        self._running = running = iter(self._loader)
        shape = (-1, *self._positions.shape)
        while pieces := list(islice(running, self._per_batch)):
            for piece in pieces:
                if isinstance(piece, str):
                    self.close()
                    raise DataError(piece)
                self._cursors.update(piece[2])
            tensors = self._put_together(pieces)
            tensors = [tensor.pin_memory() for tensor in tensors] if self._pin_memory else tensors
            for batch in zip(*(tensor.view(shape).unbind() for tensor in tensors), strict=True):
                self._batches += 1
                yield {"positions": self._positions, **dict(zip(NAMES, batch, strict=False))}

    def _put_together(self, pieces: list[Piece]) -> Sequence[torch.Tensor]:
        full = [(rows, tensors) for rows, tensors, _ in pieces if len(tensors)]
        if len(full) == 1:
            return full[0][1]
        size, form = self._pieces.share.batch_size, self._pieces.form
        whole = [torch.empty(size, form.seq_len, dtype=torch.int64) for _ in full[0][1]]
        for rows, tensors in full:
            for all_rows, tensor in zip(whole, tensors, strict=True):
                all_rows[rows] = tensor
        return whole

    @property
    def skipped(self) -> int:
        """Records that this rank's lanes have left out as unreadable, since the beginning of the job."""
        return sum(self._cursors[lane].skipped for lane in self._pieces.own_lanes if lane in self._cursors)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: what the trainer has been given so far. merge_states joins those of all ranks."""
        share = self._pieces.share
        samples = self._start.samples + self._batches * share.batch_size * share.stride
        return Position(samples, self._start.lanes, self._cursors, self._start.fingerprint).to_dict()

    def close(self) -> None:
        """End the workers. A new iteration starts new ones."""
        if self._running is not None and self._loader.num_workers:
            self._running._shutdown_workers()
        self._running = self._loader._iterator = None


def build_loader(
    *,
    dataset: str,
    dataset_path: str | None,
    text_field: str,
    tokenizer: Tokenizer,
    seq_len: int,
    local_batch_size: int,
    global_batch_size: int,
    dp_rank: int,
    dp_size: int,
    seed: int,
    shuffle: bool,
    document_mask: bool,
    on_bad_data: str,
    num_workers: int,
    persistent_workers: bool,
    pin_memory: bool,
    prefetch_factor: int | None,
    state: dict[str, Any] | None = None,
    infinite: bool = True,
) -> Loader:
    """The loader of one data-parallel rank. `state` is a merged state_dict to go on from.

    infinite=False ends after one epoch, after the same whole step on every rank: when the shortest lane is through. To
    know when that is, every rank tokenizes the epoch once before it begins; with prepared shards it is known.
    Raises DataError for data that cannot be used, ValueError for settings that do not fit each other.
    """
    if dataset not in DATASETS:
        raise ValueError(f"training.dataset is {dataset!r}; allowed: {', '.join(DATASETS)}")
    _check_batches(local_batch_size, global_batch_size, dp_size)
    _check_workers(num_workers, persistent_workers, prefetch_factor, pin_memory)
    stop = on_bad_data == "stop"
    source = DATASETS[dataset](dataset_path, text_field)
    lanes = None if isinstance(source, TokenShards) else _build_lanes(source, seed, shuffle, stop)
    settings = {"dataset": dataset, "seed": seed, "shuffle": shuffle, "seq_len": seq_len}
    fingerprint = settings | {"tokenizer": tokenizer.fingerprint} | source.fingerprint
    start = resume(state, lanes.count if lanes else 0, fingerprint)

    step = local_batch_size * dp_size if global_batch_size == -1 else global_batch_size
    batches = None
    if not infinite:
        left = _epoch_samples(source, lanes, tokenizer, seq_len, stop) - start.samples
        batches = max(0, left) // step * (step // (local_batch_size * dp_size))
    share = Share(start.samples + dp_rank, dp_size, local_batch_size)
    form = Form(tokenizer, seq_len, document_mask, batches)
    if lanes:
        pieces: LanePieces | BlockPieces = LanePieces(lanes, share, form, start.cursors, stop)
    else:
        source.check_tokenizer(tokenizer.fingerprint, tokenizer.vocab_size)
        source.blocks(seq_len)
        pieces = BlockPieces(source, share, form, seed, shuffle)
    return Loader(
        pieces, start, num_workers, pin_memory, persistent_workers=persistent_workers, prefetch_factor=prefetch_factor
    )


def _build_lanes(source: Source, seed: int, shuffle: bool, stop: bool) -> Lanes:
    if isinstance(source, Indexed):
        if stop:
            source.probe()
        return IndexedLanes(source, seed, shuffle)
    assert isinstance(source, Stream)
    return StreamLanes(source, seed, shuffle, stop)


def _epoch_samples(source: Source, lanes: Lanes | None, tokenizer: Tokenizer, seq_len: int, stop: bool) -> int:
    """Global samples until the shortest lane begins its second epoch."""
    if isinstance(source, TokenShards):
        return source.blocks(seq_len)
    assert lanes is not None
    tokens = [0] * lanes.count
    for lane, item in lanes.first_epoch():
        if isinstance(item, Document):
            tokens[lane] += len(encode(tokenizer, item))
        elif stop:
            raise item
    samples = (min(tokens) - 1) // seq_len * lanes.count
    if samples < 1:
        raise DataError(
            f"{source.name}: one epoch is too short: the shortest of {lanes.count} lanes has {min(tokens)} tokens, a "
            f"sample needs {seq_len + 1}; give more text or a shorter seq_len"
        )
    return samples


def _check_batches(local_batch_size: int, global_batch_size: int, dp_size: int) -> None:
    together = local_batch_size * dp_size
    if global_batch_size != -1 and (global_batch_size < together or global_batch_size % together):
        raise ValueError(
            f"training.global_batch_size is {global_batch_size}; allowed: multiples of {together} = local_batch_size * "
            f"data-parallel ranks = {local_batch_size} * {dp_size}, or -1 for just that"
        )


def _check_workers(num_workers: int, persistent_workers: bool, prefetch_factor: int | None, pin_memory: bool) -> None:
    if num_workers == 0 and (persistent_workers or prefetch_factor is not None):
        name = "persistent_workers" if persistent_workers else "prefetch_factor"
        raise ValueError(
            f"training.dataloader.{name} is set, but num_workers is 0; set num_workers >= 1, or leave {name} out"
        )
    if pin_memory and not torch.cuda.is_available():
        raise ValueError("training.dataloader.pin_memory is on, but there is no GPU to copy to; turn it off")


def _as_it_is(piece: Piece | str) -> Piece | str:
    return piece


def _leave_signals_to_the_trainer(worker: int) -> None:
    # A fork inherits the trainer's handlers. Ctrl-C is the trainer's to handle; a TERM has to end a worker.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setpgid(0, 0)  # out of reach of a launcher that signals the rank's whole process group
