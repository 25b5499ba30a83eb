"""`torchtitan prepare`: tokenize a dataset once, into memory-mapped shards that training reads at full speed.

    torchtitan prepare --dataset text --dataset_path stories/ --tokenizer_path tokenizer.model --output shards/

Documents keep the order in which they are stored; training shuffles. Everything is written beside the output and
renamed at the end, so a folder of that name is complete. `--verify shards/` reads a folder again and compares the
checksums.
"""

import argparse
import os
import secrets
import shutil
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from torchtitan.datasets import DATASETS
from torchtitan.datasets.packing import encode
from torchtitan.datasets.sources import DataError, Document, Indexed, Item, Source, Unreachable
from torchtitan.datasets.tokenizer import Tokenizer, build_tokenizer
from torchtitan.datasets.tokens import ShardWriter, TokenShards

# What goes to a worker at a time.
CHUNK_DOCUMENTS = 256
CHUNKS_AHEAD = 4
CHUNK_CHARACTERS = 2**20


def main(argv: list[str]) -> int:
    options = parse(argv)
    if options.verify:
        TokenShards(Path(options.verify)).verify()
        print(f"{options.verify}: every checksum is right")
        return 0
    header = prepare(
        DATASETS[options.dataset](options.dataset_path, options.text_field),
        options.tokenizer_path,
        Path(options.output),
        workers=options.workers,
        stop=options.on_bad_data == "stop",
    )
    skipped = f", {header['skipped']} records left out" if header["skipped"] else ""
    print(
        f"{options.output}: {header['documents']:,} documents, {header['tokens']:,} tokens ({header['dtype']}) in "
        f'{len(header["shards"])} shard(s){skipped}\ntrain on them with training.dataset = "tokens" and '
        f'training.dataset_path = "{options.output}"'
    )
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(prog="torchtitan prepare", description="Tokenize a dataset once.")
    parser.add_argument("--dataset", default="text", choices=[name for name in DATASETS if name != "tokens"])
    parser.add_argument("--dataset_path", help="file, folder or glob; a name for dataset huggingface")
    parser.add_argument("--text_field", default="text", help="the field that holds the text (default: text)")
    parser.add_argument("--tokenizer_path", help="a tokenizer's file or folder, or the word bytes")
    parser.add_argument("--output", help="the folder to make")
    parser.add_argument("--workers", type=int, default=cpus, help=f"processes that tokenize (default: {cpus})")
    parser.add_argument("--on_bad_data", default="stop", choices=["stop", "skip"], help="unreadable records")
    parser.add_argument("--verify", metavar="FOLDER", help="check a folder made before, and do nothing else")
    options = parser.parse_args(argv)
    if not options.verify and not (options.tokenizer_path and options.output):
        parser.error("--tokenizer_path and --output are needed")
    if options.workers < 1:
        parser.error(f"--workers {options.workers}: must be at least 1")
    return options


def prepare(source: Source, tokenizer_path: str, output: Path, workers: int, stop: bool) -> dict[str, Any]:
    """Make the folder; returns its header. Raises DataError for bad data, ValueError if it cannot be written."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output}: exists and is not an empty folder; give another --output, or remove it first")
    tokenizer = build_tokenizer(tokenizer_path)
    unfinished = output.parent / f".{output.name}.{secrets.token_hex(4)}"
    try:
        unfinished.mkdir(parents=True)
        header = _write(source, tokenizer, tokenizer_path, unfinished, workers, stop)
        unfinished.rename(output)
    except OSError as error:
        raise ValueError(f"{output}: not made: {error}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return header


def _write(
    source: Source, tokenizer: Tokenizer, tokenizer_path: str, folder: Path, workers: int, stop: bool
) -> dict[str, Any]:
    writer = ShardWriter(folder, tokenizer.vocab_size)
    readable = _Readable(source.documents(), stop)
    total = len(source) if isinstance(source, Indexed) else None
    with tqdm(total=total, unit=" documents", file=sys.stderr, dynamic_ncols=True) as progress:
        for documents in _tokenized(readable, tokenizer, tokenizer_path, workers):
            for ids in documents:
                writer.write(ids)
            progress.update(len(documents))
            progress.set_postfix(tokens=f"{writer.tokens:,}", refresh=False)
    if writer.tokens == 0:
        raise DataError(f"{source.name}: no text in it; give documents with text")
    about = {"tokenizer": tokenizer.fingerprint, "tokenizer_path": tokenizer_path}
    return writer.finish(**about, source={"name": source.name, **source.fingerprint}, skipped=readable.skipped)


class _Readable:
    """Texts in chunks for the workers. Records that cannot be read are counted, or raised with `stop`."""

    def __init__(self, items: Iterable[Item], stop: bool) -> None:
        self.items, self.stop, self.skipped = items, stop, 0

    def __iter__(self) -> Iterator[list[Document]]:
        chunk: list[Document] = []
        characters = 0
        for item in self.items:
            if isinstance(item, Document):
                chunk.append(item)
                characters += len(item.text)
            elif self.stop or isinstance(item, Unreachable):
                raise item
            else:
                self.skipped += 1
                print(f"left out: {item}", file=sys.stderr)
            if len(chunk) >= CHUNK_DOCUMENTS or characters >= CHUNK_CHARACTERS:
                yield chunk
                chunk, characters = [], 0
        yield chunk


def _tokenized(
    chunks: Iterable[list[Document]], tokenizer: Tokenizer, tokenizer_path: str, workers: int
) -> Iterator[list[np.ndarray]]:
    if workers == 1:
        yield from (_encode_all(tokenizer, chunk) for chunk in chunks)
        return
    # not a multiprocessing.Pool: that one waits for ever for a worker that was killed
    with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(tokenizer_path,)) as pool:
        pending: deque[Future[list[np.ndarray]]] = deque()
        try:
            for chunk in chunks:
                pending.append(pool.submit(_work, chunk))
                if len(pending) > CHUNKS_AHEAD * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise DataError("a worker was killed (out of memory?); nothing was written; give fewer --workers") from None


def _encode_all(tokenizer: Tokenizer, chunk: list[Document]) -> list[np.ndarray]:
    return [np.array(encode(tokenizer, document), dtype=np.uint32) for document in chunk]


_worker: dict[str, Tokenizer] = {}


def _start_worker(tokenizer_path: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle
    _worker["tokenizer"] = build_tokenizer(tokenizer_path)


def _work(chunk: list[Document]) -> list[np.ndarray]:
    return _encode_all(_worker["tokenizer"], chunk)
