"""Where text comes from. Adding a dataset: a function (dataset_path, text_field) -> Source, and a line here."""

from collections.abc import Callable

from torchtitan.datasets import sources_huggingface, sources_python, sources_text, tokens
from torchtitan.datasets.sources import Source

DATASETS: dict[str, Callable[[str | None, str], Source]] = {
    "python_stdlib": sources_python.python_stdlib,
    "python_stdlib_validation": sources_python.python_stdlib_validation,
    "text": sources_text.text,
    "tokens": tokens.tokens,
    "huggingface": sources_huggingface.huggingface,
    "huggingface_validation": sources_huggingface.huggingface_validation,
    "c4": sources_huggingface.c4,
    "c4_validation": sources_huggingface.c4_validation,
    "c4_test": sources_huggingface.c4_test,
}
