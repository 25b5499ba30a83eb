"""Local text: .txt, JSON (arrays; lines, plain, gzip or zstandard), .parquet and tables, one by one or in a folder.

Plain files can be read in any order: JSON by an index of offsets, large text files by pieces whose borders are found
where they are needed. Compressed files, parquet and csv are streams. A folder that holds both kinds is a stream.
"""

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.core.files import open_file, require_file
from torchtitan.datasets.record_format import Reading
from torchtitan.datasets.sources import (
    MAX_RECORD,
    REMEDY,
    DataError,
    Document,
    Indexed,
    IndexedFile,
    Item,
    Part,
    Source,
    Stream,
    attempt,
    decode,
    files_fingerprint,
    find_files,
    missing,
)
from torchtitan.datasets.sources_json import JsonArray, parse_line
from torchtitan.datasets.sources_tables import BESIDE_ARROW, ArrowFile, CsvFile, cells, columns_of, row_document

KINDS: dict[str, Callable[[Path, str, Reading], list[Part]]] = {
    ".txt": lambda file, name, reading: [TextFile(file, name)],
    ".jsonl": lambda *of: [JsonLines(*of)],
    ".jsonl.gz": lambda file, name, reading: [CompressedJsonLines(file, reading)],
    ".jsonl.zst": lambda file, name, reading: [CompressedJsonLines(file, reading)],
    ".json": lambda *of: [JsonArray(*of) if _first_sign(of[0]) == b"[" else JsonLines(*of)],
    ".parquet": lambda *of: _row_groups(*of),
    ".arrow": lambda *of: [ArrowFile(*of)],
    ".csv": lambda *of: [CsvFile(*of)],
    ".tsv": lambda *of: [CsvFile(*of)],
}
"""File name ending -> function (file, its name in messages, reading) that returns the parts."""
PIECE = 256 * 1024
"""A text file longer than this is cut into documents of about this many bytes."""
LINE_END_WITHIN = 64 * 1024


def text(path: str | None, text_field: str) -> Source:
    return text_files(path, Reading(text_field))


def text_files(path: str | None, reading: Reading) -> Source:
    files = find_files(path, tuple(KINDS))
    if any(name.lower().endswith(".arrow") for name in files):
        files = {name: file for name, file in files.items() if file.name not in BESIDE_ARROW}
    if os.path.isfile(os.path.join(path or "", "dataset_dict.json")):
        splits = ", ".join(sorted({name.split("/")[0] for name in files}))
        remedy = 'give the folder of one of them, or set training.dataset = "huggingface", which takes train'
        raise DataError(f"{path}: a dataset of several splits ({splits}); {remedy}")
    fingerprint = {"dataset_path": os.path.normpath(path or ""), **reading.fingerprint, **files_fingerprint(files)}
    parts = [part for name, file in files.items() for part in _parts(file, name, reading)]
    indexed = [part for part in parts if isinstance(part, IndexedFile)]
    if len(indexed) == len(parts):
        return Indexed(str(path), fingerprint, indexed)
    return Stream(str(path), fingerprint, parts)


def _parts(file: Path, name: str, reading: Reading) -> list[Part]:
    return next(parts for ending, parts in KINDS.items() if file.name.lower().endswith(ending))(file, name, reading)


def _first_sign(file: Path) -> bytes:
    with open_file(file) as stream:
        return stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


class TextFile(IndexedFile):
    """A text file in pieces of about PIECE bytes, cut at line ends.

    The end of a piece is found near a multiple of PIECE, so the file need not be read from the beginning."""

    def __len__(self) -> int:
        return -(-self.size // PIECE)

    def get(self, index: int) -> Document:
        start, stop = self._border(index), self._border(index + 1)
        content = self.bytes(start, stop)
        skip = 3 if start == 0 and content.startswith(b"\xef\xbb\xbf") else 0  # byte order mark of some editors
        place = f"{self.name}, bytes {start}-{stop}" if len(self) > 1 else self.name
        return Document(decode(content[skip:], str(self.path), start + skip), place)

    def _border(self, index: int) -> int:
        target = index * PIECE
        if index == 0 or target >= self.size:
            return min(target, self.size)
        if target + LINE_END_WITHIN >= self.size:
            return self.size  # no tail of a few words
        around = self.bytes(target, target + LINE_END_WITHIN)
        line_end = around.find(b"\n")
        if line_end >= 0:
            return target + line_end + 1
        # No line ends near: cut before a character, which in UTF-8 does not begin with the bits 10.
        return target + next((i for i in range(4) if around[i] & 0xC0 != 0x80), 0)


class JsonLines(IndexedFile):
    def __init__(self, path: Path, name: str, reading: Reading) -> None:
        super().__init__(path, name)
        self.reading = reading

    @cached_property
    def _offsets(self) -> np.ndarray:
        """Return the start of each line, and the end of the file, in bytes."""
        starts, base = [np.zeros(1, dtype=np.int64)], 0
        with open_file(self.path) as file:
            while block := file.read(2**24):
                starts.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n")) + (base + 1))
                base += len(block)
        offsets = np.concatenate(starts)
        return offsets if offsets[-1] == base else np.append(offsets, base)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def get(self, index: int) -> Document:
        start, stop = (int(n) for n in self._offsets[index : index + 2])
        if stop - start > MAX_RECORD:
            raise _too_long(f"{self.path}:{index + 1}")
        line = self.bytes(start, stop)
        return parse_line(line, f"{self.path}:{index + 1}", f"{self.name}:{index + 1}", start, self.reading)

    def probe(self) -> None:
        """Read the last line: it is damaged if the file is truncated, and reveals a wrong text field."""
        if len(self):
            self.get(len(self) - 1)


class CompressedJsonLines(Part):
    """Lines of a .gz or .zst file. zlib and zstandard check the checksums; a file that ends too soon is noticed."""

    def __init__(self, path: Path, reading: Reading) -> None:
        self.path, self.reading, self.size = path, reading, path.stat().st_size
        _decompressor(path)  # raise at once if its package is missing

    def read(self, start: int) -> Iterator[Item]:
        for number, offset, line in self._lines():
            if isinstance(line, DataError):
                yield line
            elif number > start:
                places = f"{self.path}:{number}", f"{self.path.name}:{number}"
                yield attempt(parse_line, line, *places, offset, self.reading)

    def _lines(self) -> Iterator[tuple[int, int, bytes | DataError]]:
        """Yield (line number from 1, its offset in the decompressed text, the line or the error that ends it)."""
        head: list[bytes] = []
        number, offset, length = 1, 0, 0
        for chunk in self._chunks():
            if isinstance(chunk, bytes):
                *lines, rest = chunk.split(b"\n")
                for line in lines:
                    line = b"".join(head) + line
                    yield number, offset, line
                    number, offset, head, length = number + 1, offset + len(line) + 1, [], 0
                head.append(rest)
                length += len(rest)
                if length > MAX_RECORD:
                    chunk = _too_long(f"{self.path}:{number}")
            if isinstance(chunk, DataError):
                yield number, offset, chunk
                return
        if length:
            yield number, offset, b"".join(head)

    def _chunks(self) -> Iterator[bytes | DataError]:
        new, error_type = _decompressor(self.path)
        frame = None
        with open_file(self.path) as file:
            # Small reads: a few bytes of a hostile file can expand to gigabytes.
            while compressed := file.read(2**14):
                while compressed:
                    if frame is None:
                        compressed = compressed.lstrip(b"\0")  # gzip allows zeros after a member
                        if not compressed:
                            break
                        frame = new()
                    try:
                        chunk = frame.decompress(compressed)
                    except error_type as error:
                        yield DataError(f"{self.path}: damaged before byte {file.tell()}: {error}; {REMEDY}")
                        return
                    yield chunk
                    compressed, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
            if frame is not None or file.tell() == 0:
                yield DataError(f"{self.path}: truncated, it ends too soon at byte {file.tell()}; {REMEDY}")


class RowGroup(Part):
    """A row group of a parquet file. `columns`: the columns that records are read from."""

    def __init__(
        self, path: Path, name: str, number: int, first_row: int, rows: int, reading: Reading, columns: list[str]
    ) -> None:
        self.path, self.name, self.number, self.first_row, self.size = path, name, number, first_row, rows
        self.reading, self.columns = reading, columns

    def read(self, start: int) -> Iterator[Item]:
        parquet, errors = _parquet(self.path)
        row = self.first_row
        require_file(self.path)
        try:
            with parquet.ParquetFile(self.path) as file:
                for batch in file.iter_batches(1024, [self.number], self.columns, use_threads=False):
                    for values in zip(*(cells(batch.column(name)) for name in self.columns), strict=True):
                        if row - self.first_row >= start:
                            yield attempt(self._document, values, row)
                        row += 1
        except errors as error:
            yield DataError(f"{self.path}, row {row}: cannot be read: {error}; {REMEDY}")

    def _document(self, values: Sequence[Any], row: int) -> Document:
        return row_document(self.reading, self.columns, values, f"{self.path}, row {row}", f"{self.name}, row {row}")


def _row_groups(path: Path, name: str, reading: Reading) -> list[Part]:
    parquet, errors = _parquet(path)
    require_file(path)
    try:
        meta = parquet.read_metadata(path)
        columns = columns_of(path, meta.schema.to_arrow_schema(), reading)
    except errors as error:
        size = path.stat().st_size
        raise DataError(f"{path}: damaged or truncated parquet file ({size} bytes): {error}; fetch it again") from None
    rows = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
    groups = enumerate(zip(accumulate(rows), rows, strict=True))
    return [RowGroup(path, name, i, end - n, n, reading, columns) for i, (end, n) in groups]


def _too_long(place: str) -> DataError:
    limit = f"{MAX_RECORD / 2**20:g} MiB"
    return DataError(f"{place}: more than {limit} without a line end; one document a line is expected; {REMEDY}")


def _decompressor(path: Path) -> tuple[Any, type[Exception]]:
    if path.suffix.lower() == ".gz":
        return lambda: zlib.decompressobj(wbits=31), zlib.error
    try:
        import zstandard
    except ImportError:
        raise missing(path, "zstandard") from None
    return lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError


def _parquet(path: Path) -> tuple[Any, tuple[type[Exception], ...]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise missing(path, "pyarrow") from None
    return pyarrow.parquet, (pyarrow.ArrowException, OSError)
