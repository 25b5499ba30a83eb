"""Where text comes from. Adding a dataset: a file that makes a Source, and a line here."""

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
    """What a dataset's name stands for: functions that look at names and sizes, no more. An entry point may lead to the
    first of them alone.
    """

    of_field: Callable[[str | None, str], Source]
    """(dataset_path, text_field): of documents that are said by one field, or by nothing."""
    of_records: Callable[[str | None, Reading], Source] | None = None
    """Of records of several fields, in whatever way the job reads them (training.format)."""
    of_classes: Callable[[str | None, Fields], Source] | None = None
    """Of records with classes, from local files."""

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
    """Whether that is a dataset whose records can be of several fields."""
    return dataset in DATASETS and DATASETS[dataset].of_records is not None


def open_source(dataset: str, dataset_path: str | None, reading: Reading, fields: Fields | None = None) -> Source:
    """Names and sizes are looked at, no more. Raises DataError, JobError for a dataset that is not there. `fields`: of
    records that have classes, which are read instead of text.
    """
    if dataset not in DATASETS:
        raise JobError(f"dataset is {dataset!r}; allowed: {', '.join(DATASETS)}")
    known = DATASETS[dataset]
    if fields is not None:
        if known.of_classes is None:
            allowed = ", ".join(name for name, each in _own.items() if each.of_classes is not None)
            raise DataError(f"dataset {dataset!r} has no classes; allowed: {allowed}")
        return known.of_classes(dataset_path, replace(fields, text=reading.text_field))
    if known.of_records is not None:
        return known.of_records(dataset_path, reading)
    return known(dataset_path, reading.text_field)
