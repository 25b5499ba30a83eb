"""Where text comes from. Adding a dataset: a function (dataset_path, text_field) -> Source, and a line here."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torchtitan.datasets import (
    sources_huggingface,
    sources_pretokenized,
    sources_python,
    sources_sentiment,
    sources_text,
    tokens,
)
from torchtitan.datasets.labelled import Fields, labelled_files, saved
from torchtitan.datasets.reading import Reading
from torchtitan.datasets.sources import DataError, Source
from torchtitan.errors import JobError
from torchtitan.registration import Registry

_own: dict[str, Callable[[str | None, str], Source]] = {
    "python_stdlib": sources_python.python_stdlib,
    "python_stdlib_validation": sources_python.python_stdlib_validation,
    "text": sources_text.text,
    "sentiment": sources_sentiment.sentiment,
    "sentiment_validation": sources_sentiment.sentiment_validation,
    "tokens": tokens.tokens,
    "pretokenized": sources_pretokenized.pretokenized,
    "pretokenized_validation": sources_pretokenized.pretokenized_validation,
    "huggingface": sources_huggingface.huggingface,
    "huggingface_validation": sources_huggingface.huggingface_validation,
    "c4": sources_huggingface.c4,
    "c4_validation": sources_huggingface.c4_validation,
    "c4_test": sources_huggingface.c4_test,
}
RECORDS: dict[str, Callable[[str | None, Reading], Source]] = {
    "text": sources_text.text_files,
    "huggingface": lambda path, reading: sources_huggingface.named("huggingface", path, "train", reading),
    "huggingface_validation": lambda path, reading: sources_huggingface.named(
        "huggingface_validation", path, "validation", reading
    ),
}
"""Of those, what has records of several fields."""
LABELLED: dict[str, Callable[[str | None, Fields], Source]] = {
    "text": labelled_files,
    "huggingface": partial(saved, split="train"),
    "huggingface_validation": partial(saved, split="validation"),
    "sentiment": lambda path, fields: sources_sentiment.sentiment(path, fields.text, fields),
    "sentiment_validation": lambda path, fields: sources_sentiment.sentiment_validation(path, fields.text, fields),
}
"""Of those, what has records with classes, from local files."""
DATASETS: Registry[Callable[[str | None, str], Source]] = Registry("torchtitan.datasets", _own, Callable)


def open_source(dataset: str, dataset_path: str | None, reading: Reading, fields: Fields | None = None) -> Source:
    """Names and sizes are looked at, no more. Raises DataError, JobError for a dataset that is not there. `fields`: of
    records that have classes, which are read instead of text.
    """
    if dataset not in DATASETS:
        raise JobError(f"dataset is {dataset!r}; allowed: {', '.join(DATASETS)}")
    if fields is not None:
        if dataset not in LABELLED:
            raise DataError(f"dataset {dataset!r} has no classes; allowed: {', '.join(LABELLED)}")
        return LABELLED[dataset](dataset_path, replace(fields, text=reading.text_field))
    if dataset in RECORDS:
        return RECORDS[dataset](dataset_path, reading)
    return DATASETS[dataset](dataset_path, reading.text_field)
