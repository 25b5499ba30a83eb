"""The sizes of a model with the overrides of a job, each judged by itself and then all together."""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan.config.options import describe, fits, hint, show
from torchtitan.core.errors import JobError, LimitError
from torchtitan.models import FAMILIES, apply_overrides, table_type
from torchtitan.models.family import Family

KEY = "model.overrides"
MOST_FAMILIES = 8
"""Most families to name in an error."""


def checked_sizes(name: str, sizes: Any, overrides: Mapping[str, Any]) -> Any:
    """Return the sizes of family `name` with these overrides. Raises LimitError for the first that is wrong, or if all
    do not fit together.
    """
    if error := next(wrong_overrides(name, sizes, overrides), None):
        raise error
    try:
        args = apply_overrides(sizes, overrides)
        if args.num_parameters:
            return args
    except JobError as error:
        raise LimitError(KEY, show(overrides), f"sizes that fit together: {error}", "") from None
    except OverflowError:  # an infinite width
        pass
    raise LimitError(KEY, show(overrides), "possible sizes of a model", "")


def wrong_overrides(name: str, sizes: Any, overrides: Mapping[str, Any]) -> Iterator[LimitError]:
    """Yield an error for each override that is unknown to family `name` or of a wrong type or range."""
    hints, zero = typing.get_type_hints(type(sizes)), getattr(sizes, "may_be_zero", ())
    types = {field.name: hints[field.name] for field in dataclasses.fields(sizes)}
    for field, value in overrides.items():
        setting = f"{field} = {show(value)}"
        if field not in types:
            yield LimitError(
                KEY, field, f"sizes of {name}: {', '.join(types)}", _families_with(field) or hint(field, types)
            )
        elif table := table_type(type(sizes), field):
            yield from _wrong_parts(field, table, value)
        elif not fits(types[field], value):
            yield LimitError(KEY, setting, f"{field} = {describe(types[field])}", "")
        elif isinstance(value, str):
            continue
        elif value < 0 or value == 0 and value is not False and field not in zero:
            yield LimitError(KEY, setting, f"{field} >= 0" if field in zero else f"{field} > 0", "")


def _families_with(size: str) -> str:
    """Return which families have this size, or an empty text if none has it."""
    families = [name for name, family in FAMILIES.items() if size in _names_of_sizes(family)]
    more = f" and {len(families) - MOST_FAMILIES} more" if len(families) > MOST_FAMILIES else ""
    return f"{size} is a size of {', '.join(families[:MOST_FAMILIES])}{more}" if families else ""


def _names_of_sizes(family: Family) -> list[str]:
    return [field.name for field in dataclasses.fields(next(iter(family.sizes.values())))]


def _wrong_parts(name: str, table: type, value: Any) -> Iterator[LimitError]:
    """Yield the errors of an override that must be a table of positive numbers, or false."""
    hints = typing.get_type_hints(table)
    # a job has no lists of numbers: a folder's config.json has them
    part_names = [part.name for part in dataclasses.fields(table) if typing.get_origin(hints[part.name]) is not tuple]
    parts = value if isinstance(value, dict) else {}
    if value is not False and not isinstance(value, dict):
        allowed = f"{name} = false, or a table of {', '.join(part_names)}"
        yield LimitError(KEY, f"{name} = {show(value)}", allowed, "")
    for part, number in parts.items():
        setting = f"{name} = {{{part} = {show(number)}}}"
        if part not in part_names:
            yield LimitError(
                KEY, f"{name} = {{{part}}}", f"parts of {name}: {', '.join(part_names)}", hint(part, part_names)
            )
        elif not fits(hints[part], number):
            yield LimitError(KEY, setting, f"{name} = {{{part} = {describe(hints[part])}}}", "")
        elif not isinstance(number, str) and number <= 0:
            yield LimitError(KEY, setting, f"{name} = {{{part} > 0}}", "")
