"""Text, ids or segments in a column of a table: .arrow files, as `datasets` saves and caches them, and .csv and .tsv.

Arrow files are mapped into memory and read in any order. What is in them is checked before it is touched, since the
reader trusts the offsets of a file.
"""

import csv
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtitan.datasets.records import document_of
from torchtitan.datasets.sources import (
    MAX_RECORD,
    REMEDY,
    DataError,
    Document,
    IndexedFile,
    Item,
    Part,
    decode,
    missing,
)

BESIDE_ARROW = ("state.json", "dataset_info.json", "dataset_dict.json")
"""What Dataset.save_to_disk writes beside the data. None of it is needed to read them."""
DELIMITERS = {".csv": ",;\t", ".tsv": "\t"}


def saved_split(folder: str, split: str) -> str | None:
    """The folder to read of one that Dataset.save_to_disk or DatasetDict.save_to_disk wrote; None for any other.
    DataError where that has not this split."""
    if Path(folder, "dataset_dict.json").is_file():
        try:
            splits = json.loads(Path(folder, "dataset_dict.json").read_bytes())["splits"]
            known = sorted(name for name in splits if Path(folder, name).name == name)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise DataError(f"{folder}: dataset_dict.json is damaged ({error}); save the dataset again") from None
        if split not in known:
            remedy = 'give the folder of one of them with dataset = "text"'
            raise DataError(f"{folder}: there is no split {split!r}, only {', '.join(known) or 'none'}; {remedy}")
        return str(Path(folder, split))
    return folder if all(Path(folder, name).is_file() for name in BESIDE_ARROW[:2]) else None


class ArrowFile(IndexedFile):
    def __init__(self, path: Path, name: str, field: str) -> None:
        super().__init__(path, name)
        self.field = field
        len(self)  # opens it, so that a wrong field is found at once

    def __len__(self) -> int:
        return len(self._column)

    def get(self, index: int) -> Document:
        pyarrow = _pyarrow(self.path)
        place = f"{self.path}, row {index}"
        try:
            cell = self._column.slice(index, 1)
            cell.validate(full=True)
            value = (cell if self._nested else cell.cast("large_binary")).to_pylist()[0]
        except pyarrow.ArrowException as error:
            raise DataError(f"{place}: damaged: {error}; {REMEDY}") from None
        content = decode(value, place, 0) if isinstance(value, bytes) else value
        return document_of(content, self.field, place, f"{self.name}, row {index}")

    @property
    def _nested(self) -> bool:
        """Whether the column holds lists, of ids or of segments."""
        return _is_list(self._column.type)

    @cached_property
    def _column(self) -> Any:
        pyarrow = _pyarrow(self.path)
        try:
            mapped = pyarrow.memory_map(str(self.path))
            try:
                table = pyarrow.ipc.open_stream(mapped).read_all()
            except pyarrow.ArrowInvalid:
                table = pyarrow.ipc.open_file(mapped).read_all()
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(
                f"{self.path}: damaged or truncated arrow file ({self.size} bytes): {error}; save it again"
            ) from None
        if self.field not in table.column_names or table.column_names.count(self.field) > 1:
            names = ", ".join(table.column_names)
            raise DataError(f"{self.path}: has no column {self.field!r}; its columns: {names}; set training.text_field")
        column = table.column(self.field)
        kind = column.type.value_type if pyarrow.types.is_dictionary(column.type) else column.type
        if str(kind) not in ("string", "large_string", "string_view", "binary", "large_binary") and not _is_list(kind):
            raise DataError(f"{self.path}: has no text but {kind} in column {self.field!r}; set training.text_field")
        return column

    def __getstate__(self) -> dict[str, Any]:
        """Without the mapping: a loader's worker, when it is started afresh, makes its own."""
        return {name: value for name, value in self.__dict__.items() if name != "_column"}


class CsvFile(Part):
    """Rows under a line of names, read forward; fields in quotes may hold line ends. Of comma, semicolon and tab, what
    separates the names separates the fields."""

    def __init__(self, path: Path, name: str, field: str) -> None:
        self.path, self.name, self.field, self.size = path, name, field, path.stat().st_size
        if self.size:
            self._layout()

    def _layout(self) -> tuple[str, int]:
        """The delimiter, and which column the field is."""
        try:
            with self.path.open("rb") as file:
                line = file.readline(2**16).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path}: its first line is not UTF-8 ({error}); convert it to UTF-8") from None
        headers = {sign: next(csv.reader([line], delimiter=sign), []) for sign in DELIMITERS[self.path.suffix.lower()]}
        for sign, names in headers.items():
            if self.field in names:
                return sign, names.index(self.field)
        names = max(headers.values(), key=len)
        raise DataError(
            f"{self.path}: no field {self.field!r} in its first line, which names {', '.join(map(repr, names[:20]))}; "
            "set training.text_field"
        )

    def read(self, start: int) -> Iterator[Item]:
        if not self.size:
            return
        sign, column = self._layout()
        csv.field_size_limit(MAX_RECORD)  # of the process; Python's own is 128 KiB
        row = 0
        try:
            with self.path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.reader(file, delimiter=sign, strict=True)
                next(reader, None)
                for fields in reader:
                    if row >= start:
                        yield self._item(fields, column, row)
                    row += 1
        except (csv.Error, UnicodeDecodeError) as error:
            yield DataError(f"{self.path}, row {row}: cannot be read: {error}; {REMEDY}")

    def _item(self, fields: list[str], column: int, row: int) -> Item:
        if column >= len(fields):
            if not fields:  # an empty line
                return Document("", f"{self.name}, row {row}")
            what = f"{len(fields)} fields, but {self.field!r} is the {column + 1}th"
            return DataError(f"{self.path}, row {row}: {what}; {REMEDY}")
        return Document(fields[column], f"{self.name}, row {row}")


def _is_list(kind: Any) -> bool:
    return str(kind).startswith(("list<", "large_list<", "fixed_size_list<"))


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise missing(path, "pyarrow") from None
    return pyarrow
