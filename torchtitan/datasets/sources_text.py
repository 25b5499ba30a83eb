"""Local text: .txt, JSON (arrays; lines, plain, gzip or zstandard), .parquet and tables, one by one or in a folder.

Plain files can be read in any order: JSON by an index of offsets, large text files in pieces, with borders that are
found when they are needed. Compressed files, parquet and csv can only be read forward, and so can a folder of both.
"""

import os
import sysconfig
import zlib
from collections.abc import Callable
from pathlib import Path

from torchtitan.core.files import open_file
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.sources import (
    DataError,
    Document,
    IndexedFile,
    IndexedSource,
    Part,
    SequentialSource,
    Source,
    decode_utf8,
    files_below,
    files_fingerprint,
    find_files,
)
from torchtitan.datasets.sources_json import (
    CompressedJsonLines,
    JsonArray,
    JsonLines,
)
from torchtitan.datasets.sources_tables import (
    SAVE_TO_DISK_FILES,
    ArrowFile,
    CsvFile,
    row_groups,
)

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
        return Document(decode_utf8(content[skip:], str(self.path), start + skip), location)

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
