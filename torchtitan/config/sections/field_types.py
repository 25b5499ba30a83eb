"""Types shared by the fields of several sections, with their ranges and allowed words."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field

from torchtitan.core.plugins import SECTIONS, plugin_entries

T = TypeVar("T")
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

Place = Annotated[str, AfterValidator(os.path.expanduser)]
"""Path of a file or a folder. A leading ~ is expanded here, so that readers need not do it."""
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
DegreeOrRest = Annotated[int, Field(ge=-1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Precision = Literal["float32", "bfloat16"]
PartOfRun = Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True)
class Form:
    """Describes the pattern of a text field for help and errors, which never show the regular expression."""

    description: str


@dataclass(frozen=True)
class NameIn:
    """Marks a text field that takes the names of a registry. Help and shell completion list them.

    `registry`: its module and name, as "torchtitan.optimizers:OPTIMIZERS", imported only when the names are listed.
    `more`: further allowed names.
    """

    registry: str
    more: tuple[str, ...] = ()

    def names(self) -> list[str]:
        return [*self.more, *resolve_name(self.registry)]


InEpochs = Annotated[str, Field(pattern=r"^(epoch|[1-9]\d{0,5}/epoch)$"), Form('"epoch" or "N/epoch", as "4/epoch"')]
Cadence = Positive | PartOfRun | InEpochs
"""Interval between events: a number of steps, a fraction of the run, or a number per epoch (core/cadence.py)."""

_NUMBER, _PERCENT = r"(-?\d{1,12})?", r"(-?(100|\d{1,2})%)?"
_SLICE = rf"\[({_NUMBER}:{_NUMBER}|{_PERCENT}:{_PERCENT})\]"
Slices = Annotated[
    str, Field(pattern=rf"^{_SLICE}(\+{_SLICE})*$"), Form('"[:100]", "[10%:20%]", or several: "[:5%]+[-5%:]"')
]
"""Parts of a source's records (datasets/sources/slices.py)."""

Dataset = Annotated[str, NameIn("torchtitan.datasets:DATASETS")]
RecordFormat = Annotated[str, NameIn("torchtitan.datasets.formats:FORMATS")]


def with_plugin_sections(section: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator that adds the options of plugins to a section, as nested sections with their defaults."""

    def add(options: type[T]) -> type[T]:
        for place, entry in plugin_entries(SECTIONS).items():
            outer, _, name = place.rpartition(".")
            if outer == section:
                options.__annotations__[name] = entry.load()
                setattr(options, name, field(default_factory=entry.load()))
        return options

    return add
