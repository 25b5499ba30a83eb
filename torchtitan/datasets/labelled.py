"""Records of one or two texts and a class, in local files: .jsonl, .json, .csv, .tsv, .parquet, .arrow, and folders
that `datasets` has saved. A file is read completely when its first record is requested.
"""

import csv
import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from io import TextIOWrapper
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

from torchtitan.core.files import load_json, open_file, require_file
from torchtitan.core.machine_errors import raise_if_of_the_machine
from torchtitan.datasets.record_format import LabelledFields, Row
from torchtitan.datasets.sources import (
    REMEDY,
    DataError,
    Document,
    DocumentOrError,
    IndexedFile,
    IndexedSource,
    Source,
    decode_utf8,
    files_fingerprint,
    find_files,
    missing_package,
)
from torchtitan.datasets.sources.tables import SAVE_TO_DISK_FILES, check_row_length, saved_split

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".tsv", ".parquet", ".arrow")
LARGEST = 2**31
"""Largest decompressed file in bytes. It is held in memory, and a malicious file could expand to gigabytes."""


def open_saved_dataset(path: str | None, fields: LabelledFields, split: str) -> IndexedSource:
    """Open a split of a local folder saved by `datasets`, or all files of another folder. Raises DataError."""
    if not os.path.isdir(path or ""):
        raise DataError(f"{path}: no local folder; classes are read from local files: save the dataset there first")
    assert path is not None
    return open_labelled_files(saved_split(path, split) or path, fields)


def open_labelled_files(path: str | None, fields: LabelledFields) -> IndexedSource:
    """Open labelled files, reading only names and sizes. Raises DataError."""
    files = {name: file for name, file in find_files(path, SUFFIXES).items() if file.name not in SAVE_TO_DISK_FILES}
    fingerprint = {
        "dataset_path": os.path.normpath(path or ""),
        "fields": fields.fingerprint,
        **files_fingerprint(files),
    }
    return IndexedSource(str(path), fingerprint, [LabelledFile(file, name, fields) for name, file in files.items()])


class LabelledFile(IndexedFile):
    def __init__(self, path: Path, name: str, fields: LabelledFields) -> None:
        super().__init__(path, name)
        self.fields = fields

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, index: int) -> Document:
        return self.fields.document(self._rows[index], f"{self.path}, row {index}", f"{self.name}, row {index}")

    def probe(self) -> None:
        """Read the last row, which also reveals a wrong field name."""
        if len(self):
            self.get(len(self) - 1)

    @cached_property
    def _rows(self) -> Sequence[Row]:
        suffix = self.path.suffix.lower()
        try:
            if suffix in (".csv", ".tsv"):
                return list(_csv_rows(self.path))
            return _table_rows(self.path) if suffix in (".parquet", ".arrow") else list(_json_rows(self.path))
        except (OSError, EOFError, ValueError, csv.Error, zlib.error, RecursionError) as error:
            if isinstance(error, DataError):
                raise
            raise_if_of_the_machine(error, self.path, with_rights=False)
            raise DataError(f"{self.path}: damaged, or of another format than its name: {error}; {REMEDY}") from None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_rows"}


def _json_rows(path: Path) -> Iterator[Row]:
    with open_file(path) as file:
        unpacked = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
        content = unpacked.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise DataError(f"{path}: more than {LARGEST / 2**30:g} GiB of records; cut it into several files")
    text = decode_utf8(content.removeprefix(b"\xef\xbb\xbf"), str(path), 0)
    is_array = text.lstrip().startswith("[")
    lines = load_json(text) if is_array else [line for line in text.split("\n") if line.strip()]
    for number, line in enumerate(lines):
        row = line if is_array else load_json(line)
        if not isinstance(row, dict):
            raise DataError(f"{path}, row {number}: a {type(row).__name__}; each record is a JSON object; {REMEDY}")
        yield row


def _csv_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a .csv or .tsv file. Quotation marks in a .tsv are literal, as in GLUE's files."""
    tabs = path.suffix.lower() == ".tsv"
    form: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {"delimiter": ","}
    with TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True, **form)
        names = next(reader, [])
        if repeated := [name for name in names if names.count(name) > 1]:
            raise DataError(f"{path}: has several columns {repeated[0]!r}; rename all but one")
        for number, fields in enumerate(filter(None, reader)):  # without empty lines
            check_row_length(len(fields), len(names), f"{path}, row {number}", reader.line_num, path)
            yield dict(zip(names, fields, strict=True))


def _table_rows(path: Path) -> Sequence[Row]:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise missing_package(path, "pyarrow") from None
    require_file(path)
    try:
        if path.suffix.lower() == ".parquet":
            with open_file(path) as file:
                return pyarrow.parquet.read_table(file).to_pylist()
        with pyarrow.memory_map(str(path)) as mapped:
            try:
                table = pyarrow.ipc.open_stream(mapped).read_all()
            except pyarrow.ArrowInvalid:
                table = pyarrow.ipc.open_file(mapped).read_all()
            table.validate(full=True)
            return table.to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: damaged or truncated: {error}; {REMEDY}") from None


NOUNS = ("film", "book", "song", "meal", "hotel", "game", "play", "road", "trip", "talk", "coat", "garden", "picture")
DETERMINERS = ("the", "this", "their new", "our old", "your")
GOOD = ("good", "great", "lovely", "brilliant", "clever", "charming", "bright", "warm", "fresh", "superb")
BAD = ("bad", "awful", "boring", "stupid", "dull", "ugly", "broken", "cold", "stale", "poor")
VERB_PHRASES = {"was": False, "is": False, "is really": False, "seems": False, "was not": True}
"""Verb phrase -> True if it negates the adjective."""
HELD_OUT = 8
"""One sentence in this many is held out."""


def sentiment(path: str | None, text_field: str, fields: LabelledFields | None = None) -> Source:
    return Sentences("sentiment", False, path, fields)


def sentiment_validation(path: str | None, text_field: str, fields: LabelledFields | None = None) -> Source:
    """Return the held-out sentences, which are not in the training set."""
    return Sentences("sentiment_validation", True, path, fields)


class Sentences(IndexedSource):
    """Sentences as text or, with `fields`, as labelled records: class 1 is positive."""

    def __init__(self, name: str, held_out: bool, path: str | None, fields: LabelledFields | None) -> None:
        if path is not None:
            raise DataError(f"dataset_path is {path!r}, but {name} is made of words and takes none; leave it out")
        self.rows = [row for row in _rows() if (crc32(row[0].encode()) % HELD_OUT == 0) == held_out]
        self.fields = fields
        super().__init__(name, {"sentences": len(self.rows)}, [])

    def __len__(self) -> int:
        return len(self.rows)

    def documents(self) -> Iterator[DocumentOrError]:
        return map(self.get, range(len(self)))

    def get(self, index: int) -> Document:
        text, label = self.rows[index]
        location = f"{self.name}, sentence {index}"
        if self.fields is None:
            return Document(text, location)
        return self.fields.document({"text": text, "label": label}, location, location)

    def probe(self) -> None:
        """Read the first sentence, which reveals wrong field names."""
        self.get(0)


def _rows() -> Iterator[tuple[str, int]]:
    for determiner, thing, (verb, negated), adjective in product(DETERMINERS, NOUNS, VERB_PHRASES.items(), GOOD + BAD):
        yield f"{determiner} {thing} {verb} {adjective}", int((adjective in GOOD) != negated)
