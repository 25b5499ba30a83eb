"""Tokenization of a source into prepared shards, by `torchtitan prepare` and before a run with epochs."""

import fcntl
import glob
import hashlib
import json
import os
import secrets
import shutil
import signal
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from torchtitan.core.errors import JobError
from torchtitan.core.progress_bar import progress_bar
from torchtitan.datasets.encoding import (
    TRAIN_ON_ANSWERS,
    TrainOn,
    chat_tokenization,
    describe_spelled,
    encode,
    spelled_token,
    unread_fields,
)
from torchtitan.datasets.record_account import RECORDS, RECORDS_VERSION, has_records
from torchtitan.datasets.sources import (
    BadRecord,
    Chat,
    DataError,
    Document,
    DocumentOrError,
    IndexedSource,
    LabelledTexts,
    Pair,
    Source,
    UnreachableData,
)
from torchtitan.datasets.token_shards import ShardWriter, TokenReader, TokenShards
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.process.exit import die_with_parent
from torchtitan.process.machine import SHARED_MEMORY_REMEDY, shared_memory_obstacle

PERCENTILES = (50, 90, 99, 100)
ADVISED_FRACTION = 0.99
"""Fraction of records that fit into the suggested seq_len without truncation."""


Pieces = list[tuple[np.ndarray, np.ndarray | None]]
"""A document's pieces: token ids and their loss mask (None if all tokens are trained)."""
Outcome = Literal["whole", "truncated", "split", "dropped", "empty", "short", "repeated"]
LEFT_OUT: tuple[Outcome, ...] = ("dropped", "empty", "short", "repeated")


class TokenizedRecord(NamedTuple):
    """A tokenized record: its pieces, its length in tokens, and whether it was cut or dropped."""

    pieces: Pieces
    length: int
    outcome: Outcome
    location: str
    spelled: str = ""
    """A special token that its text spells out."""


@dataclass(frozen=True)
class PrepareOptions:
    """Options for turning documents into training pieces.

    `max_tokens`: the most tokens of a document that fit into a sample; None: samples are cut from the concatenation of
    all documents, so no document is too long, and documents without trained tokens are read too. `is_given`: the job
    sets `max_tokens` itself. `group_size`: documents per record (2 for a pair). All of them are kept, or none.
    `min_tokens`: the fewest tokens of a piece that is kept. `distinct`: keep only the first of equal records.
    `has_last_label`: the last token of a sample is only a label, so that its inputs are one fewer.
    """

    train_on: TrainOn = TRAIN_ON_ANSWERS
    max_tokens: int | None = None
    is_given: bool = False
    too_long: Literal["error", "drop", "truncate", "split"] = "error"
    max_empty_ratio: float = 0.01
    group_size: int = 1
    min_tokens: int | None = None
    distinct: bool = False
    has_last_label: bool = True

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Return the options, JSON-able. The names of prepared folders are made from these keys."""
        later_options = {} if self.min_tokens is None else {"shortest": self.min_tokens}
        later_options |= {"distinct": True} if self.distinct else {}
        return {
            "train_on": self.train_on,
            "longest": self.max_tokens,
            "too_long": self.too_long,
            "max_empty_ratio": self.max_empty_ratio,
            "together": self.group_size,
            **later_options,
        }

    def apply(self, ids: np.ndarray, trained: np.ndarray, document: Document) -> TokenizedRecord:
        """Cut, drop or keep a document. Raises DataError if it is too long and must not be cut or dropped."""
        outcome: Outcome = "whole"
        parts = [(ids, trained)] if len(ids) else []
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            parts, outcome = self._cut(ids, trained, document)
        if self.max_tokens is not None and outcome != "dropped":
            cut = parts
            parts = [(i, t) for i, t in cut if len(i) >= (self.min_tokens or 0)]
            outcome = "short" if cut and not parts else outcome
            parts = [(i, t) for i, t in parts if t[1:].any()]
            outcome = outcome if parts or outcome == "short" else "empty"
        pieces = [(i.astype(np.uint32), None if t.all() else t) for i, t in parts]
        return TokenizedRecord(pieces, len(ids), outcome, document.location)

    def _cut(
        self, ids: np.ndarray, trained: np.ndarray, document: Document
    ) -> tuple[list[tuple[np.ndarray, np.ndarray]], Outcome]:
        max_tokens = self.max_tokens
        assert max_tokens is not None
        if self.too_long == "drop":
            return [], "dropped"
        is_chat = isinstance(document.content, Chat)
        if self.too_long == "error" or is_chat:
            cut = f", and data.too_long = {self.too_long!r} would cut its last answer off" * (self.too_long != "error")
            alternatives = '"drop"' if is_chat else '"drop", "truncate" or "split"'
            seq_len = max_tokens - self.has_last_label
            limit = f"a sample of training.seq_len = {seq_len} has room for {max_tokens}"
            limit = f"data.max_tokens = {max_tokens}" if self.is_given else limit
            remedy = f"data.max_tokens to {len(ids)} and " * self.is_given
            remedy += f"training.seq_len to {len(ids) - self.has_last_label}"
            raise DataError(
                f"{document.location}: {len(ids)} tokens, but {limit}{cut}; raise {remedy}, or set data.too_long to "
                f"{alternatives}"
            )
        if isinstance(
            document.content, LabelledTexts
        ):  # keep the class label at the end, and the end-of-text token if there is one
            suffix = 2 if document.content.end_tokens else 1
            ids, trained = (np.concatenate([x[: max_tokens - suffix], x[-suffix:]]) for x in (ids, trained))
            return [(ids, trained)], "truncated"
        if self.too_long == "truncate":
            return [(ids[:max_tokens], trained[:max_tokens])], "truncated"
        # each piece repeats the last token of the previous one as its first input, so that every token is a label once
        starts = range(0, len(ids) - 1, max_tokens - 1)
        return [(ids[start : start + max_tokens], trained[start : start + max_tokens]) for start in starts], "split"


def join_documents(documents: Sequence[TokenizedRecord]) -> TokenizedRecord:
    """Join the documents of one record. The first one without pieces, else the first that was cut, sets its outcome."""
    without_pieces = [document for document in documents if not document.pieces]
    changed = [document for document in documents if document.outcome != "whole"]
    pieces = [] if without_pieces else [piece for document in documents for piece in document.pieces]
    first = (without_pieces + changed + [*documents])[0]
    length = max(document.length for document in documents)
    return TokenizedRecord(pieces, length, first.outcome, documents[0].location)


class DistinctRecords:
    """Leaves out records that came before, by digests of 16 bytes of their ids and loss masks.

    Compared is what is trained: after templates and cuts, each piece of a text that is split, and both answers of a
    pair. `earlier`: sources whose records came before those of this one.
    """

    def __init__(self, options: PrepareOptions, earlier: Sequence[TokenShards]) -> None:
        self.group_size = options.group_size
        self._digests: set[bytes] = set()
        for shards in earlier:
            reader = TokenReader(shards)
            borders = np.append(reader.documents, shards.tokens).tolist()
            pieces: Pieces = []
            for start, end in pairwise(borders):
                ids, trained = np.empty(end - start, np.uint32), np.empty(end - start, bool)
                reader.copy(start, ids, trained)
                pieces.append((ids, trained))
                if len(pieces) == self.group_size:
                    self._is_new(pieces)
                    pieces = []

    def first_of(self, record: TokenizedRecord) -> TokenizedRecord:
        """Return the record without the pieces, or pairs of pieces, that came before."""
        size, pieces = self.group_size, record.pieces
        groups = [pieces[first : first + size] for first in range(0, len(pieces), size)]
        new_pieces = [piece for group in groups if self._is_new(group) for piece in group]
        return record._replace(pieces=new_pieces, outcome="repeated" if pieces and not new_pieces else record.outcome)

    def _is_new(self, pieces: Pieces) -> bool:
        """Return True for pieces that were never asked for before."""
        digest = hashlib.blake2b(digest_size=16)
        for ids, trained in pieces:
            flags = np.ones(len(ids), bool) if trained is None else trained
            digest.update(len(ids).to_bytes(8, "little") + ids.tobytes() + flags.tobytes())
        is_new = digest.digest() not in self._digests
        self._digests.add(digest.digest())
        return is_new


class RecordStatistics:
    """Counters of kept, cut and dropped documents of a source."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.first_empty = ""
        self.spelled: list[tuple[str, str]] = []
        """Location and special token of records that spell out one."""
        self._lengths: list[int] = []

    def add(self, record: TokenizedRecord) -> None:
        """Count a record. One without text, such as an empty line, does not count."""
        if not record.length:
            return
        self.outcomes[record.outcome] += 1
        self._lengths.append(record.length)
        if record.spelled:
            self.spelled.append((record.location, record.spelled))
        if record.outcome == "empty" and not self.first_empty:
            self.first_empty = record.location

    def check(self, name: str, options: PrepareOptions) -> None:
        """Raise DataError if too many records have no trained tokens."""
        records, empty = sum(self.outcomes.values()), self.outcomes["empty"]
        if options.max_tokens is not None and empty > options.max_empty_ratio * records:
            raise DataError(
                f"{name}: {empty} of {records} records have no trained token, the first {self.first_empty}; "
                f"allowed: {options.max_empty_ratio:.3g} of all (data.max_empty_ratio); look at them with torchtitan "
                "preview, and correct data.train_on or the records"
            )

    def reason_for_no_tokens(self, options: PrepareOptions) -> str:
        """Explain why a source has no tokens, and what to change."""
        if options.max_tokens is None or not (self.outcomes["dropped"] or self.outcomes["short"]):
            return "no text in it; give documents with text"
        seq_len = options.max_tokens - options.has_last_label
        description = describe_records(self.to_dict(), seq_len, options.is_given, options.has_last_label)
        limits = "data.max_tokens and " * options.is_given + "training.seq_len"
        remedy = f"raise {limits}, or set data.too_long" if self.outcomes["dropped"] else "lower data.min_tokens"
        return f"no record is left of it ({description}); {remedy}"

    def to_dict(self) -> dict[str, Any]:
        """Return the number of records by outcome and percentiles of their lengths, JSON-able."""
        lengths = np.percentile(self._lengths or [0], PERCENTILES, method="higher").astype(int).tolist()
        outcomes = {"whole": self.outcomes["whole"]} | {
            outcome: n for outcome, n in sorted(self.outcomes.items()) if outcome != "whole"
        }
        return {"fates": outcomes, "lengths": {str(p): length for p, length in zip(PERCENTILES, lengths, strict=True)}}


def describe_records(records: dict[str, Any], seq_len: int, is_given: bool, has_last_label: bool = True) -> str:
    """Describe the result of RecordStatistics.to_dict, with advice if records were cut or dropped for their length."""
    outcomes, lengths = records["fates"], records["lengths"]
    description = ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.items())
    description += "; lengths " + ", ".join(f"{length} ({p} %)" for p, length in lengths.items())
    return "; ".join(filter(None, (description, advice(records, seq_len, is_given, has_last_label))))


def advice(records: dict[str, Any], seq_len: int, is_given: bool, has_last_label: bool = True) -> str:
    """Suggest a seq_len that keeps most records uncut; empty if few were cut or dropped.

    `is_given`: the job sets data.max_tokens. `has_last_label`: of PrepareOptions."""
    outcomes, lengths = records["fates"], records["lengths"]
    cut = sum(outcomes.get(outcome, 0) for outcome in ("truncated", "split", "dropped"))
    if cut <= (1 - ADVISED_FRACTION) * sum(outcomes.values()):
        return ""
    length = max(lengths["99"] - has_last_label, seq_len)
    with_limit = f" with data.max_tokens = {lengths['99']}" if is_given else ""
    return f"training.seq_len = {length}{with_limit} would keep 99 % whole"


# Limits of the chunks that are sent to workers.
CHUNK_DOCUMENTS = 256
CHUNKS_AHEAD = 4
CHUNK_CHARACTERS = 2**20
MAX_UNREAD = 100
"""Fields that are not read, after which no further ones are collected."""
Encoded = TokenizedRecord | BadRecord
DEFAULT_OPTIONS = PrepareOptions()
PAIR_TOKENIZATION_VERSION = 2
"""Version of the tokenization of preference pairs. Raise it whenever the same records give other tokens: older shards
are then prepared again, also in a folder that several jobs share."""


def prepared_shards(
    source: Source,
    dataset_path: str | None,
    tokenizer_path: str,
    folder: Path,
    workers: int,
    stop: bool,
    options: PrepareOptions = DEFAULT_OPTIONS,
    tokenizer_kwargs: Mapping[str, Any] = MappingProxyType({}),
    earlier: Sequence[TokenShards] = (),
) -> TokenShards:
    """Return the shards of a source, preparing them in `folder` if they do not exist.

    `tokenizer_kwargs`: further arguments of build_tokenizer. `earlier`: sources whose records are left out of this one
    if `options.distinct`; it may have no document then. If several processes ask at the same time, one prepares
    them and the others wait. The folder name is a hash of all inputs and of the modification times of the files at
    dataset_path. The fingerprint contains the source's and the shards' checksums.
    """
    origin = dict(source.fingerprint)  # opening a source may add to it
    tokenizer = build_tokenizer(tokenizer_path, **tokenizer_kwargs)
    inputs = [
        source.name,
        origin,
        tokenizer.fingerprint,
        tokenizer.chat_template,
        stop,
        _modification_times(dataset_path),
    ]
    inputs += [] if options == DEFAULT_OPTIONS else [options.fingerprint]
    version = chat_tokenization(source, tokenizer)
    inputs += [version] if version else []
    if tokenizer.version > 2 and tokenizer.chat_template is not None:  # conversations may begin after those looked at
        inputs.append({"tokenization": tokenizer.version})
    inputs += [{"pairs": PAIR_TOKENIZATION_VERSION}] if options.group_size > 1 else []
    inputs += [{RECORDS: RECORDS_VERSION}] if has_records(source) else []
    inputs += [{"earlier": [shards.fingerprint["shards"] for shards in earlier]}] if earlier else []
    shards = folder / hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not shards.exists():
                prepare(source, tokenizer_path, shards, workers, stop, options, tokenizer_kwargs, earlier)
    except OSError as error:
        raise JobError(f"{folder}: cannot hold the tokenized data: {error}; give a job.dump_folder that can") from None
    result = TokenShards(shards)
    result.fingerprint = origin | {"shards": result.fingerprint["files"]} | version
    return result


def _modification_times(path: str | None) -> list[tuple[str, int]]:
    """Return each file at a path with its modification time in ns: a changed file may have the same size."""
    if path is None:
        return []
    paths = glob.glob(os.path.join(path, "**"), recursive=True) if os.path.isdir(path) else glob.glob(path)
    return sorted((name, os.stat(name).st_mtime_ns) for name in paths if os.path.isfile(name))


def prepare(
    source: Source,
    tokenizer_path: str,
    output: Path,
    workers: int,
    stop: bool,
    options: PrepareOptions = DEFAULT_OPTIONS,
    tokenizer_kwargs: Mapping[str, Any] = MappingProxyType({}),
    earlier: Sequence[TokenShards] = (),
) -> dict[str, Any]:
    """Write the folder and return its header. Raises DataError for bad data, JobError if it cannot be written."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise JobError(f"{output}: exists and is not an empty folder; give another --output, or remove it first")
    encoder = Encoder(tokenizer_path, tokenizer_kwargs, options)
    unfinished = output.parent / f".{output.name}.{secrets.token_hex(4)}"
    try:
        unfinished.mkdir(parents=True)
        header = _write(source, encoder, unfinished, workers, stop, earlier)
        unfinished.rename(output)
    except OSError as error:
        raise JobError(f"{output}: not made: {error}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return header


def _write(
    source: Source, encoder: "Encoder", folder: Path, workers: int, stop: bool, earlier: Sequence[TokenShards]
) -> dict[str, Any]:
    tokenizer, statistics = encoder.tokenizer, RecordStatistics()
    distinct = DistinctRecords(encoder.options, earlier) if encoder.options.distinct else None
    writer = ShardWriter(folder, tokenizer.vocab_size)
    readable = _DocumentChunks(source.documents(), stop)
    total = len(source) if isinstance(source, IndexedSource) else None
    with progress_bar("tokenizing", total, unit=" documents") as progress:
        for documents in _tokenized(readable, encoder, workers):
            for result in documents:
                if isinstance(result, BadRecord):
                    readable.skip(result)
                else:
                    record = result if distinct is None else distinct.first_of(result)
                    statistics.add(record)
                    for ids, trained in record.pieces:
                        writer.write(ids, trained)
            progress.update(len(documents))
            progress.set_postfix(tokens=f"{writer.tokens:,}", refresh=False)
    statistics.check(source.name, encoder.options)
    if writer.tokens == 0 and not statistics.outcomes["repeated"]:
        raise DataError(f"{source.name}: {statistics.reason_for_no_tokens(encoder.options)}")
    facts: dict[str, Any] = {"tokenizer": tokenizer.fingerprint, "tokenizer_path": encoder.tokenizer_path}
    if encoder.options.max_tokens is not None:
        facts["records"] = statistics.to_dict()
    if statistics.spelled:
        records = f"{sum(statistics.outcomes.values()):,}"
        facts["note"] = describe_spelled(len(statistics.spelled), records, *statistics.spelled[0])
    facts["unread"] = list(dict.fromkeys([*readable.unread, *unread_fields(source, tokenizer)]))
    return writer.finish(**facts, source={"name": source.name, **source.fingerprint}, skipped=readable.skipped)


class _DocumentChunks:
    """Chunks of documents for the workers. Unreadable records are counted, or raised with `stop`.

    `unread`: fields of the records that no sample is made of."""

    def __init__(self, items: Iterable[DocumentOrError], stop: bool) -> None:
        self.items, self.stop, self.skipped = items, stop, 0
        self.unread: dict[str, None] = {}

    def __iter__(self) -> Iterator[list[Document]]:
        chunk: list[Document] = []
        characters = 0
        for item in self.items:
            if isinstance(item, Document):
                chunk.append(item)
                if len(self.unread) < MAX_UNREAD:
                    self.unread |= dict.fromkeys(item.unread)
                characters += sum(len(span.content) for span in item.spans)
            else:
                self.skip(item)
            if len(chunk) >= CHUNK_DOCUMENTS or characters >= CHUNK_CHARACTERS:
                yield chunk
                chunk, characters = [], 0
        yield chunk

    def skip(self, error: DataError) -> None:
        if self.stop or isinstance(error, UnreachableData):
            raise error
        self.skipped += 1
        print(f"left out: {error}", file=sys.stderr)


def _tokenized(chunks: Iterable[list[Document]], encoder: "Encoder", workers: int) -> Iterator[list[Encoded]]:
    if workers == 1:
        yield from (encoder.all(chunk) for chunk in chunks)
        return
    if obstacle := shared_memory_obstacle():
        raise JobError(
            f"{workers} workers: {obstacle}; {SHARED_MEMORY_REMEDY}, or give one (--workers 1, data.num_proc)"
        )
    # not a multiprocessing.Pool, which waits forever for a killed worker
    with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=encoder.worker_arguments) as pool:
        pending: deque[Future[list[Encoded]]] = deque()
        try:
            for chunk in chunks:
                pending.append(pool.submit(_encode_chunk, chunk))
                if len(pending) > CHUNKS_AHEAD * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise DataError("a worker was killed (out of memory?); nothing was written; give fewer --workers") from None


class Encoder:
    """An encoder of documents to ids in this process."""

    def __init__(self, tokenizer_path: str, tokenizer_kwargs: Mapping[str, Any], options: PrepareOptions) -> None:
        self.tokenizer_path, self.options = tokenizer_path, options
        self.worker_arguments = tokenizer_path, dict(tokenizer_kwargs), options
        self.tokenizer = build_tokenizer(tokenizer_path, **tokenizer_kwargs)

    def all(self, chunk: list[Document]) -> list[Encoded]:
        return [self._one(document) for document in chunk]

    def _one(self, document: Document) -> Encoded:
        parts = [document]
        if self.options.group_size > 1:
            if not isinstance(document.content, Pair):
                raise DataError(
                    f"{document.location}: no pair of answers; give records with chosen and rejected, and with "
                    "prompt or messages, or choose another task.kind"
                )
            parts = list(document.content)
        try:
            encoded = [encode(self.tokenizer, part, self.options.train_on) for part in parts]
        except BadRecord as error:
            return error
        encoded_parts = [self.options.apply(*tokens, part) for tokens, part in zip(encoded, parts, strict=True)]
        record = join_documents(encoded_parts) if len(encoded_parts) > 1 else encoded_parts[0]
        return record._replace(spelled=spelled_token(self.tokenizer, document))


_worker: dict[str, Encoder] = {}


def _start_worker(tokenizer_path: str, tokenizer_kwargs: Mapping[str, Any], options: PrepareOptions) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle
    die_with_parent(os.getppid())  # its end would not be noticed: each worker has a copy of the others' pipes
    _worker["encoder"] = Encoder(tokenizer_path, tokenizer_kwargs, options)


def _encode_chunk(chunk: list[Document]) -> list[Encoded]:
    return _worker["encoder"].all(chunk)
