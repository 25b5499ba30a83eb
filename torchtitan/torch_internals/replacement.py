"""Replace functions of torch, in the one way that fails with a clear error where torch has changed."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def replace(owner: Any, name: str, value: Any) -> Any:
    """Set an attribute of a module, class or object of torch, and return what it was.

    A function has the parameters of the function or class that it replaces, by name and in order; *args and **kwargs
    stand for all that remain. Raises RuntimeError if torch has no such attribute, or one with other parameters.
    """
    if not hasattr(owner, name):
        raise RuntimeError(f"torch {torch.__version__} has no {_path(owner, name)}, which is to be replaced")
    before = inspect.getattr_static(owner, name) if inspect.isclass(owner) else getattr(owner, name)
    expected, actual = _signature(value), _signature(before)
    if expected is not None and actual is not None and not inspect.isclass(value) and not _fits(expected, actual):
        raise RuntimeError(
            f"torch {torch.__version__} has {_path(owner, name)}({', '.join(actual.parameters)}), and its replacement "
            f"was written for ({', '.join(expected.parameters)})"
        )
    setattr(owner, name, value)
    return before


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """Replace an attribute inside the block; yield what it was."""
    before = replace(owner, name, value)
    try:
        yield before
    finally:
        setattr(owner, name, before)


def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # no function, or one in C
        return None


def _fits(expected: inspect.Signature, actual: inspect.Signature) -> bool:
    positional, keywords, takes_any = _parameters(expected)
    actual_positional, actual_keywords, _ = _parameters(actual)
    if takes_any["*"]:
        actual_positional = actual_positional[: len(positional)]
    if takes_any["**"]:
        actual_keywords &= keywords
    return positional == actual_positional and keywords == actual_keywords


def _parameters(signature: inspect.Signature) -> tuple[list[str], set[str], dict[str, bool]]:
    """Return the names of parameters by position and by name only, and whether there are *args and **kwargs."""
    kinds = inspect.Parameter
    parameters = signature.parameters.values()
    return (
        [p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)],
        {p.name for p in parameters if p.kind is kinds.KEYWORD_ONLY},
        {"*": any(p.kind is kinds.VAR_POSITIONAL for p in parameters)}
        | {"**": any(p.kind is kinds.VAR_KEYWORD for p in parameters)},
    )


def _path(owner: Any, name: str) -> str:
    return f"{getattr(owner, '__qualname__', None) or getattr(owner, '__name__', type(owner).__qualname__)}.{name}"
