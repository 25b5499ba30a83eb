"""Local text: .txt, JSON (arrays; lines, plain, gzip or zstandard), .parquet and tables, one by one or in a folder.

Plain files can be read in any order: JSON by an index of offsets, large text files in pieces, with borders that are
found when they are needed. Compressed files, parquet and csv can only be read forward, and so can a folder of both.
JSON records are one object per line, or one array of objects per file.
"""

from __future__ import annotations

import json
import os
import re
import sysconfig
import zlib
from codecs import BOM_UTF8, getincrementaldecoder
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtitan.core.files import load_json, open_file
from torchtitan.core.lazy_numpy import np
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.sources import (
    MAX_RECORD_BYTES,
    REMEDY,
    DataError,
    Document,
    DocumentOrError,
    IndexedFile,
    IndexedSource,
    Part,
    RecordParser,
    SequentialSource,
    Source,
    decode_utf8,
    document_or_error,
    files_below,
    files_fingerprint,
    find_files,
    missing_package,
)
from torchtitan.datasets.sources.tables import (
    SAVE_TO_DISK_FILES,
    ArrowFile,
    CsvFile,
    row_groups,
)


def parse_line(line: bytes, location: str, short_location: str, offset: int, record_reader: RecordParser) -> Document:
    """Convert one JSON object to a document. `location` names the record in errors; `offset`: where the line begins."""
    if offset == 0 and line.startswith(BOM_UTF8):  # byte order mark of some editors
        line, offset = line[len(BOM_UTF8) :], len(BOM_UTF8)
    content = decode_utf8(line, location, offset)
    if not content.strip():
        return Document("", short_location, is_empty_line=True)
    try:
        record = load_json(content)
    except json.JSONDecodeError as error:
        byte = offset + len(content[: error.pos].encode())
        raise DataError(f"{location}: no valid JSON at byte {byte}: {error.msg}; {REMEDY}") from None
    except (ValueError, RecursionError) as error:  # a key that is there twice, thousands of digits or of brackets
        raise DataError(f"{location}: no usable JSON at byte {offset}: {error}; {REMEDY}") from None
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise DataError(f"{location}: a {kind} at byte {offset}; each line must be a JSON object; {REMEDY}")
    return record_reader.document(record, location, short_location)


class JsonArray(IndexedFile):
    """One array of objects, each a record.

    One scan of the file, a window at a time, finds the elements' positions; json.loads of the whole file would take
    about ten times its size in memory."""

    WINDOW = 2**24

    def __init__(self, path: Path, name: str, record_reader: RecordParser) -> None:
        super().__init__(path, name)
        self.record_reader = record_reader

    @cached_property
    def _spans(self) -> np.ndarray:
        """Return the start and end of each element in bytes, [n, 2] int64. Raises DataError if the array is broken."""
        spans = np.array(list(self._scan()), dtype=np.int64)
        return spans.reshape(-1, 2)

    def __len__(self) -> int:
        return len(self._spans)

    def get(self, index: int) -> Document:
        start, stop = (int(n) for n in self._spans[index])
        location = f"element {index}"
        line = self.bytes(start, stop)
        return parse_line(line, f"{self.path}, {location}", f"{self.name}, {location}", start, self.record_reader)

    def probe(self) -> None:
        """Scan the whole array, to check its end, and read the last element, which reveals a wrong text field."""
        if len(self):
            self.get(len(self) - 1)

    def _scan(self) -> Iterator[tuple[int, int]]:
        window = _Window(self.path, self.WINDOW)
        window.skip("[")
        if window.peek() == "]":
            window.skip("]")
        else:
            while True:
                yield window.element()
                if window.peek() != ",":
                    break
                window.skip(",")
            window.skip("]")
        if window.peek():
            raise window.broken("more after the end of the array")


class _Window:
    """A window that moves forward over a JSON file's text. `bytes_before`: bytes of the file before `cursor`."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self.file, self.decoder = open_file(path), getincrementaldecoder("utf-8")()
        self.text, self.cursor, self.bytes_before, self.ended = "", 0, 0, False
        if self.peek() == "\ufeff":
            self._advance(self.cursor + 1)

    def peek(self) -> str:
        """Skip blanks and return the next character, without consuming it; "" at the end."""
        while True:
            blanks = len(self.text) - len(self.text[self.cursor :].lstrip(" \t\r\n"))
            self._advance(blanks)
            if self.cursor < len(self.text) or self.ended:
                return self.text[self.cursor : self.cursor + 1]
            self._read_more()

    def skip(self, sign: str) -> None:
        if self.peek() != sign:
            raise self.broken(f"{sign!r} is expected")
        self._advance(self.cursor + 1)

    def element(self) -> tuple[int, int]:
        """Consume the next element and return its start and end, in bytes."""
        self.peek()
        start = self.bytes_before
        while True:
            try:
                _, end = json.JSONDecoder().raw_decode(self.text, self.cursor)
                if end < len(self.text) or self.ended:  # a number may continue in the next window
                    self._advance(end)
                    return start, self.bytes_before
            except json.JSONDecodeError as error:
                if self.ended:
                    raise self.broken(error.msg) from None
            except (ValueError, RecursionError) as error:
                raise self.broken(str(error)) from None
            if len(self.text) - self.cursor > MAX_RECORD_BYTES:
                raise self.broken(f"an element of more than {MAX_RECORD_BYTES / 2**20:g} MiB")
            self._read_more()

    def broken(self, reason: str) -> DataError:
        return DataError(f"{self.path}: no JSON array at byte {self.bytes_before}: {reason}; {REMEDY}")

    def _advance(self, cursor: int) -> None:
        self.bytes_before += len(self.text[self.cursor : cursor].encode())
        self.cursor = cursor

    def _read_more(self) -> None:
        """Read at least as much as is still held, so that a long element is not parsed from its start too often."""
        content = self.file.read(max(self.size, len(self.text) - self.cursor))
        self.ended = not content
        try:
            text = self.decoder.decode(content, final=self.ended)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path}: not UTF-8 before byte {self.file.tell()}: {error.reason}; {REMEDY}"
            ) from None
        self.text, self.cursor = self.text[self.cursor :] + text, 0
        if self.ended:
            self.file.close()


LINE_BEFORE_BLANK = re.compile(rb"\n(?=\s)")
"""The end of a line, before one that begins with a blank or is empty."""


class JsonLines(IndexedFile):
    def __init__(self, path: Path, name: str, record_reader: RecordParser) -> None:
        super().__init__(path, name)
        self.record_reader = record_reader

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
        if stop - start > MAX_RECORD_BYTES:
            raise _too_long(f"{self.path}:{index + 1}")
        line = self.bytes(start, stop)
        return parse_line(line, f"{self.path}:{index + 1}", f"{self.name}:{index + 1}", start, self.record_reader)

    def empty_record(self) -> int | None:
        starts, base, last = self._offsets[:-1], 0, b"\n"
        with open_file(self.path) as file:
            while block := file.read(2**24):
                for match in LINE_BEFORE_BLANK.finditer(last + block):
                    index = int(starts.searchsorted(base + match.start()))
                    if index < len(self) and not self.bytes(*self._offsets[index : index + 2].tolist()).strip():
                        return index
                base, last = base + len(block), block[-1:]
        return None

    def probe(self) -> None:
        """Read the last line: it is damaged if the file is truncated, and reveals a wrong text field."""
        if len(self):
            self.get(len(self) - 1)


class CompressedJsonLines(Part):
    """Lines of a .gz or .zst file. zlib and zstandard check the checksums; a file that ends too soon is noticed."""

    def __init__(self, path: Path, record_reader: RecordParser) -> None:
        self.path, self.record_reader, self.size = path, record_reader, path.stat().st_size
        _decompressor(path)  # raise at once if its package is missing

    def read(self, start: int) -> Iterator[DocumentOrError]:
        for number, offset, line in self._lines():
            if isinstance(line, DataError):
                yield line
            elif number > start:
                locations = f"{self.path}:{number}", f"{self.path.name}:{number}"
                yield document_or_error(parse_line, line, *locations, offset, self.record_reader)

    def _lines(self) -> Iterator[tuple[int, int, bytes | DataError]]:
        """Yield (line number from 1, its offset in the decompressed text, the line or the error that ends it)."""
        head: list[bytes] = []
        number, offset, length = 1, 0, 0
        for chunk in self._chunks():
            if isinstance(chunk, bytes):
                *lines, remainder = chunk.split(b"\n")
                for line in lines:
                    line = b"".join(head) + line
                    yield number, offset, line
                    number, offset, head, length = number + 1, offset + len(line) + 1, [], 0
                head.append(remainder)
                length += len(remainder)
                if length > MAX_RECORD_BYTES:
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


def _too_long(location: str) -> DataError:
    limit = f"{MAX_RECORD_BYTES / 2**20:g} MiB"
    return DataError(f"{location}: more than {limit} without a line end; one document a line is expected; {REMEDY}")


def _decompressor(path: Path) -> tuple[Any, type[Exception]]:
    if path.suffix.lower() == ".gz":
        return lambda: zlib.decompressobj(wbits=31), zlib.error
    try:
        import zstandard
    except ImportError:
        raise missing_package(path, "zstandard") from None
    return lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError


KINDS: dict[str, Callable[[Path, str, RecordReader], list[Part]]] = {
    ".txt": lambda file, name, record_reader: [TextFile(file, name)],
    ".jsonl": lambda *arguments: [JsonLines(*arguments)],
    ".jsonl.gz": lambda file, name, record_reader: [CompressedJsonLines(file, record_reader)],
    ".jsonl.zst": lambda file, name, record_reader: [CompressedJsonLines(file, record_reader)],
    ".json": lambda file, *arguments: [(JsonArray if _first_character(file) == b"[" else JsonLines)(file, *arguments)],
    ".parquet": row_groups,
    ".arrow": lambda *arguments: [ArrowFile(*arguments)],
    ".csv": lambda *arguments: [CsvFile(*arguments)],
    ".tsv": lambda *arguments: [CsvFile(*arguments)],
}
"""File name ending -> function that returns the parts. Arguments: file, its name in messages, record reader."""
PIECE = 256 * 1024
"""Approximate size in bytes of the documents into which a larger text file is cut."""
LINE_END_SEARCH_BYTES = 64 * 1024


# Installed packages, tests with files broken on purpose, tables of numbers, and modules built for this machine.
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "lib-dynload"}
HELD_OUT_ONE_IN = 20


def text(path: str | None, text_field: str) -> Source:
    return open_text_files(path, RecordReader(text_field))


def open_text_files(path: str | None, record_reader: RecordReader) -> Source:
    files = find_files(path, tuple(KINDS))
    if any(name.lower().endswith(".arrow") for name in files):
        files = {name: file for name, file in files.items() if file.name not in SAVE_TO_DISK_FILES}
    if os.path.isfile(os.path.join(path or "", "dataset_dict.json")):
        splits = ", ".join(sorted({name.split("/")[0] for name in files}))
        remedy = 'give the folder of one of them, or set training.dataset = "huggingface", which takes train'
        raise DataError(f"{path}: a dataset of several splits ({splits}); {remedy}")
    fingerprint = {
        "dataset_path": os.path.normpath(path or ""),
        **record_reader.fingerprint,
        **files_fingerprint(files),
    }
    parts = [part for name, file in files.items() for part in _parts(file, name, record_reader)]
    indexed = [part for part in parts if isinstance(part, IndexedFile)]
    if len(indexed) == len(parts):
        return IndexedSource(str(path), fingerprint, indexed)
    return SequentialSource(str(path), fingerprint, parts)


def _parts(file: Path, name: str, record_reader: RecordReader) -> list[Part]:
    return next(parts for ending, parts in KINDS.items() if file.name.lower().endswith(ending))(
        file, name, record_reader
    )


def _first_character(file: Path) -> bytes:
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
        location = f"{self.name}, bytes {start}-{stop}" if len(self) > 1 else self.name
        decoded = decode_utf8(content[skip:], str(self.path), start + skip)
        if 4 * decoded.count("\0") > len(decoded):
            raise DataError(
                f"{self.path}: more than a quarter of bytes {start} to {stop} is NUL, as in UTF-16, or in a file that "
                f"was not written to its end; convert it to UTF-8; {REMEDY}"
            )
        return Document(decoded, location)

    def _border(self, index: int) -> int:
        target = index * PIECE
        if index == 0 or target >= self.size:
            return min(target, self.size)
        if target + LINE_END_SEARCH_BYTES >= self.size:
            return self.size  # avoid a last piece of only a few words
        around = self.bytes(target, target + LINE_END_SEARCH_BYTES)
        line_end = around.find(b"\n")
        if line_end >= 0:
            return target + line_end + 1
        # No line ends near: cut before a character, which in UTF-8 does not begin with the bits 10.
        return target + next((i for i in range(4) if around[i] & 0xC0 != 0x80), 0)


def python_stdlib(path: str | None, text_field: str) -> Source:
    return _library(path, held_out=False)


def python_stdlib_validation(path: str | None, text_field: str) -> Source:
    """Open the held-out files: one in twenty, chosen by its name. The training set does not have them."""
    return _library(path, held_out=True)


def _library(path: str | None, held_out: bool) -> Source:
    name = "python_stdlib_validation" if held_out else "python_stdlib"
    if path is not None:
        raise DataError(
            f"dataset_path is {path!r}, but {name} is the library of the running Python and takes none; "
            'leave dataset_path out, or set dataset = "text"'
        )
    folder = sysconfig.get_paths()["stdlib"]
    files = {
        file_name: file
        for file_name, file in sorted(files_below(folder, (".py", ".rst", ".txt"), EXCLUDED_FOLDERS).items())
        if not file_name.startswith(("config-", "_sysconfigdata"))
        and (zlib.crc32(file_name.encode()) % HELD_OUT_ONE_IN == 0) == held_out
    }
    if not files:
        raise DataError(
            f"{folder}: this Python has no library files to read (a stripped or zipped installation); "
            'use a full Python, or set training.dataset = "text" and training.dataset_path'
        )
    return IndexedSource(name, files_fingerprint(files), [_LibraryFile(file, name) for name, file in files.items()])


class _LibraryFile(TextFile):
    def get(self, index: int) -> Document:
        try:
            return super().get(index)
        except DataError:
            # Some library files have old encodings. This is no error, because the user did not choose the files.
            return Document("", self.name)
