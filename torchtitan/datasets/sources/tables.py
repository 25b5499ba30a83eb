"""Tables of records: .arrow, .parquet, .csv and .tsv files, and datasets of the Hugging Face hub.

A dataset of the hub is streamed, or is a local folder in the hub's layout or saved by the package `datasets`. A
dataset's code never runs.

Arrow files are mapped into memory and read in any order. A row is validated before it is read, because the reader
trusts the offsets of a file.
"""

import csv
import os
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from io import StringIO, TextIOWrapper
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.core.files import load_json, open_file, read_file, require_file
from torchtitan.core.machine_errors import raise_if_of_the_machine
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.sources import (
    MAX_RECORD_BYTES,
    REMEDY,
    DataError,
    Document,
    DocumentOrError,
    IndexedFile,
    Part,
    RecordParser,
    SequentialSource,
    Source,
    UnreachableData,
    decode_utf8,
    document_or_error,
    files_fingerprint,
    find_files,
    missing_package,
)

SAVE_TO_DISK_FILES = ("state.json", "dataset_info.json", "dataset_dict.json")
"""Files that Dataset.save_to_disk writes next to the data. They contain no records."""
MAX_JSON_BYTES = 2**20
"""Largest JSON file next to the data, in bytes."""
HEADER_BYTES = 2**16
"""Bytes at the beginning of a table of text that hold the names of its columns."""
DELIMITERS = {".csv": ",;\t", ".tsv": "\t"}


def saved_split(folder: str, split: str) -> str | None:
    """Return the folder with a split's data, if Dataset.save_to_disk or DatasetDict.save_to_disk wrote `folder`, else
    None. Raises DataError if a DatasetDict lacks the split."""
    if Path(folder, "dataset_dict.json").exists():
        try:
            splits = load_json(read_file(Path(folder, "dataset_dict.json"), MAX_JSON_BYTES))["splits"]
            split_names = sorted(name for name in splits if Path(folder, name).name == name)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise DataError(f"{folder}: dataset_dict.json is damaged ({error}); save the dataset again") from None
        if split not in split_names:
            remedy = 'give the folder of one of them with dataset = "text"'
            raise DataError(f"{folder}: there is no split {split!r}, only {', '.join(split_names) or 'none'}; {remedy}")
        return str(Path(folder, split))
    return folder if all(Path(folder, name).is_file() for name in SAVE_TO_DISK_FILES[:2]) else None


TEXTS = ("string", "large_string", "string_view", "binary", "large_binary")


class TableColumns(NamedTuple):
    """The columns of a table. `looked_at`: those that records are read from or refused for; `unread`: all others."""

    looked_at: list[str]
    unread: tuple[str, ...]

    @classmethod
    def of(
        cls, names: Sequence[str], path: Path, record_reader: RecordParser, texts: Collection[str] = ()
    ) -> "TableColumns":
        """Divide a table's columns, of which `texts` are known to hold texts alone.

        Raises DataError, which names `path`, if one that is looked at is there twice."""
        looked_at = [*record_reader.columns(names), *record_reader.unplaced_columns(names, texts)]
        if repeated := [name for name in looked_at if names.count(name) > 1]:
            columns = ", ".join(names)
            raise DataError(f"{path}: has several columns {repeated[0]!r}; its columns: {columns}; rename all but one")
        return cls(looked_at, tuple(name for name in names if name not in looked_at))


def record_columns(path: Path, schema: Any, record_reader: RecordParser) -> TableColumns:
    """Return the columns of a table: texts, lists (of ids, segments or messages) and tables.

    Raises DataError if they are missing or have other types."""
    names = ", ".join(schema.names)
    if lack := record_reader.missing_field(schema.names):
        raise DataError(f"{path}: has no column {lack}; its columns: {names}; {record_reader.remedy(schema.names)}")
    if unclear := record_reader.ambiguity(schema.names):
        raise DataError(f"{path}: {unclear}")
    texts = [field.name for field in schema if _is_text(field.type)]
    columns = TableColumns.of(schema.names, path, record_reader, texts)
    for name in record_reader.columns(schema.names):
        kind = _type_of_values(schema.field(name).type)
        if str(kind) not in (*TEXTS, "null") and not _is_nested(kind):
            raise DataError(f"{path}: has no text but {kind} in column {name!r}; {record_reader.remedy(schema.names)}")
    return columns


def cells(column: Any) -> list[Any]:
    """Return the values of a column; texts as bytes, so that one that is not UTF-8 only damages its own record."""
    return (column.cast("large_binary") if _is_text(column.type) else column).to_pylist()


def _type_of_values(kind: Any) -> Any:
    """Return a type of Arrow, or of a dictionary the type of its values."""
    return getattr(kind, "value_type", kind) if str(kind).startswith("dictionary<") else kind


def _is_text(kind: Any) -> bool:
    return str(_type_of_values(kind)) in TEXTS


def row_document(
    record_reader: RecordParser, columns: TableColumns, values: Sequence[Any], location: str, short_location: str
) -> Document:
    try:
        texts = [decode_utf8(v, location, 0) if isinstance(v, bytes) else _with_tables(v) for v in values]
    except UnicodeDecodeError as error:
        raise DataError(f"{location}: a text is not UTF-8: {error.reason}; {REMEDY}") from None
    record = dict(zip(columns.looked_at, texts, strict=True))
    document = record_reader.document(record, location, short_location)
    return document._replace(unread=(*document.unread, *columns.unread))


def _with_tables(value: Any) -> Any:
    """Return a nested value with Arrow's maps, which are lists of pairs, as tables."""
    if isinstance(value, dict):
        return {key: _with_tables(inner) for key, inner in value.items()}
    if isinstance(value, list):
        is_map = bool(value) and all(isinstance(item, tuple) for item in value)
        return {key: _with_tables(v) for key, v in value} if is_map else [_with_tables(item) for item in value]
    return value


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
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            raise DataError(f"{location}: damaged: {error}; {REMEDY}") from None
        return row_document(self.record_reader, self._opened[1], values, location, f"{self.name}, row {index}")

    @property
    def _table(self) -> Any:
        return self._opened[0]

    @cached_property
    def _opened(self) -> tuple[Any, TableColumns]:
        """Return the table, reduced to the columns that are looked at, and its columns."""
        pyarrow = _pyarrow(self.path)
        try:
            require_file(self.path)
            mapped = pyarrow.memory_map(str(self.path))
            try:
                table = pyarrow.ipc.open_stream(mapped).read_all()
            except pyarrow.ArrowInvalid:
                table = pyarrow.ipc.open_file(mapped).read_all()
        except (pyarrow.ArrowException, OSError) as error:
            raise_if_of_the_machine(error, self.path, with_rights=False)
            raise DataError(
                f"{self.path}: damaged or truncated arrow file ({self.size} bytes): {error}; save it again"
            ) from None
        columns = record_columns(self.path, table.schema, self.record_reader)
        return table.select(columns.looked_at), columns

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the memory mapping; a worker process that is not forked opens its own."""
        return {name: value for name, value in self.__dict__.items() if name != "_opened"}


class CsvFile(Part):
    """Rows after a header line, read forward; quoted fields may hold line ends. The delimiter (comma, semicolon or tab)
    is detected from the header."""

    def __init__(self, path: Path, name: str, record_reader: RecordParser) -> None:
        self.path, self.name, self.record_reader, self.size = path, name, record_reader, path.stat().st_size
        if self.size:
            self._layout()

    def _layout(self) -> tuple[str, list[str], TableColumns]:
        """Return the delimiter, the names of the columns, and those that are looked at."""
        with open_file(self.path) as file:
            head = file.read(HEADER_BYTES).removeprefix(BOM_UTF8).decode(errors="surrogateescape")
        headers = self._headers(head)
        for sign, names in headers.items():
            if unclear := self.record_reader.ambiguity(names):
                raise DataError(f"{self.path}: {unclear}")
            if not self.record_reader.missing_field(names):
                return sign, names, TableColumns.of(names, self.path, self.record_reader)
        names = max(headers.values(), key=len)
        raise DataError(
            f"{self.path}: no field {self.record_reader.missing_field(names)} in its first line, which names "
            f"{', '.join(map(repr, names[:20]))}; {self.record_reader.remedy(names)}"
        )

    def _headers(self, head: str) -> dict[str, list[str]]:
        """Map each delimiter with which the first line can be read to the names that it then holds."""
        headers, reason = {}, ""
        for sign in DELIMITERS[self.path.suffix.lower()]:
            try:
                headers[sign] = next(csv.reader(StringIO(head, newline=""), delimiter=sign, strict=True), [])
                "".join(headers[sign]).encode()
            except UnicodeEncodeError:
                raise DataError(f"{self.path}: its first line is not UTF-8; convert it to UTF-8") from None
            except csv.Error as error:
                reason = reason or str(error)
        if not headers:
            raise DataError(f"{self.path}: its first line, the names of its fields, cannot be read: {reason}; {REMEDY}")
        return headers

    def read(self, start: int) -> Iterator[DocumentOrError]:
        if not self.size:
            return
        sign, names, columns = self._layout()
        csv.field_size_limit(MAX_RECORD_BYTES)  # a limit of the process; Python's default is 128 KiB
        row = 0
        try:
            with TextIOWrapper(open_file(self.path), encoding="utf-8-sig", newline="") as file:
                reader = csv.reader(file, delimiter=sign, strict=True)
                next(reader, None)
                for fields in reader:
                    if row >= start:
                        line = reader.line_num
                        yield document_or_error(self._document, fields, names, columns, row, line)
                    row += 1
        except (csv.Error, UnicodeDecodeError) as error:
            yield DataError(f"{self.path}, row {row}: cannot be read: {error}; {REMEDY}")

    def _document(self, fields: list[str], names: list[str], columns: TableColumns, row: int, line: int) -> Document:
        location, short_location = f"{self.path}, row {row}", f"{self.name}, row {row}"
        if not fields:
            return Document("", short_location, is_empty_line=True)
        check_row_length(len(fields), len(names), location, line, self.path)
        values = [fields[names.index(name)] for name in columns.looked_at]
        return row_document(self.record_reader, columns, values, location, short_location)


def check_row_length(fields: int, names: int, location: str, line: int, path: Path) -> None:
    """Raise DataError unless a row of a table of text has as many fields as the header has names."""
    if fields != names:
        remedy = "put a text with commas in quotation marks"
        remedy = "write a text without tabs" if path.suffix.lower() == ".tsv" else remedy
        raise DataError(f"{location}: {fields} values under a header of {names}, at line {line}; {remedy}, or {REMEDY}")


NESTED = ("list<", "large_list<", "fixed_size_list<", "list_view<", "large_list_view<", "struct<", "map<", "extension<")
"""Beginnings of the names of types that hold messages, tools or variables."""


def _is_nested(kind: Any) -> bool:
    return str(kind).startswith(NESTED)


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
        columns: TableColumns,
    ) -> None:
        self.path, self.name, self.number, self.first_row, self.size = path, name, number, first_row, rows
        self.record_reader, self.columns = record_reader, columns

    def read(self, start: int) -> Iterator[DocumentOrError]:
        parquet, errors = _parquet(self.path)
        row = self.first_row
        require_file(self.path)
        try:
            names = self.columns.looked_at
            with open_file(self.path) as content, parquet.ParquetFile(content) as file:
                for batch in file.iter_batches(1024, [self.number], names, use_threads=False):
                    for values in zip(*(cells(batch.column(name)) for name in names), strict=True):
                        if row - self.first_row >= start:
                            yield document_or_error(self._document, values, row)
                        row += 1
        except errors as error:
            raise_if_of_the_machine(error, self.path, with_rights=False)
            yield DataError(f"{self.path}, row {row}: cannot be read: {error}; {REMEDY}")

    def _document(self, values: Sequence[Any], row: int) -> Document:
        return row_document(
            self.record_reader, self.columns, values, f"{self.path}, row {row}", f"{self.name}, row {row}"
        )


def row_groups(path: Path, name: str, record_reader: RecordParser) -> list[Part]:
    parquet, errors = _parquet(path)
    require_file(path)
    try:
        with open_file(path) as content:
            meta = parquet.read_metadata(content)
        columns = record_columns(path, meta.schema.to_arrow_schema(), record_reader)
    except errors as error:
        raise_if_of_the_machine(error, path, with_rights=False)
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
    return pyarrow.parquet, (pyarrow.ArrowException, OSError, UnicodeDecodeError)


DATA_SUFFIXES = (".parquet", ".json", ".jsonl", ".gz", ".zst", ".csv", ".txt", ".arrow")
BATCH = 256


def c4(path: str | None, text_field: str) -> Source:
    return HubDataset("c4", path or "allenai/c4:en", "train", RecordReader(text_field))


def c4_validation(path: str | None, text_field: str) -> Source:
    return HubDataset("c4_validation", path or "allenai/c4:en", "validation", RecordReader(text_field))


def c4_test(path: str | None, text_field: str) -> Source:
    """Open the 2,000 test documents of PyTorch's torchtitan, which are not shipped here."""
    if path is None:
        raise DataError(
            "dataset c4_test is tests/assets/c4_test of PyTorch's torchtitan, which is not shipped here; set "
            'training.dataset_path to that folder, or training.dataset = "python_stdlib", which needs no file'
        )
    return HubDataset("c4_test", path, "train", RecordReader(text_field))


class HubDataset(SequentialSource):
    """A dataset of the hub. Nothing is fetched before `parts` is read."""

    packages = ("datasets",)

    def __init__(self, name: str, path: str, split: str, record_reader: RecordReader) -> None:
        self.path, _, self.configuration = (path, "", "") if os.path.isdir(path) else path.partition(":")
        self.split, self.record_reader = split, record_reader
        fingerprint: dict[str, Any] = {"dataset_path": path, "split": split} | record_reader.fingerprint
        if os.path.isdir(path):
            fingerprint |= files_fingerprint(find_files(path, DATA_SUFFIXES))
        elif path.startswith((".", "/", "~")):
            raise DataError(f"{path}: no such folder; give a folder of a dataset, or its name on the hub")
        super().__init__(f"{path} ({split})", fingerprint)

    def open(self) -> list[Part]:
        try:
            import datasets
        except ImportError:
            remedy = "install it with: pip install 'torchtitan-toml[data]'"
            raise DataError(f"{self.name}: reading it needs the package datasets; {remedy}") from None
        if int(datasets.__version__.split(".")[0]) < 4:
            remedy = "install 4.0 or later: pip install 'torchtitan-toml[data]'"
            raise DataError(f"datasets {datasets.__version__} would run code that comes with a dataset; {remedy}")
        try:
            dataset = datasets.load_dataset(
                str(Path(self.path)) if os.path.isdir(self.path) else self.path,
                self.configuration or None,
                split=self.split,
                streaming=True,
            )
            count = dataset.num_shards
        except Exception as error:  # network, unknown name or split, broken files: a wide family without a common base
            remedy = "check its name, its split and the network, or give a local folder as dataset_path"
            raise DataError(f"{self.name}: cannot be opened: {type(error).__name__}: {error}; {remedy}") from None
        self.fingerprint["shards"] = count
        return [HubShard(self.name, dataset.shard(count, i), i, self.record_reader) for i in range(count)]


class HubShard(Part):
    def __init__(self, source: str, dataset: Any, number: int, record_reader: RecordReader) -> None:
        self.name, self.dataset, self.record_reader = f"{source}, shard {number}", dataset, record_reader

    def read(self, start: int) -> Iterator[DocumentOrError]:
        row = start
        try:
            # In batches, because iterating over rows would split them among loader workers a second time.
            for batch in self.dataset.skip(start).iter(BATCH):
                problem = self.record_reader.missing_field(batch) or self.record_reader.ambiguity(batch)
                columns = TableColumns([*batch], ())
                if not problem:
                    columns = TableColumns.of([*batch], Path(self.name), self.record_reader)
                for values in zip(*(batch[name] for name in columns.looked_at), strict=True):
                    location = f"{self.name}, row {row}"
                    yield document_or_error(row_document, self.record_reader, columns, values, location, location)
                    row += 1
                    if problem:
                        return
        except Exception as error:  # a wide family of errors, as in open
            yield UnreachableData(f"{self.name}, row {row}: cannot be read: {type(error).__name__}: {error}; {REMEDY}")
