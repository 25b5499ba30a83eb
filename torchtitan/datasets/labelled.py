"""Records of one or two texts and a class, in local files: .jsonl, .json, .csv, .tsv, .parquet, .arrow, and folders
that `datasets` has saved. A file is read as a whole, when its first record is asked for.
"""

import csv
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from torchtitan.core.files import open_file, require_file
from torchtitan.datasets.sources import (
    REMEDY,
    DataError,
    Document,
    Indexed,
    IndexedFile,
    Labelled,
    decode,
    files_fingerprint,
    find_files,
    missing,
)
from torchtitan.datasets.sources_tables import BESIDE_ARROW, saved_split

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".tsv", ".parquet", ".arrow")
LARGEST = 2**31
"""Largest decompressed file in bytes: it is held in memory, and a hostile file can expand to gigabytes."""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Fields:
    """The fields of labelled records.

    `second`: field of the second text, if there are two. `names`: class names in order; without them classes are
    numbers. `ended`: append an end token to each text, for a model that reads the class at the first token; otherwise
    the last token of the text is used.
    """

    text: str
    label: str
    classes: int
    second: str | None = None
    names: tuple[str, ...] = ()
    ended: bool = False

    @classmethod
    def of(cls, task: Any, classes: int, ended: bool) -> "Fields":
        """Return the fields of a job's [task]; `open_source` sets each source's text field."""
        return cls("", task.label_field, classes, task.second_text_field, tuple(task.labels), ended)

    def document(self, row: Row, place: str, short_place: str) -> Document:
        """Convert a row to a document. Raises DataError, which names `place`."""
        texts = []
        for field in (self.text, *([self.second] if self.second else [])):
            value = row.get(field)
            if isinstance(value, str):
                texts.append(value)
            else:
                keys = ", ".join(map(repr, list(row)[:20])) or "none"
                issue = f"holds {type(value).__name__}, not text" if field in row else f"is not there; there are {keys}"
                remedy = "set training.text_field and task.second_text_field"
                raise DataError(f"{place}: field {field!r} {issue}; {remedy}, or {REMEDY}")
        return Document(Labelled(texts, self._class_of(row, place), self.ended), short_place, framed=True)

    def _class_of(self, row: Row, place: str) -> int:
        label = row.get(self.label)
        if isinstance(label, str) and label in self.names:
            return self.names.index(label)
        if isinstance(label, str) and label.isdecimal():  # as a table of text has it
            label = int(label)
        if isinstance(label, int) and 0 <= label < self.classes:
            return int(label)
        problem = f"holds {label!r}" if self.label in row else "is not there"
        names = f", or one of {', '.join(map(repr, self.names))}" if self.names else ", or names that task.labels has"
        fix = "correct task.label_field, task.labels or n_classes in model.overrides"
        raise DataError(
            f"{place}: field {self.label!r} {problem}; allowed: a class from 0 to {self.classes - 1}{names}; {fix}, or "
            f"{REMEDY}"
        )


def saved(path: str | None, fields: Fields, split: str) -> Indexed:
    """Open a split of a local folder saved by `datasets`, or all files of another folder. Raises DataError."""
    if not os.path.isdir(path or ""):
        raise DataError(f"{path}: no local folder; classes are read from local files: save the dataset there first")
    assert path is not None
    return labelled_files(saved_split(path, split) or path, fields)


def labelled_files(path: str | None, fields: Fields) -> Indexed:
    """Open labelled files, reading only names and sizes. Raises DataError."""
    files = {name: file for name, file in find_files(path, SUFFIXES).items() if file.name not in BESIDE_ARROW}
    fingerprint = {"dataset_path": os.path.normpath(path or ""), "fields": asdict(fields), **files_fingerprint(files)}
    return Indexed(str(path), fingerprint, [LabelledFile(file, name, fields) for name, file in files.items()])


class LabelledFile(IndexedFile):
    def __init__(self, path: Path, name: str, fields: Fields) -> None:
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
            raise DataError(f"{self.path}: damaged, or not what its name says: {error}; {REMEDY}") from None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_rows"}


def _json_rows(path: Path) -> Iterator[Row]:
    with open_file(path) as file:
        unpacked = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
        content = unpacked.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise DataError(f"{path}: more than {LARGEST / 2**30:g} GiB of records; cut it into several files")
    text = decode(content.removeprefix(b"\xef\xbb\xbf"), str(path), 0)
    is_array = text.lstrip().startswith("[")
    lines = json.loads(text) if is_array else [line for line in text.split("\n") if line.strip()]
    for number, line in enumerate(lines):
        row = line if is_array else json.loads(line)
        if not isinstance(row, dict):
            raise DataError(f"{path}, row {number}: a {type(row).__name__}; each record is a JSON object; {REMEDY}")
        yield row


def _csv_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a .csv or .tsv file. Quotation marks in a .tsv are literal, as in GLUE's files."""
    tabs = path.suffix.lower() == ".tsv"
    form: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {"delimiter": ","}
    with TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="") as file:
        for number, row in enumerate(csv.DictReader(file, strict=True, **form)):
            if None in row:  # what DictReader calls the values beyond the header's
                remedy = "write a text without tabs" if tabs else "put a text with commas in quotation marks"
                counts = f"{len(row) - 1 + len(row[None])} values under a header of {len(row) - 1}"
                raise DataError(f"{path}, row {number}: {counts}; {remedy}, or {REMEDY}")
            yield row


def _table_rows(path: Path) -> Sequence[Row]:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise missing(path, "pyarrow") from None
    require_file(path)
    try:
        if path.suffix.lower() == ".parquet":
            return pyarrow.parquet.read_table(path).to_pylist()
        with pyarrow.memory_map(str(path)) as mapped:
            try:
                table = pyarrow.ipc.open_stream(mapped).read_all()
            except pyarrow.ArrowInvalid:
                table = pyarrow.ipc.open_file(mapped).read_all()
            table.validate(full=True)
            return table.to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: damaged or truncated: {error}; {REMEDY}") from None
