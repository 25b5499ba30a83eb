"""The datasets. To add one, write a file that returns a Source and add a line here."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torchtitan.core.errors import JobError
from torchtitan.core.registry import Registry
from torchtitan.datasets import (
    sources_huggingface,
    sources_pretokenized,
    sources_python,
    sources_sentiment,
    sources_text,
    tokens,
)
from torchtitan.datasets.labelled import Fields, labelled_files, saved
from torchtitan.datasets.record_format import Reading
from torchtitan.datasets.sources import DataError, Source


class Dataset(NamedTuple):
    """The functions that open a dataset; they read only names and sizes. An entry point may provide only `of_field`."""

    of_field: Callable[[str | None, str], Source]
    """(dataset_path, text_field) -> a source of documents with one text field, or without fields."""
    of_records: Callable[[str | None, Reading], Source] | None = None
    """(dataset_path, reading) -> a source of records with several fields, read as training.format says."""
    of_classes: Callable[[str | None, Fields], Source] | None = None
    """(dataset_path, fields) -> a source of labelled records from local files."""

    def __call__(self, path: str | None, text_field: str) -> Source:
        return self.of_field(path, text_field)


def _hub(name: str, split: str, of_field: Callable[[str | None, str], Source]) -> Dataset:
    return Dataset(
        of_field,
        lambda path, reading: sources_huggingface.named(name, path, split, reading),
        partial(saved, split=split),
    )


def _made(of_field: Callable[..., Source]) -> Dataset:
    return Dataset(of_field, of_classes=lambda path, fields: of_field(path, fields.text, fields))


_own = {
    "python_stdlib": Dataset(sources_python.python_stdlib),
    "python_stdlib_validation": Dataset(sources_python.python_stdlib_validation),
    "text": Dataset(sources_text.text, sources_text.text_files, labelled_files),
    "sentiment": _made(sources_sentiment.sentiment),
    "sentiment_validation": _made(sources_sentiment.sentiment_validation),
    "tokens": Dataset(tokens.tokens),
    "pretokenized": Dataset(sources_pretokenized.pretokenized),
    "pretokenized_validation": Dataset(sources_pretokenized.pretokenized_validation),
    "huggingface": _hub("huggingface", "train", sources_huggingface.huggingface),
    "huggingface_validation": _hub("huggingface_validation", "validation", sources_huggingface.huggingface_validation),
    "c4": Dataset(sources_huggingface.c4),
    "c4_validation": Dataset(sources_huggingface.c4_validation),
    "c4_test": Dataset(sources_huggingface.c4_test),
}
DATASETS: Registry[Dataset] = Registry(
    "torchtitan.datasets",
    _own,
    Callable,
    lambda found: found if isinstance(found, Dataset) else Dataset(found),
)


def has_records(dataset: str) -> bool:
    """Return True if the records of this dataset can have several fields."""
    return dataset in DATASETS and DATASETS[dataset].of_records is not None


def open_source(dataset: str, dataset_path: str | None, reading: Reading, fields: Fields | None = None) -> Source:
    """Open a dataset, reading only names and sizes. `fields`: read labelled records instead of text.

    Raises DataError for unusable data, JobError for an unknown dataset.
    """
    if dataset not in DATASETS:
        raise JobError(f"dataset is {dataset!r}; allowed: {', '.join(DATASETS)}")
    entry = DATASETS[dataset]
    if fields is not None:
        if entry.of_classes is None:
            allowed = ", ".join(name for name, candidate in _own.items() if candidate.of_classes is not None)
            raise DataError(f"dataset {dataset!r} has no classes; allowed: {allowed}")
        return entry.of_classes(dataset_path, replace(fields, text=reading.text_field))
    if entry.of_records is not None:
        return entry.of_records(dataset_path, reading)
    return entry(dataset_path, reading.text_field)
