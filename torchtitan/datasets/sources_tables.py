"""Records in the rows of a table: .arrow files, as `datasets` saves and caches them, .parquet, .csv and .tsv.

Arrow files are mapped into memory and read in any order. A row is validated before it is read, because the reader
trusts the offsets of a file.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from io import TextIOWrapper
from itertools import accumulate
from pathlib import Path
from typing import Any

from torchtitan.core.files import open_file, read_file, require_file
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

SAVE_TO_DISK_FILES = ("state.json", "dataset_info.json", "dataset_dict.json")
"""Files that Dataset.save_to_disk writes next to the data. They contain no records."""
MAX_JSON_BYTES = 2**20
"""Largest JSON file next to the data, in bytes."""
DELIMITERS = {".csv": ",;\t", ".tsv": "\t"}


def saved_split(folder: str, split: str) -> str | None:
    """Return the folder with a split's data, if Dataset.save_to_disk or DatasetDict.save_to_disk wrote `folder`, else
    None. Raises DataError if a DatasetDict lacks the split."""
    if Path(folder, "dataset_dict.json").exists():
        try:
            splits = json.loads(read_file(Path(folder, "dataset_dict.json"), MAX_JSON_BYTES))["splits"]
            split_names = sorted(name for name in splits if Path(folder, name).name == name)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise DataError(f"{folder}: dataset_dict.json is damaged ({error}); save the dataset again") from None
        if split not in split_names:
            remedy = 'give the folder of one of them with dataset = "text"'
            raise DataError(f"{folder}: there is no split {split!r}, only {', '.join(split_names) or 'none'}; {remedy}")
        return str(Path(folder, split))
    return folder if all(Path(folder, name).is_file() for name in SAVE_TO_DISK_FILES[:2]) else None


TEXTS = ("string", "large_string", "string_view", "binary", "large_binary")


def record_columns(path: Path, schema: Any, record_reader: RecordParser) -> list[str]:
    """Return the columns that a table's records are read from: texts, or lists (of ids, segments or messages). Raises
    DataError if they are missing or have other types."""
    names = ", ".join(schema.names)
    if lack := record_reader.missing_field(schema.names):
        raise DataError(f"{path}: has no column {lack}; its columns: {names}; {record_reader.remedy()}")
    if unclear := record_reader.ambiguity(schema.names):
        raise DataError(f"{path}: {unclear}")
    columns = record_reader.columns(schema.names)
    for name in columns:
        if schema.names.count(name) > 1:
            raise DataError(f"{path}: has several columns {name!r}; its columns: {names}; rename all but one")
        kind = schema.field(name).type
        kind = getattr(kind, "value_type", kind) if str(kind).startswith("dictionary<") else kind
        if str(kind) not in (*TEXTS, "null") and not _is_list(kind):
            raise DataError(f"{path}: has no text but {kind} in column {name!r}; {record_reader.remedy()}")
    return columns


def cells(column: Any) -> list[Any]:
    """Return the values of a column; texts as bytes, so that one that is not UTF-8 only damages its own record."""
    kind = str(column.type)
    return (column if _is_list(kind) or kind == "null" else column.cast("large_binary")).to_pylist()


def row_document(
    record_reader: RecordParser, columns: Sequence[str], values: Sequence[Any], location: str, short_location: str
) -> Document:
    texts = [decode_utf8(value, location, 0) if isinstance(value, bytes) else value for value in values]
    return record_reader.document(dict(zip(columns, texts, strict=True)), location, short_location)


class ArrowFile(IndexedFile):
    def __init__(self, path: Path, name: str, record_reader: RecordParser) -> None:
        super().__init__(path, name)
        self.record_reader = record_reader
        len(self)  # open it, so that a wrong field is reported at once

    def __len__(self) -> int:
        return len(self._table)

    def get(self, index: int) -> Document:
        pyarrow = _pyarrow(self.path)
        location = f"{self.path}, row {index}"
        try:
            row = self._table.slice(index, 1)
            row.validate(full=True)
            values = [cells(column)[0] for column in row.columns]
        except pyarrow.ArrowException as error:
            raise DataError(f"{location}: damaged: {error}; {REMEDY}") from None
        return row_document(self.record_reader, self._table.column_names, values, location, f"{self.name}, row {index}")

    @cached_property
    def _table(self) -> Any:
        """Return the table, reduced to the columns that are read."""
        pyarrow = _pyarrow(self.path)
        try:
            require_file(self.path)
            mapped = pyarrow.memory_map(str(self.path))
            try:
                table = pyarrow.ipc.open_stream(mapped).read_all()
            except pyarrow.ArrowInvalid:
                table = pyarrow.ipc.open_file(mapped).read_all()
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(
                f"{self.path}: damaged or truncated arrow file ({self.size} bytes): {error}; save it again"
            ) from None
        return table.select(record_columns(self.path, table.schema, self.record_reader))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the memory mapping; a worker process that is not forked opens its own."""
        return {name: value for name, value in self.__dict__.items() if name != "_table"}


class CsvFile(Part):
    """Rows after a header line, read forward; quoted fields may hold line ends. The delimiter (comma, semicolon or tab)
    is detected from the header."""

    def __init__(self, path: Path, name: str, record_reader: RecordParser) -> None:
        self.path, self.name, self.record_reader, self.size = path, name, record_reader, path.stat().st_size
        if self.size:
            self._layout()

    def _layout(self) -> tuple[str, dict[str, int]]:
        """Return the delimiter, and name -> number of the columns that are read."""
        try:
            with open_file(self.path) as file:
                line = file.readline(2**16).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path}: its first line is not UTF-8 ({error}); convert it to UTF-8") from None
        headers = {sign: next(csv.reader([line], delimiter=sign), []) for sign in DELIMITERS[self.path.suffix.lower()]}
        for sign, names in headers.items():
            if unclear := self.record_reader.ambiguity(names):
                raise DataError(f"{self.path}: {unclear}")
            if not self.record_reader.missing_field(names):
                return sign, {name: names.index(name) for name in self.record_reader.columns(names)}
        names = max(headers.values(), key=len)
        raise DataError(
            f"{self.path}: no field {self.record_reader.missing_field(names)} in its first line, which names "
            f"{', '.join(map(repr, names[:20]))}; {self.record_reader.remedy()}"
        )

    def read(self, start: int) -> Iterator[DocumentOrError]:
        if not self.size:
            return
        sign, columns = self._layout()
        csv.field_size_limit(MAX_RECORD_BYTES)  # a limit of the process; Python's default is 128 KiB
        row = 0
        try:
            with TextIOWrapper(open_file(self.path), encoding="utf-8-sig", newline="") as file:
                reader = csv.reader(file, delimiter=sign, strict=True)
                next(reader, None)
                for fields in reader:
                    if row >= start:
                        yield document_or_error(self._document, fields, columns, row)
                    row += 1
        except (csv.Error, UnicodeDecodeError) as error:
            yield DataError(f"{self.path}, row {row}: cannot be read: {error}; {REMEDY}")

    def _document(self, fields: list[str], columns: dict[str, int], row: int) -> Document:
        location, short_location = f"{self.path}, row {row}", f"{self.name}, row {row}"
        if not fields:  # an empty line
            return Document("", short_location)
        for name, column in columns.items():
            if column >= len(fields):
                raise DataError(f"{location}: {len(fields)} fields, but {name!r} is the {column + 1}th; {REMEDY}")
        return self.record_reader.document(
            {name: fields[column] for name, column in columns.items()}, location, short_location
        )


def _is_list(kind: Any) -> bool:
    return str(kind).startswith(("list<", "large_list<", "fixed_size_list<"))


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise missing_package(path, "pyarrow") from None
    return pyarrow


class RowGroup(Part):
    """A row group of a parquet file. `columns`: the columns that records are read from."""

    def __init__(
        self,
        path: Path,
        name: str,
        number: int,
        first_row: int,
        rows: int,
        record_reader: RecordParser,
        columns: list[str],
    ) -> None:
        self.path, self.name, self.number, self.first_row, self.size = path, name, number, first_row, rows
        self.record_reader, self.columns = record_reader, columns

    def read(self, start: int) -> Iterator[DocumentOrError]:
        parquet, errors = _parquet(self.path)
        row = self.first_row
        require_file(self.path)
        try:
            with parquet.ParquetFile(self.path) as file:
                for batch in file.iter_batches(1024, [self.number], self.columns, use_threads=False):
                    for values in zip(*(cells(batch.column(name)) for name in self.columns), strict=True):
                        if row - self.first_row >= start:
                            yield document_or_error(self._document, values, row)
                        row += 1
        except errors as error:
            yield DataError(f"{self.path}, row {row}: cannot be read: {error}; {REMEDY}")

    def _document(self, values: Sequence[Any], row: int) -> Document:
        return row_document(
            self.record_reader, self.columns, values, f"{self.path}, row {row}", f"{self.name}, row {row}"
        )


def row_groups(path: Path, name: str, record_reader: RecordParser) -> list[Part]:
    parquet, errors = _parquet(path)
    require_file(path)
    try:
        meta = parquet.read_metadata(path)
        columns = record_columns(path, meta.schema.to_arrow_schema(), record_reader)
    except errors as error:
        size = path.stat().st_size
        raise DataError(f"{path}: damaged or truncated parquet file ({size} bytes): {error}; fetch it again") from None
    rows = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
    groups = enumerate(zip(accumulate(rows), rows, strict=True))
    return [RowGroup(path, name, i, end - n, n, record_reader, columns) for i, (end, n) in groups]


def _parquet(path: Path) -> tuple[Any, tuple[type[Exception], ...]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise missing_package(path, "pyarrow") from None
    return pyarrow.parquet, (pyarrow.ArrowException, OSError)
