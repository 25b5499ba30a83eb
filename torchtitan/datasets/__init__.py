"""Datasets by name. To add one, write a function that returns a Source and add a line to BUILT_IN."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torchtitan.core.errors import JobError
from torchtitan.core.registry import Registry
from torchtitan.datasets import labelled, token_shards
from torchtitan.datasets.record_format import LabelledFields, RecordReader
from torchtitan.datasets.sources import DataError, Source, files, pretokenized, tables
from torchtitan.datasets.sources.slices import select
from torchtitan.datasets.sources.tables import saved_split


class Dataset(NamedTuple):
    """The functions that open a dataset. They read only names and sizes; an entry point may provide only the first."""

    open_text: Callable[[str | None, str], Source]
    """Map (dataset_path, text_field) to a source of documents that have one text field or no fields."""
    open_records: Callable[[str | None, RecordReader], Source] | None = None
    """Map (dataset_path, record reader) to a source of records with several fields, in the format training.format."""
    open_labelled: Callable[[str | None, LabelledFields], Source] | None = None
    """Map (dataset_path, fields) to a source of labelled records in local files."""

    def __call__(self, path: str | None, text_field: str) -> Source:
        return self.open_text(path, text_field)


def open_hub_dataset(name: str, split: str, path: str | None, record_reader: RecordReader) -> Source:
    """Open a dataset of the Hugging Face hub, a local folder in its layout, or one that save_to_disk wrote."""
    if path is None:
        raise DataError(
            f"dataset {name} needs dataset_path: the name of a dataset on the hub (owner/name, or "
            "owner/name:configuration), a local folder of one, or one that save_to_disk wrote"
        )
    if os.path.isdir(path) and (folder := saved_split(path, split)):
        return files.open_text_files(folder, record_reader)
    return tables.HubDataset(name, path, split, record_reader)


def _hub_dataset(name: str, split: str) -> Dataset:
    open_records = partial(open_hub_dataset, name, split)
    return Dataset(
        lambda path, text_field: open_records(path, RecordReader(text_field)),
        open_records,
        partial(labelled.open_saved_dataset, split=split),
    )


def _generated(open_text: Callable[..., Source]) -> Dataset:
    return Dataset(open_text, open_labelled=lambda path, fields: open_text(path, fields.text, fields))


BUILT_IN = {
    "python_stdlib": Dataset(files.python_stdlib),
    "python_stdlib_validation": Dataset(files.python_stdlib_validation),
    "text": Dataset(files.text, files.open_text_files, labelled.open_labelled_files),
    "sentiment": _generated(labelled.sentiment),
    "sentiment_validation": _generated(labelled.sentiment_validation),
    "tokens": Dataset(token_shards.tokens),
    "pretokenized": Dataset(pretokenized.pretokenized),
    "pretokenized_validation": Dataset(pretokenized.pretokenized_validation),
    "huggingface": _hub_dataset("huggingface", "train"),
    "huggingface_validation": _hub_dataset("huggingface_validation", "validation"),
    "huggingface_test": _hub_dataset("huggingface_test", "test"),
    "c4": Dataset(tables.c4),
    "c4_validation": Dataset(tables.c4_validation),
    "c4_test": Dataset(tables.c4_test),
}
DATASETS: Registry[Dataset] = Registry(
    "torchtitan.datasets",
    BUILT_IN,
    Callable,
    lambda entry: entry if isinstance(entry, Dataset) else Dataset(entry),
)


def has_records(dataset: str) -> bool:
    """Return True if the records of this dataset can have several fields."""
    return dataset in DATASETS and DATASETS[dataset].open_records is not None


def open_source(
    dataset: str,
    dataset_path: str | None,
    record_reader: RecordReader,
    fields: LabelledFields | None = None,
    slices: str | None = None,
) -> Source:
    """Open a dataset, reading only names and sizes. `fields`: read labelled records instead of text.

    `slices`: the part of the records to read, see sources/slices.py. Raises DataError for unusable data, JobError for
    an unknown dataset.
    """
    if dataset not in DATASETS:
        raise JobError(f"dataset is {dataset!r}; allowed: {', '.join(DATASETS)}")
    source = _open_whole(DATASETS[dataset], dataset, dataset_path, record_reader, fields)
    return source if slices is None else select(source, slices)


def _open_whole(
    entry: Dataset, dataset: str, dataset_path: str | None, record_reader: RecordReader, fields: LabelledFields | None
) -> Source:
    if fields is not None:
        if entry.open_labelled is None:
            allowed = ", ".join(name for name, candidate in BUILT_IN.items() if candidate.open_labelled is not None)
            raise DataError(f"dataset {dataset!r} has no classes; allowed: {allowed}")
        return entry.open_labelled(dataset_path, replace(fields, text=record_reader.text_field))
    if entry.open_records is not None:
        return entry.open_records(dataset_path, record_reader)
    return entry(dataset_path, record_reader.text_field)
