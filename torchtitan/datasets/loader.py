"""Batches for the trainer, and the position to resume from.

Workers: for text, every worker builds the samples of its share of the streams for every batch, so no document is
tokenized twice, and the loader assembles the batch. For prepared shards a worker builds complete batches. The position
is not the StatefulDataLoader's: it counts the batches that the trainer has received, regardless of prefetching, and
does not depend on the number of ranks or workers. Workers send errors of the data and of the machine as messages, which
are raised here.

HeldOutBatches yields the validation batches: the first samples of a dataset, the same for any parallelism and batch
size.
"""

import hashlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan.core.errors import check_global_batch, check_persistence, check_pinned, check_prefetch
from torchtitan.core.machine_errors import MachineError, is_of_the_machine
from torchtitan.datasets.encoding import chat_tokenization, spelled_tokens_note
from torchtitan.datasets.mixing import Mixture
from torchtitan.datasets.position import Position, fingerprints_of_sources, merge_states, resume
from torchtitan.datasets.record_account import RECORDS, records_version
from torchtitan.datasets.sample_packing import Packing, steps_for, total_samples
from torchtitan.datasets.samples import BatchFormat, Labels, Piece, RankSamples, ShardPieces, StreamPieces
from torchtitan.datasets.sources import DataError, IndexedSource, SequentialSource, Source, UnreachableData
from torchtitan.datasets.sources.pretokenized import PretokenizedBlocks
from torchtitan.datasets.streams import MAX_STREAMS, IndexedStreams, SequentialStreams, Streams
from torchtitan.datasets.token_shards import TokenShards, Verification
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.process.distributed import device_type
from torchtitan.process.exit import die_with_parent

__all__ = ["Batch", "Loader", "LoaderOptions", "WeightedSource", "WorkerOptions", "build_loader", "merge_states"]

logger = logging.getLogger(__name__)
STREAMS_ARE_SHARED = (
    "%d data-parallel ranks read %d streams of text, so each document is read and tokenized %d times: where steps "
    "wait for data, prepare it once (torchtitan prepare)"
)
NAMES = ("tokens", "labels", "document_ids", "positions")
Batch = dict[str, torch.Tensor]


class WeightedSource(NamedTuple):
    """A source, its key in DATASETS, and its relative weight in the mixture."""

    dataset: str
    source: Source
    weight: float = 1.0


@dataclass(frozen=True)
class Failure:
    """An error of a worker. `of_the_machine`: not of the data, so that a restart may help."""

    text: str
    of_the_machine: bool


class _Pieces(IterableDataset):
    def __init__(self, pieces: StreamPieces | ShardPieces) -> None:
        self.pieces = pieces

    def __iter__(self) -> Iterator[Piece | Failure]:
        info = get_worker_info()
        pieces = self.pieces.pieces(info.id, info.num_workers) if info else self.pieces.pieces(0, 1)
        more = True
        while more:
            try:
                piece: Piece | Failure = next(pieces)
            except StopIteration:
                return
            except (DataError, MachineError) as error:
                piece, more = Failure(str(error), isinstance(error, (MachineError, UnreachableData))), False
            except OSError as error:
                text = f"{error}; the data must stay where and as they are while a job runs"
                piece, more = Failure(text, is_of_the_machine(error)), False
            if info and not isinstance(piece, Failure) and len(piece[1]):
                piece = piece[0], torch.stack(tuple(piece[1])), piece[2]  # one tensor is sent faster than three
            yield piece


class Loader:
    """An iterable over one rank's batches. Raises DataError, and MachineError where the data may be good.

    A batch has tokens, labels, positions and document_ids, each [local_batch_size, seq_len] int64 on the CPU,
    or shorter with packing.multiple. Without document_mask all batches share one tensor of positions. Every iteration
    begins at the same position, and state_dict describes the latest one."""

    verification: Verification | None = None
    """Background check of the prepared shards."""

    def __init__(
        self, pieces: StreamPieces | ShardPieces, start: Position, num_workers: int, pin_memory: bool, **options: Any
    ) -> None:
        self._pieces, self._start, self._pin_memory = pieces, start, pin_memory
        self._per_batch = pieces.pieces_per_batch(max(num_workers, 1))
        self._batches, self._cursors = 0, dict(start.cursors)
        # without workers the pieces are read directly: a data loader would take as long as reading a batch of tokens
        self._workers = _worker_loader(_Pieces(pieces), num_workers, **options) if num_workers else None
        self._running: Any = None
        positions = torch.arange(pieces.batch_format.seq_len).repeat(pieces.share.batch_size, 1)
        self._positions = positions.pin_memory() if pin_memory else positions

    def __iter__(self) -> Iterator[Batch]:
        if self._workers is None or not self._workers.persistent_workers:
            self.close()
        self._batches, self._cursors = 0, dict(self._start.cursors)
        self._running = running = iter(_Pieces(self._pieces) if self._workers is None else self._workers)
        size, packing = self._pieces.share.batch_size, self._pieces.batch_format.packing
        multiple = packing.multiple if packing is not None else 0
        while pieces := list(islice(running, self._per_batch)):
            if self.verification is not None:
                self.verification.raise_if_damaged()
            for piece in pieces:
                if isinstance(piece, Failure):
                    self.close()
                    raise MachineError(piece.text) if piece.of_the_machine else DataError(piece.text)
                self._cursors.update(piece[2])
            tensors = self._merge_pieces(pieces)
            tensors = [tensor.pin_memory() for tensor in tensors] if self._pin_memory else tensors
            # unsafe_split is the fastest way to make views of a tensor; it is unsafe for tensors with gradients
            for batch_tensors in zip(*(tensor.unsafe_split(size) for tensor in tensors), strict=True):
                self._batches += 1
                batch = dict(zip(NAMES, batch_tensors, strict=False))
                batch.setdefault("positions", self._positions)
                yield self._trim(batch, multiple) if multiple else batch

    def _trim(self, batch: Batch, multiple: int) -> Batch:
        short = trim_to_longest(batch, multiple)
        return {name: tensor.pin_memory() for name, tensor in short.items()} if self._pin_memory else short

    def _merge_pieces(self, pieces: list[Piece]) -> Sequence[torch.Tensor]:
        full = [(rows, tensors) for rows, tensors, _ in pieces if len(tensors)]
        if len(full) == 1:
            return list(full[0][1])
        size, batch_format = self._pieces.share.batch_size, self._pieces.batch_format
        merged = [torch.empty(size, batch_format.seq_len, dtype=torch.int64) for _ in full[0][1]]
        for rows, tensors in full:
            for all_rows, tensor in zip(merged, tensors, strict=True):
                all_rows[rows] = tensor
        return merged

    @property
    def skipped(self) -> int:
        """Return the number of unreadable records that this rank's streams have skipped since the job began."""
        return sum(self._cursors[stream].skipped for stream in self._pieces.local_streams if stream in self._cursors)

    @property
    def share(self) -> RankSamples:
        return self._pieces.share

    def position(self) -> Position:
        """Return a snapshot of the position after the batches that the trainer has received."""
        share = self._pieces.share
        samples = self._start.samples + self._batches * share.batch_size * share.ranks
        if self._pieces.end is not None:
            samples = min(samples, self._pieces.end)  # samples that only fill up the last step do not count
        return Position(samples, self._start.streams, dict(self._cursors), self._start.fingerprint)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, JSON-able. merge_states merges the states of all ranks."""
        return self.position().to_dict()

    def close(self) -> None:
        """Stop the workers. A new iteration starts new ones."""
        if self._workers is not None:
            if self._running is not None:
                self._running._shutdown_workers()
            self._workers._iterator = None
        self._running = None


class WorkerOptions(NamedTuple):
    """Options of the processes that build batches; the fields of [training.dataloader]."""

    num_workers: int = 0
    persistent_workers: bool = False
    pin_memory: bool = False
    prefetch_factor: int | None = None


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """The samples that a data-parallel rank reads: their order, number and contents.

    By default sources are mixed by weight without an end (mixing.py). `joined`, `epochs` and `packing` need prepared
    shards.
    """

    seq_len: int
    local_batch_size: int
    global_batch_size: int = -1
    dp_rank: int = 0
    dp_size: int = 1
    seed: int = 0
    shuffle: bool = True
    document_mask: bool = False
    on_bad_data: str = "stop"
    epochs: int | None = None
    """End after this many passes over the data. All ranks end after the same step."""
    tokens: int | None = None
    """End after the samples that hold this many tokens."""
    joined: bool = False
    """Read all sources as one: each record or block is read once per pass."""
    group_size: int = 1
    """Number of adjacent samples that stay in one batch of one rank."""
    packing: Packing | None = None
    """Build samples from whole documents."""
    labels: Labels = "next"
    """The labels to train on (samples.py)."""

    @property
    def reads_in_passes(self) -> bool:
        return self.joined or self.epochs is not None or (self.tokens is not None and self.packing is not None)

    @property
    def step_size(self) -> int:
        """Return the number of samples of an optimizer step over all ranks."""
        whole_pass = self.local_batch_size * self.dp_size
        return whole_pass if self.global_batch_size == -1 else self.global_batch_size


def build_loader(
    sources: Sequence[WeightedSource],
    tokenizer: Tokenizer,
    options: LoaderOptions,
    workers: WorkerOptions | None = None,
    state: dict[str, Any] | None = None,
) -> Loader:
    """Build the loader of one data-parallel rank. `state`: a merged state_dict to resume from.

    Raises DataError for unusable data, JobError for contradictory settings.
    """
    workers = workers or WorkerOptions()
    seed, shuffle, seq_len, packing = options.seed, options.shuffle, options.seq_len, options.packing
    check_global_batch(options.global_batch_size, options.local_batch_size, options.dp_size)
    _check_workers(workers)
    stop = options.on_bad_data == "stop"
    opened = [_open(source, seed, shuffle, stop, tokenizer, None if packing else seq_len) for _, source, _ in sources]
    counts = [1 if isinstance(source, TokenShards) else source.count for source in opened]
    mixture = Mixture([weight for _, _, weight in sources], counts, seed)
    texts = np.repeat([not isinstance(source, TokenShards) for source in opened], counts)
    settings = {"seed": seed, "shuffle": shuffle, "seq_len": seq_len}
    settings |= _fingerprint(sources, options.reads_in_passes, tokenizer, packing, state)
    for streams, content in zip(opened, fingerprints_of_sources(settings), strict=True):
        if not isinstance(streams, TokenShards):
            streams.refuses_reread = RECORDS not in content
    start = resume(state, np.flatnonzero(texts).tolist(), mixture.samples_per_stream, settings)
    shards = [source for source in opened if isinstance(source, TokenShards)]
    is_one = options.joined and len(sources) > 1
    assert not (is_one or options.epochs) or len(shards) == len(opened), "data with an end, or joined, is prepared"
    end = total_samples(shards, seq_len, options.epochs, options.tokens, seed, shuffle, packing)
    steps = None if end is None else steps_for(max(0, end - start.samples), options.step_size)
    batches = steps and steps * (options.step_size // (options.local_batch_size * options.dp_size))
    share = RankSamples(start.samples, options.dp_rank, options.dp_size, options.local_batch_size, options.group_size)
    batch_format = BatchFormat(tokenizer, seq_len, options.document_mask, batches, packing, options.labels)
    if options.dp_rank == 0:
        _warn_about_special_tokens(sources, tokenizer)
    if shards == opened and (len(opened) == 1 or options.reads_in_passes):
        pieces: StreamPieces | ShardPieces = ShardPieces(shards, share, batch_format, seed, shuffle, end)
    else:
        pieces = StreamPieces(opened, mixture, share, batch_format, start.cursors, seed, shuffle, stop, end)
        most = MAX_STREAMS if shuffle else 1
        _warn_about_shared_streams(pieces, options.dp_rank, options.dp_size, sum(counts), most)
    return Loader(
        pieces,
        start,
        workers.num_workers,
        workers.pin_memory,
        persistent_workers=workers.persistent_workers,
        prefetch_factor=workers.prefetch_factor,
    )


def trim_to_longest(batch: Batch, multiple: int) -> Batch:
    """Cut tensors [B, S] to the longest sample, rounded up; each sample is one document, padded on the right."""
    documents = batch["document_ids"]
    longest = int((documents == documents[:, :1]).sum(1).max())
    width = -(-longest // multiple) * multiple
    return {name: tensor[:, :width].contiguous() for name, tensor in batch.items()}


def _warn_about_shared_streams(pieces: StreamPieces, dp_rank: int, dp_size: int, streams: int, most: int) -> None:
    """Warn if several ranks read the same documents, because there are more than `most` ranks."""
    if dp_size > most and dp_rank == 0:
        times = max(1, round(len(pieces.local_streams) * dp_size / streams))
        logger.warning(STREAMS_ARE_SHARED, dp_size, streams, times)


def _warn_about_special_tokens(sources: Sequence[WeightedSource], tokenizer: Tokenizer) -> None:
    """Warn if records spell out special tokens, which are then ordinary text."""
    for name, source, _ in sources:
        if isinstance(source, PretokenizedBlocks):
            continue
        note = source.header.get("note") if isinstance(source, TokenShards) else spelled_tokens_note(tokenizer, source)
        if note:
            logger.warning("%s: %s", name, note)


def _check_workers(options: WorkerOptions) -> None:
    check_prefetch(options.num_workers, options.prefetch_factor)
    check_persistence(options.num_workers, options.persistent_workers)
    check_pinned(options.pin_memory, device_type())


def _open(
    source: Source, seed: int, shuffle: bool, stop: bool, tokenizer: Tokenizer, seq_len: int | None
) -> Streams | TokenShards:
    """Open a source. `seq_len`: length of samples that are cut, None with packing; shards must fill one sample."""
    if isinstance(source, TokenShards):
        source.check_tokenizer(tokenizer.fingerprint, tokenizer.vocab_size)
        if seq_len is not None:
            source.blocks(seq_len)
        return source
    if isinstance(source, PretokenizedBlocks):
        assert seq_len is not None
        source.check_length(seq_len)
    if isinstance(source, IndexedSource):
        if stop:
            source.probe()
        return IndexedStreams(source, seed, shuffle)
    assert isinstance(source, SequentialSource)
    return SequentialStreams(source, seed, shuffle, stop)


def _fingerprint(
    sources: Sequence[WeightedSource],
    in_passes: bool,
    tokenizer: Tokenizer,
    packing: Packing | None,
    state: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return further settings that the order of samples depends on; a single source is not nested. `state`: of the run
    to resume."""
    fingerprint: dict[str, Any] = {"tokenizer": tokenizer.fingerprint}
    if tokenizer.chat_template is not None:
        fingerprint["chat_template"] = hashlib.sha256(tokenizer.chat_template.encode()).hexdigest()
    if packing is not None:
        fingerprint["packing"] = packing.fingerprint
    descriptions: list[dict[str, Any]] = [{"dataset": name} | source.fingerprint for name, source, _ in sources]
    saved = fingerprints_of_sources(state["fingerprint"]) if state else []
    for content, (_, source, _), before in zip_longest(descriptions, sources, saved[: len(sources)]):
        if not isinstance(source, TokenShards | PretokenizedBlocks):
            content |= chat_tokenization(source, tokenizer) | records_version(source, before)
    if len(descriptions) == 1:
        return fingerprint | descriptions[0]
    for content, (_, _, weight) in zip(descriptions, sources, strict=True):
        content["weight"] = "in epochs" if in_passes else weight
    return fingerprint | {"sources": {str(number): content for number, content in enumerate(descriptions)}}


def _worker_loader(pieces: _Pieces, num_workers: int, **options: Any) -> StatefulDataLoader:
    """Return a loader whose iterators start worker processes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
        return StatefulDataLoader(
            pieces,
            batch_size=None,
            collate_fn=_identity,
            num_workers=num_workers,
            worker_init_fn=_ignore_trainer_signals,
            # A fork is ready in milliseconds and shares the index of the files. Elsewhere it is not safe.
            multiprocessing_context="fork" if sys.platform == "linux" else None,
            generator=torch.Generator(),  # separate, so that the iterator does not advance the run's random state
            snapshot_every_n_steps=0,
            **options,
        )


def _identity(piece: Piece | Failure) -> Piece | Failure:
    return piece


def _ignore_trainer_signals(worker: int) -> None:
    # A fork inherits the trainer's handlers. Ctrl-C is the trainer's to handle; a TERM has to end a worker.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setpgid(0, 0)  # out of reach of a launcher that signals the rank's whole process group
    die_with_parent(os.getppid())


class HeldOutBatches:
    """The held-out batches of a data-parallel rank.

    `first_rows`: (batch, number of rows to keep) -> batch; removes the rows beyond the first `samples` of all ranks.
    """

    def __init__(self, loader: Loader, samples: int, first_rows: Callable[[Batch, int], Batch]):
        self.loader, self.share, self.first_rows = loader, loader.share, first_rows
        self.samples = -(-samples // self.share.group_size) * self.share.group_size
        batch_of_all_ranks = self.share.batch_size * self.share.ranks
        self.batches = -(-self.samples // batch_of_all_ranks)  # the same on every rank, because each batch communicates

    def __iter__(self) -> Iterator[Batch]:
        for index, batch in enumerate(islice(self.loader, self.batches)):
            rows = int((self.share.samples(np.array([index])) < self.samples).sum())
            yield batch if rows == self.share.batch_size else self.first_rows(batch, rows)

    def close(self) -> None:
        self.loader.close()
