"""Records of JSON: one line, and one array of them that fills a file."""

import json
from codecs import BOM_UTF8, getincrementaldecoder
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from torchtitan.core.files import open_file
from torchtitan.datasets.record_format import Reading
from torchtitan.datasets.sources import MAX_RECORD, REMEDY, DataError, Document, IndexedFile, decode


def parse_line(line: bytes, place: str, short_place: str, offset: int, reading: Reading) -> Document:
    """The document of one JSON object. `place` names the record in errors, `offset` is where the line begins."""
    if offset == 0 and line.startswith(BOM_UTF8):  # byte order mark of some editors
        line, offset = line[len(BOM_UTF8) :], len(BOM_UTF8)
    content = decode(line, place, offset)
    if not content.strip():
        return Document("", short_place)
    try:
        record = json.loads(content)
    except json.JSONDecodeError as error:
        byte = offset + len(content[: error.pos].encode())
        raise DataError(f"{place}: no valid JSON at byte {byte}: {error.msg}; {REMEDY}") from None
    except (ValueError, RecursionError) as error:  # numbers with thousands of digits, thousands of brackets
        raise DataError(f"{place}: no usable JSON at byte {offset}: {error}; {REMEDY}") from None
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise DataError(f"{place}: a {kind} at byte {offset}; each line must be a JSON object; {REMEDY}")
    return reading.document(record, place, short_place)


class JsonArray(IndexedFile):
    """One array of objects, each a record. Where they lie is found by going through the file once, a window at a time;
    json.loads of the whole would take some ten times its size."""

    WINDOW = 2**24

    def __init__(self, path: Path, name: str, reading: Reading) -> None:
        super().__init__(path, name)
        self.reading = reading

    @cached_property
    def _spans(self) -> np.ndarray:
        """[n, 2] int64: where each element begins and ends, in bytes. DataError where the array is broken."""
        spans = np.array(list(self._scan()), dtype=np.int64)
        return spans.reshape(-1, 2)

    def __len__(self) -> int:
        return len(self._spans)

    def get(self, index: int) -> Document:
        start, stop = (int(n) for n in self._spans[index])
        place = f"element {index}"
        line = self.bytes(start, stop)
        return parse_line(line, f"{self.path}, {place}", f"{self.name}, {place}", start, self.reading)

    def probe(self) -> None:
        """The whole array, as its end is known only then; and the last element, for a wrong text field."""
        if len(self):
            self.get(len(self) - 1)

    def _scan(self) -> Iterator[tuple[int, int]]:
        window = _Window(self.path, self.WINDOW)
        window.skip("[")
        if window.sign() == "]":
            window.skip("]")
        else:
            while True:
                yield window.element()
                if window.sign() != ",":
                    break
                window.skip(",")
            window.skip("]")
        if window.sign():
            raise window.broken("more after the end of the array")


class _Window:
    """A stretch of a JSON file's text that goes forward over it, and how many bytes lie before the place in it."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self.file, self.decoder = open_file(path), getincrementaldecoder("utf-8")()
        self.text, self.place, self.bytes_before, self.ended = "", 0, 0, False
        if self.sign() == "\ufeff":
            self._pass(self.place + 1)

    def sign(self) -> str:
        """The next one that is no blank; "" at the end."""
        while True:
            blanks = len(self.text) - len(self.text[self.place :].lstrip(" \t\r\n"))
            self._pass(blanks)
            if self.place < len(self.text) or self.ended:
                return self.text[self.place : self.place + 1]
            self._more()

    def skip(self, sign: str) -> None:
        if self.sign() != sign:
            raise self.broken(f"{sign!r} is expected")
        self._pass(self.place + 1)

    def element(self) -> tuple[int, int]:
        """Where the next element begins and ends, in bytes."""
        self.sign()
        start = self.bytes_before
        while True:
            try:
                _, end = json.JSONDecoder().raw_decode(self.text, self.place)
                if end < len(self.text) or self.ended:  # a number may go on in the next stretch
                    self._pass(end)
                    return start, self.bytes_before
            except json.JSONDecodeError as error:
                if self.ended:
                    raise self.broken(error.msg) from None
            except (ValueError, RecursionError) as error:
                raise self.broken(str(error)) from None
            if len(self.text) - self.place > MAX_RECORD:
                raise self.broken(f"an element of more than {MAX_RECORD / 2**20:g} MiB")
            self._more()

    def broken(self, why: str) -> DataError:
        return DataError(f"{self.path}: no JSON array at byte {self.bytes_before}: {why}; {REMEDY}")

    def _pass(self, place: int) -> None:
        self.bytes_before += len(self.text[self.place : place].encode())
        self.place = place

    def _more(self) -> None:
        """As much again as is still held, so that a long element is not parsed from its start too often."""
        content = self.file.read(max(self.size, len(self.text) - self.place))
        self.ended = not content
        try:
            text = self.decoder.decode(content, final=self.ended)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path}: not UTF-8 before byte {self.file.tell()}: {error.reason}; {REMEDY}"
            ) from None
        self.text, self.place = self.text[self.place :] + text, 0
        if self.ended:
            self.file.close()
