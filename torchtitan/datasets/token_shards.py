"""Prepared shards: documents that are tokenized once and then memory-mapped.

A folder contains `shard-00000.bin` and so on (ids as uint16 or uint32, little-endian, all documents in sequence),
`documents.bin` (the position of each document's first token over all shards, int64), `trained.bin` if some tokens are
not trained (a byte per token: 1 trained, 0 not), and `header.json`, which is written last. A sample is a block of
seq_len + 1 ids at a multiple of seq_len. The blocks of an epoch are shuffled by a computed permutation (shuffle.py), so
starting at sample 1e9 costs as much as starting at sample 0.

Every start of a run compares the shards with the sums in their header. Otherwise a file that was damaged after it was
prepared would be trained on unnoticed. Up to FOREGROUND_BYTES are compared before the first batch. More are compared in
a background thread during training, and the run ends when a difference is found. A resumed run compares them again,
because the earlier run may have ended before the comparison.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from torchtitan.core.errors import format_bytes
from torchtitan.core.files import FileError, load_json, open_file, read_file
from torchtitan.core.lazy_numpy import np
from torchtitan.core.machine_errors import MachineError, is_of_the_machine
from torchtitan.core.progress_bar import progress_bar
from torchtitan.datasets.shuffle import key, permute
from torchtitan.datasets.sources import DataError, Source

VERSION, VERSION_WITH_FLAGS = 1, 2
"""Versions of the folder without and with `trained.bin`; programs that only know the first must refuse the second."""
HEADER = "header.json"
DOCUMENTS = "documents.bin"
TRAINED = "trained.bin"
DTYPES = {"uint16": "<u2", "uint32": "<u4"}
"""Numpy's names of the types of ids: little-endian, the last character is the size in bytes."""
SHARD_TOKENS = 2**28
CHUNK_BYTES = 2**24
"""Bytes that are read or written at a time."""
LARGEST_HEADER = 64 * 2**20
REMEDY = "make the folder again with torchtitan prepare"


def tokens(path: str | None, text_field: str) -> Source:
    if path is None:
        raise DataError(
            'dataset "tokens" needs training.dataset_path: a folder made by `torchtitan prepare --output FOLDER`'
        )
    return TokenShards(Path(path))


class TokenShards(Source):
    """A folder of prepared shards. Opening it checks the header and the sizes; `verify` reads all contents."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.header = _read_header(folder)
        self.dtype = np.dtype(DTYPES[self.header["dtype"]])
        self.tokens: int = self.header["tokens"]
        counts = [shard["tokens"] for shard in self.header["shards"]]
        self.starts = [0, *accumulate(counts)]
        is_repeated = not self.tokens and bool(self.header.get("records"))  # other sources have all of its records
        if self.starts[-1] != self.tokens or (self.tokens == 0 and not is_repeated):
            raise DataError(f"{folder}: {sum(counts)} tokens in shards, {self.tokens} in the header; {REMEDY}")
        self.flags: dict[str, Any] | None = self.header.get("trained")
        self.files = [*self.header["shards"], self.header["index"], *([self.flags] if self.flags else [])]
        for shard in self.files:
            file = folder / shard["name"]
            if not file.is_file():
                raise DataError(f"{file}: the file is missing; {REMEDY}")
            if file.stat().st_size != shard["bytes"]:
                raise DataError(f"{file}: {file.stat().st_size} bytes, {shard['bytes']} by the header; {REMEDY}")
        hashes = {file["name"]: file["sha256"] for file in self.files if file["name"] != DOCUMENTS}
        super().__init__(str(folder), {"dataset_path": os.path.normpath(folder), "files": hashes})

    def check_tokenizer(self, fingerprint: str, vocab_size: int) -> None:
        """Raise DataError unless the shards were prepared with this tokenizer."""
        if self.header["tokenizer"] != fingerprint:
            raise DataError(
                f"{self.folder}: prepared with the tokenizer {self.header['tokenizer_path']} (fingerprint "
                f"{self.header['tokenizer'][:8]}), the job's is {fingerprint[:8]}; set model.tokenizer_path to the "
                f"first, or {REMEDY}"
            )
        if self.header["vocab_size"] > vocab_size:
            raise DataError(
                f"{self.folder}: {self.header['vocab_size']} ids, but the tokenizer has {vocab_size}; {REMEDY}"
            )

    def verify(self, shown: bool = True) -> None:
        """Read everything and compare the checksums. Raises DataError naming the first file that differs."""
        sizes = {part["name"]: (self.folder / part["name"]).stat().st_size for part in self.files}
        with progress_bar(f"checking {self.folder.name}", sum(sizes.values()), shown=shown) as progress:
            for part in self.files:
                sha256 = hashlib.sha256()
                with open_file(self.folder / part["name"]) as file:
                    while content := file.read(CHUNK_BYTES):
                        sha256.update(content)
                        progress.update(len(content))
                if sha256.hexdigest() != part["sha256"]:
                    raise DataError(
                        f"{self.folder / part['name']}: its contents differ from the checksum in the header; {REMEDY}"
                    )

    def blocks(self, seq_len: int) -> int:
        """Return the number of samples in one epoch. Raises DataError if there are none."""
        blocks = (self.tokens - 1) // seq_len
        if blocks < 1:
            raise DataError(
                f"{self.folder}: {self.tokens} tokens are too few for one sample; at least {seq_len + 1} are needed "
                f"for training.seq_len = {seq_len}; prepare more text or shorten seq_len"
            )
        return blocks


class TokenReader:
    """A reader of memory-mapped shards, opened in the process that reads."""

    def __init__(self, shards: TokenShards) -> None:
        self.shards = shards
        self._maps = [_map(shards.folder / s["name"], shards.dtype) for s in shards.header["shards"]]
        self.documents = _map(shards.folder / DOCUMENTS, np.dtype("<i8"))
        """The first token of each document."""
        self._trained = None if shards.flags is None else _map(shards.folder / TRAINED, np.dtype("u1"))
        self._names = [*(s["name"] for s in shards.header["shards"]), DOCUMENTS, *([TRAINED] if shards.flags else [])]
        self._open = [open_file(shards.folder / name) for name in self._names]
        self._sizes = [os.fstat(file.fileno()).st_size for file in self._open]

    def copy(self, start: int, ids: np.ndarray, trained: np.ndarray | None = None) -> None:
        """Fill `ids` with the tokens from `start` on, and `trained`, of the same length, with their loss mask."""
        shard = bisect_right(self.shards.starts, start) - 1
        done, offset = 0, start - self.shards.starts[shard]
        while done < len(ids):
            piece = self._maps[shard][offset : offset + len(ids) - done]
            ids[done : done + len(piece)] = piece
            done, shard, offset = done + len(piece), shard + 1, 0
        if trained is not None:
            trained[:] = True if self._trained is None else self._trained[start : start + len(trained)]

    def check_not_shrunk(self) -> None:
        """Raise DataError if a file shrank: reading a mapping beyond its file's end would kill the process."""
        for name, file, before in zip(self._names, self._open, self._sizes, strict=True):
            if (size := os.fstat(file.fileno()).st_size) < before:
                path = self.shards.folder / name
                raise DataError(
                    f"{path}: the file shrank to {size} bytes from the {before} at the start; do not change the "
                    f"data while a job runs; {REMEDY}"
                )

    def damaged(self) -> DataError:
        return DataError(f"{self.shards.folder / DOCUMENTS}: damaged, the starts do not ascend; {REMEDY}")


class BlockReader(TokenReader):
    """Blocks of seq_len + 1 tokens at multiples of seq_len."""

    def __init__(self, shards: TokenShards, seq_len: int, seed: int, shuffle: bool) -> None:
        self.seq_len, self.seed, self.shuffle = seq_len, seed, shuffle
        self.blocks = shards.blocks(seq_len)
        super().__init__(shards)
        # With a single shard (up to 2**28 tokens) one indexing operation reads all rows.
        windows = np.lib.stride_tricks.sliding_window_view
        self._windows = windows(self._maps[0], seq_len + 1) if len(self._maps) == 1 else None
        self._flags = None if self._trained is None else windows(self._trained, seq_len + 1)

    def order(self, samples: np.ndarray) -> np.ndarray:
        """Map global sample indices to the first tokens of their blocks."""
        epochs, blocks = np.divmod(samples, self.blocks)
        if self.shuffle:
            blocks = permute(blocks, self.blocks, key(self.seed, epochs))
        return blocks * self.seq_len

    def read(self, starts: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """Return the ids [n, seq_len + 1] of the blocks at `starts`, and (row, column) of each document start."""
        self.check_not_shrunk()
        rows = self._rows(starts)
        order = starts.argsort()
        ascending = starts[order]  # neighbouring searches read the same pages of a large index
        first = self.documents.searchsorted(ascending)
        last = self.documents.searchsorted(ascending + self.seq_len, side="right")
        counts = last - first
        index = np.arange(counts.sum()) + np.repeat(first - np.cumsum(counts) + counts, counts)
        columns = self.documents[index] - np.repeat(ascending, counts)
        if len(columns) and not 0 <= columns.min() <= columns.max() <= self.seq_len:
            raise self.damaged()
        return rows, (np.repeat(order, counts), columns)

    def trained(self, starts: np.ndarray) -> np.ndarray | None:
        """Return the loss mask [n, seq_len + 1] of these blocks; None if all tokens of the folder are trained."""
        return None if self._flags is None else self._flags[starts] != 0

    def _rows(self, starts: np.ndarray) -> np.ndarray:
        if self._windows is not None:
            return self._windows[starts]
        rows = np.empty((len(starts), self.seq_len + 1), dtype=self.shards.dtype)
        for row, start in zip(rows, starts.tolist(), strict=True):
            self.copy(start, row)
        return rows


class ShardWriter:
    """A writer of a folder of shards, which is only valid after `finish` has written the header."""

    def __init__(self, folder: Path, vocab_size: int, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder, self.vocab_size, self.shard_tokens = folder, vocab_size, shard_tokens
        self.dtype_name = "uint16" if vocab_size <= 2**16 else "uint32"
        self.tokens = self.documents = self.not_trained = 0
        self.shards: list[dict[str, Any]] = []
        self._shard: _File | None = None
        self._index = _File(folder / DOCUMENTS)
        self._flags: _File | None = None  # created at the first untrained token

    def write(self, document: Iterable[int], trained: np.ndarray | None = None) -> None:
        """Write a document's ids and loss mask (None: all trained)."""
        ids = np.asarray(document, dtype=np.int64)
        if not len(ids):
            return
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise DataError(
                f"a document has ids from {ids.min()} to {ids.max()}, but the tokenizer's vocabulary ends at "
                f"{self.vocab_size - 1}; give ids of this tokenizer"
            )
        self._write_flags(np.ones(len(ids), dtype=bool) if trained is None else trained)
        self._index.write(np.array([self.tokens], dtype="<i8"))
        self.tokens, self.documents = self.tokens + len(ids), self.documents + 1
        ids = ids.astype(DTYPES[self.dtype_name])
        while len(ids):
            if self._shard is None:
                self._shard = _File(self.folder / f"shard-{len(self.shards):05d}.bin")
            room = self.shard_tokens - self._shard.items
            self._shard.write(ids[:room])
            ids = ids[room:]
            if self._shard.items == self.shard_tokens:
                self._end_shard()

    def finish(self, **about: Any) -> dict[str, Any]:
        """Close the files, write the header and return it."""
        if self._shard is not None:
            self._end_shard()
        counts = {"tokens": self.tokens, "documents": self.documents, "vocab_size": self.vocab_size}
        files = {"shards": self.shards, "index": self._index.close()}
        if self._flags is not None:
            files["trained"] = self._flags.close()
            counts["trained_tokens"] = self.tokens - self.not_trained
        version = VERSION if self._flags is None else VERSION_WITH_FLAGS
        header = {"version": version, "dtype": self.dtype_name, **counts, **about, **files}
        with (self.folder / HEADER).open("w") as file:
            json.dump(header, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        return header

    def _write_flags(self, trained: np.ndarray) -> None:
        self.not_trained += len(trained) - int(trained.sum())
        if self._flags is None and self.not_trained:
            self._flags = _File(self.folder / TRAINED)
            for start in range(0, self.tokens, CHUNK_BYTES):  # the earlier tokens, all trained
                self._flags.write(np.ones(min(CHUNK_BYTES, self.tokens - start), dtype=np.uint8))
        if self._flags is not None:
            self._flags.write(trained.astype(np.uint8))

    def _end_shard(self) -> None:
        assert self._shard is not None
        items = self._shard.items
        self.shards.append({**self._shard.close(), "tokens": items})
        self._shard = None


class _File:
    """A new file, hashed while it is written."""

    def __init__(self, path: Path) -> None:
        self.path, self.items, self._sha256 = path, 0, hashlib.sha256()
        self._file = path.open("xb", buffering=2**20)

    def write(self, items: np.ndarray) -> None:
        content = items.tobytes()
        self._file.write(content)
        self._sha256.update(content)
        self.items += len(items)

    def close(self) -> dict[str, Any]:
        self._file.flush()
        os.fsync(self._file.fileno())
        size = self._file.tell()
        self._file.close()
        return {"name": self.path.name, "bytes": size, "sha256": self._sha256.hexdigest()}


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    # A plain array over the mapping: slicing a np.memmap object is slower.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r")) if path.stat().st_size else np.empty(0, dtype)


def _read_header(folder: Path) -> dict[str, Any]:
    """Read the header. Raises DataError unless all fields that are used later exist with the right types."""
    path = folder / HEADER
    if not path.exists():
        problem = "there is no header.json in it" if folder.is_dir() else "no such folder"
        raise DataError(f"{folder}: {problem}; give a folder made by torchtitan prepare as training.dataset_path")
    try:
        header = load_json(read_file(path, LARGEST_HEADER))
    except FileError as error:
        raise DataError(f"{path} {error.reason}; {REMEDY}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: damaged: {error}; {REMEDY}") from None
    if not isinstance(header, dict) or header.get("version") not in (VERSION, VERSION_WITH_FLAGS):
        version = header.get("version") if isinstance(header, dict) else None
        versions = f"versions {VERSION} and {VERSION_WITH_FLAGS}"
        raise DataError(f"{path}: version {version}, but this program reads {versions}; {REMEDY}")

    def is_file(entry: Any, item_bytes: int, items: str) -> bool:
        return bool(
            isinstance(entry, dict)
            and re.fullmatch(r"[\w-]+\.bin", str(entry.get("name")))  # a plain name cannot lead out of the folder
            and isinstance(entry.get("sha256"), str)
            and isinstance(entry.get(items), int)
            and entry.get("bytes") == entry[items] * item_bytes
        )

    index, shards, flags = header.get("index"), header.get("shards"), header.get("trained")
    good = (
        isinstance(header.get("dtype"), str)
        and header["dtype"] in DTYPES
        and all(type(header.get(k)) is int for k in ("tokens", "documents", "vocab_size"))
        and header["documents"] >= 0
        and all(isinstance(header.get(k), str) for k in ("tokenizer", "tokenizer_path"))
        and isinstance(shards, list)
        and all(is_file(shard, int(DTYPES[header["dtype"]][-1]), "tokens") for shard in shards)
        and isinstance(index, dict)
        and is_file({**index, "documents": header["documents"]}, 8, "documents")
        and index["name"] == DOCUMENTS
        and (flags is not None) == (header["version"] == VERSION_WITH_FLAGS)
        and (flags is None or isinstance(flags, dict) and is_file({**flags, "tokens": header["tokens"]}, 1, "tokens"))
        and (flags is None or flags["name"] == TRAINED)
    )
    if not good:
        raise DataError(f"{path}: fields are missing or do not fit each other; {REMEDY}")
    return header


class JoinedBlockReader:
    """A reader like BlockReader for several folders: blocks are numbered consecutively and shuffled together."""

    def __init__(self, sources: Sequence[TokenShards], seq_len: int, seed: int, shuffle: bool) -> None:
        self.seq_len, self.seed, self.shuffle = seq_len, seed, shuffle
        self.readers = [BlockReader(source, seq_len, seed, shuffle=False) for source in sources]
        self.firsts = np.array([0, *accumulate(reader.blocks for reader in self.readers)])
        self.blocks = int(self.firsts[-1])

    def order(self, samples: np.ndarray) -> np.ndarray:
        """Map global sample indices to block numbers."""
        epochs, blocks = np.divmod(samples, self.blocks)
        return permute(blocks, self.blocks, key(self.seed, epochs)) if self.shuffle else blocks

    def read(self, blocks: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """Read blocks like BlockReader.read."""
        rows = np.empty((len(blocks), self.seq_len + 1), dtype=np.int64)
        begin_rows, begin_columns = [], []
        for reader, indices, starts in self._by_reader(blocks):
            rows[indices], (within, columns) = reader.read(starts)
            begin_rows.append(indices[within])
            begin_columns.append(columns)
        return rows, (np.concatenate(begin_rows), np.concatenate(begin_columns))

    def trained(self, blocks: np.ndarray) -> np.ndarray:
        """Return loss masks like BlockReader.trained."""
        flags = np.ones((len(blocks), self.seq_len + 1), dtype=bool)
        for reader, indices, starts in self._by_reader(blocks):
            mask = reader.trained(starts)
            if mask is not None:
                flags[indices] = mask
        return flags

    def _by_reader(self, blocks: np.ndarray) -> list[tuple[BlockReader, np.ndarray, np.ndarray]]:
        """Return each reader with its rows and the start tokens of their blocks."""
        numbers = self.firsts.searchsorted(blocks, side="right") - 1
        rows = [np.flatnonzero(numbers == number) for number in range(len(self.readers))]
        return [
            (reader, indices, (blocks[indices] - first) * self.seq_len)
            for reader, first, indices in zip(self.readers, self.firsts[:-1], rows, strict=True)
            if len(indices)
        ]


logger = logging.getLogger(__name__)

FOREGROUND_BYTES = 2**30
"""Largest data in bytes that is verified before training. Reading it takes a second or two."""


class Verification:
    """A comparison in a background thread."""

    def __init__(self, shards: Sequence[TokenShards]) -> None:
        self.shards = list(shards)
        self.size = sum(part["bytes"] for folder in self.shards for part in folder.files)
        self.error: DataError | MachineError | None = None
        self._thread = threading.Thread(target=self._compare, name="verification", daemon=True)
        self._thread.start()

    def _compare(self) -> None:
        in_front = self.size <= FOREGROUND_BYTES
        if not in_front:
            logger.info("data       %s are compared with their sums during training", format_bytes(self.size))
        try:
            for folder in self.shards:
                folder.verify(shown=in_front)
        except (DataError, MachineError) as error:
            self.error = error
        except OSError as error:
            text = f"{error}; the data must stay where and as they are while a job runs"
            self.error = MachineError(text) if is_of_the_machine(error) else DataError(text)
        except Exception as error:  # otherwise a crash of the thread would look like success
            cause = f"{type(error).__name__}: {error}"
            names = ", ".join(str(folder.folder) for folder in self.shards)
            self.error = DataError(f"{names}: cannot be compared with its sums: {cause}; make the folder again")
        if self.error is None and not in_front:
            logger.info("data       %s match their sums", format_bytes(self.size))

    def raise_if_damaged(self) -> None:
        """Raise DataError, which names the file, if a difference has been found, and MachineError if a file could not
        be read. Waits for small data.
        """
        if self.size <= FOREGROUND_BYTES:
            self._thread.join()
        if self.error is not None:
            raise self.error


_verifications: dict[tuple[str, ...], Verification] = {}


def start_verification(shards: Sequence[TokenShards]) -> Verification | None:
    """Return the comparison of these folders, which the first call in this process starts; None without shards."""
    if not shards:
        return None
    folders = tuple(str(source.folder.resolve()) for source in shards)
    if folders not in _verifications:
        _verifications[folders] = Verification(shards)
    return _verifications[folders]
