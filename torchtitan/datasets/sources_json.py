"""JSON records: one object per line, or one array of objects per file."""

from __future__ import annotations

import json
import zlib
from codecs import BOM_UTF8, getincrementaldecoder
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtitan.core.files import open_file
from torchtitan.core.lazy_numpy import np
from torchtitan.datasets.messages import load_json
from torchtitan.datasets.sources import (
    MAX_RECORD_BYTES,
    REMEDY,
    DataError,
    Document,
    DocumentOrError,
    IndexedFile,
    Part,
    RecordParser,
    decode_utf8,
    document_or_error,
    missing_package,
)


def parse_line(line: bytes, location: str, short_location: str, offset: int, record_reader: RecordParser) -> Document:
    """Convert one JSON object to a document. `location` names the record in errors; `offset`: where the line begins."""
    if offset == 0 and line.startswith(BOM_UTF8):  # byte order mark of some editors
        line, offset = line[len(BOM_UTF8) :], len(BOM_UTF8)
    content = decode_utf8(line, location, offset)
    if not content.strip():
        return Document("", short_location)
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
