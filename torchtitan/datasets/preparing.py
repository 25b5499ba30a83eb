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
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.core.progress_bar import progress_bar
from torchtitan.datasets.loss_mask import Made, Recipe, Tally, joined
from torchtitan.datasets.records import encode, tokenization_of
from torchtitan.datasets.sources import BadRecord, DataError, Document, Indexed, Item, Pair, Source, Unreachable
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.datasets.tokens import ShardWriter, TokenShards

# Limits of the chunks that are sent to workers.
CHUNK_DOCUMENTS = 256
CHUNKS_AHEAD = 4
CHUNK_CHARACTERS = 2**20
Encoded = Made | BadRecord
WHOLE = Recipe()
PAIRS_READ = 2
"""Version of the tokenization of preference pairs. Raise it whenever the same records give other tokens: older shards
are then prepared again, also in a folder that several jobs share."""


def prepared(
    source: Source,
    dataset_path: str | None,
    tokenizer_path: str,
    folder: Path,
    workers: int,
    stop: bool,
    recipe: Recipe = WHOLE,
    chat_template: str | None = None,
) -> TokenShards:
    """Return the shards of a source, preparing them in `folder` if they do not exist.

    If several processes ask at the same time, one prepares them and the others wait. The folder name is a hash of all
    inputs and of the modification times of the files at dataset_path. The fingerprint contains the source's and the
    shards' checksums.
    """
    origin = dict(source.fingerprint)  # opening a source may add to it
    tokenizer = build_tokenizer(tokenizer_path, chat_template)
    about = [source.name, origin, tokenizer.fingerprint, tokenizer.chat_template, stop, _changed(dataset_path)]
    about += [] if recipe == WHOLE else [asdict(recipe)]
    version = tokenization_of(source, tokenizer)
    about += [version] if version else []
    about += [{"pairs": PAIRS_READ}] if recipe.together > 1 else []
    shards = folder / hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not shards.exists():
                prepare(source, tokenizer_path, shards, workers, stop, recipe, chat_template)
    except OSError as error:
        raise JobError(f"{folder}: cannot hold the tokenized data: {error}; give a job.dump_folder that can") from None
    result = TokenShards(shards)
    result.fingerprint = origin | {"shards": result.fingerprint["files"]} | version
    return result


def _changed(path: str | None) -> list[tuple[str, int]]:
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
    recipe: Recipe = WHOLE,
    chat_template: str | None = None,
) -> dict[str, Any]:
    """Write the folder and return its header. Raises DataError for bad data, JobError if it cannot be written."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise JobError(f"{output}: exists and is not an empty folder; give another --output, or remove it first")
    encoder = Encoder(tokenizer_path, chat_template, recipe)
    unfinished = output.parent / f".{output.name}.{secrets.token_hex(4)}"
    try:
        unfinished.mkdir(parents=True)
        header = _write(source, encoder, unfinished, workers, stop)
        unfinished.rename(output)
    except OSError as error:
        raise JobError(f"{output}: not made: {error}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return header


def _write(source: Source, encoder: "Encoder", folder: Path, workers: int, stop: bool) -> dict[str, Any]:
    tokenizer, tally = encoder.tokenizer, Tally()
    writer = ShardWriter(folder, tokenizer.vocab_size)
    readable = _Readable(source.documents(), stop)
    total = len(source) if isinstance(source, Indexed) else None
    with progress_bar("tokenizing", total, unit=" documents") as progress:
        for documents in _tokenized(readable, encoder, workers):
            for made in documents:
                if isinstance(made, BadRecord):
                    readable.leave_out(made)
                else:
                    tally.add(made)
                    for ids, trained in made.pieces:
                        writer.write(ids, trained)
            progress.update(len(documents))
            progress.set_postfix(tokens=f"{writer.tokens:,}", refresh=False)
    tally.check(source.name, encoder.recipe)
    if writer.tokens == 0:
        raise DataError(f"{source.name}: {tally.nothing_left(encoder.recipe)}")
    about: dict[str, Any] = {"tokenizer": tokenizer.fingerprint, "tokenizer_path": encoder.tokenizer_path}
    if encoder.recipe.longest is not None:
        about["records"] = tally.to_dict()
    return writer.finish(**about, source={"name": source.name, **source.fingerprint}, skipped=readable.skipped)


class _Readable:
    """Chunks of documents for the workers. Unreadable records are counted, or raised with `stop`."""

    def __init__(self, items: Iterable[Item], stop: bool) -> None:
        self.items, self.stop, self.skipped = items, stop, 0

    def __iter__(self) -> Iterator[list[Document]]:
        chunk: list[Document] = []
        characters = 0
        for item in self.items:
            if isinstance(item, Document):
                chunk.append(item)
                characters += sum(len(span.content) for span in item.spans)
            else:
                self.leave_out(item)
            if len(chunk) >= CHUNK_DOCUMENTS or characters >= CHUNK_CHARACTERS:
                yield chunk
                chunk, characters = [], 0
        yield chunk

    def leave_out(self, error: DataError) -> None:
        if self.stop or isinstance(error, Unreachable):
            raise error
        self.skipped += 1
        print(f"left out: {error}", file=sys.stderr)


def _tokenized(chunks: Iterable[list[Document]], encoder: "Encoder", workers: int) -> Iterator[list[Encoded]]:
    if workers == 1:
        yield from (encoder.all(chunk) for chunk in chunks)
        return
    # not a multiprocessing.Pool, which waits forever for a killed worker
    with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=encoder.made_of) as pool:
        pending: deque[Future[list[Encoded]]] = deque()
        try:
            for chunk in chunks:
                pending.append(pool.submit(_work, chunk))
                if len(pending) > CHUNKS_AHEAD * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise DataError("a worker was killed (out of memory?); nothing was written; give fewer --workers") from None


class Encoder:
    """An encoder of documents to ids in this process."""

    def __init__(self, tokenizer_path: str, chat_template: str | None, recipe: Recipe) -> None:
        self.tokenizer_path, self.recipe = tokenizer_path, recipe
        self.made_of = tokenizer_path, chat_template, recipe
        self.tokenizer = build_tokenizer(tokenizer_path, chat_template)

    def all(self, chunk: list[Document]) -> list[Encoded]:
        return [self._one(document) for document in chunk]

    def _one(self, document: Document) -> Encoded:
        parts = [document]
        if self.recipe.together > 1:
            if not isinstance(document.content, Pair):
                raise DataError(
                    f"{document.place}: no pair of answers; give records with chosen and rejected, and with prompt or "
                    "messages, or choose another task.kind"
                )
            parts = list(document.content)
        try:
            encoded = [encode(self.tokenizer, part, self.recipe.train_on) for part in parts]
        except BadRecord as error:
            return error
        encoded_parts = [self.recipe.apply(*tokens, part) for tokens, part in zip(encoded, parts, strict=True)]
        return joined(encoded_parts) if len(encoded_parts) > 1 else encoded_parts[0]


_worker: dict[str, Encoder] = {}


def _start_worker(tokenizer_path: str, chat_template: str | None, recipe: Recipe) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle
    _worker["encoder"] = Encoder(tokenizer_path, chat_template, recipe)


def _work(chunk: list[Document]) -> list[Encoded]:
    return _worker["encoder"].all(chunk)
