"""Options of other dialects of a job, which plugins and installed packages know.

Needed in every parse: a name that is no option of today may be one that has moved, and a flag by its older name takes
no value on the command line.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.core.plugins import DIALECTS, missing_plugin
from torchtitan.core.registry import Registry

OLDER_TORCHTITAN = "older_torchtitan"


@dataclass(frozen=True)
class Moved:
    to: str
    translate: Callable[[Any], Any] = lambda value: value
    """Old value to new. Raises JobError with the way out where that takes a person."""


@dataclass(frozen=True)
class Removed:
    reason: str
    harmless: tuple[Any, ...] | None = ()
    """Values at which the option changed nothing, so that a translation may leave it out; None: any value."""


@dataclass(frozen=True)
class Dialect:
    """Options that another dialect had, by dotted name. `advice`: on a model's name in today's job; "" without any."""

    options: Mapping[str, Moved | Removed]
    advice: Callable[[str], str]


_DIALECTS: Registry[Dialect] = Registry(DIALECTS, {}, Dialect)


def renamed(key: str) -> Moved | Removed | None:
    return next((dialect.options[key] for dialect in _DIALECTS.values() if key in dialect.options), None)


def old_section(name: str) -> bool:
    """Return True if another dialect has options in this section."""
    return any(key.startswith(f"{name}.") for dialect in _DIALECTS.values() for key in dialect.options)


def advice(model: str) -> str:
    """Return advice on a model's name of another dialect in a current job; empty for other names."""
    return next(filter(None, (dialect.advice(model) for dialect in _DIALECTS.values())), "")


def missing_dialect() -> str:
    """Return a remedy for unknown options where the plugin that knows older ones is missing; empty where it is not."""
    remedy = missing_plugin(OLDER_TORCHTITAN)
    return remedy and f"if this is a job of PyTorch's torchtitan, {remedy}"
