"""Hide options that have no valid value, so that a rule stops as soon as it reads one.

A mistake in one option then neither hides faults that do not depend on it nor causes faults that follow from it.
"""

import copy
from collections import defaultdict
from collections.abc import Collection, Iterator
from operator import attrgetter
from typing import Any

from torchtitan.config.job import JobConfig
from torchtitan.config.options import Fault


class UnknownValue(Exception):
    """A rule has read an option that has no valid value."""


def hide(config: JobConfig, keys: Collection[str]) -> JobConfig:
    """Return the job with these options hidden: reading one raises UnknownValue."""
    if not keys:
        return config
    config = copy.deepcopy(config)
    names: defaultdict[str, set[str]] = defaultdict(set)
    for key in keys:
        section, _, name = key.rpartition(".")
        names[section].add(name)
    for section, hidden in names.items():
        part = attrgetter(section)(config)
        part.__class__ = _hiding(type(part), frozenset(hidden))
    return config


def _hiding(section: type, hidden: frozenset[str]) -> type:
    def read(self: Any, name: str) -> Any:
        if name in hidden:
            raise UnknownValue(name)
        return object.__getattribute__(self, name)

    return type(section.__name__, (section,), {"__getattribute__": read})


def known_faults(faults: Iterator[Fault]) -> Iterator[Fault]:
    """Yield the faults that a rule finds before it reads an option without a valid value."""
    try:
        yield from faults
    except UnknownValue:
        return
