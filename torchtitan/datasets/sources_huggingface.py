"""Datasets of the Hugging Face hub, streamed, and local folders in its layout or saved by the package `datasets`. A
dataset's code never runs."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.sources import (
    REMEDY,
    DataError,
    DocumentOrError,
    Part,
    SequentialSource,
    Source,
    UnreachableData,
    document_or_error,
    files_fingerprint,
    find_files,
)
from torchtitan.datasets.sources_tables import TableColumns, row_document

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
