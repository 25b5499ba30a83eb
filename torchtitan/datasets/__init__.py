"""Where text comes from. Adding a dataset: a function (dataset_path, text_field) -> Source, and a line here."""

from collections.abc import Callable

from torchtitan.datasets import sources_huggingface, sources_pretokenized, sources_python, sources_text, tokens
from torchtitan.datasets.sources import Source
from torchtitan.errors import JobError
from torchtitan.registration import Registry

_own: dict[str, Callable[[str | None, str], Source]] = {
    "python_stdlib": sources_python.python_stdlib,
    "python_stdlib_validation": sources_python.python_stdlib_validation,
    "text": sources_text.text,
    "tokens": tokens.tokens,
    "pretokenized": sources_pretokenized.pretokenized,
    "pretokenized_validation": sources_pretokenized.pretokenized_validation,
    "huggingface": sources_huggingface.huggingface,
    "huggingface_validation": sources_huggingface.huggingface_validation,
    "c4": sources_huggingface.c4,
    "c4_validation": sources_huggingface.c4_validation,
    "c4_test": sources_huggingface.c4_test,
}
DATASETS: Registry[Callable[[str | None, str], Source]] = Registry("torchtitan.datasets", _own, Callable)


def open_source(dataset: str, dataset_path: str | None, text_field: str) -> Source:
    """Names and sizes are looked at, no more. Raises DataError, JobError for a dataset that is not there."""
    if dataset not in DATASETS:
        raise JobError(f"dataset is {dataset!r}; allowed: {', '.join(DATASETS)}")
    return DATASETS[dataset](dataset_path, text_field)
