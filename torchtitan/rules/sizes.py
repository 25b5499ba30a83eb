"""What is wrong with a model's sizes that a job overrides, told before a model is made of them."""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan.config.options import describe, fits, hint, show
from torchtitan.models import table_of


def wrong_overrides(name: str, sizes: Any, overrides: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(allowed, remedy, given) of each override that is no size of family `name`, or of another type or range."""
    hints, zero = typing.get_type_hints(type(sizes)), getattr(sizes, "may_be_zero", ())
    types = {field.name: hints[field.name] for field in dataclasses.fields(sizes)}
    for field, value in overrides.items():
        given = f"{field} = {show(value)}"
        if field not in types:
            yield f"sizes of {name}: {', '.join(types)}", hint(field, types), field
        elif table := table_of(type(sizes), field):
            yield from _wrong_parts(field, table, value)
        elif not fits(types[field], value):
            yield f"{field} = {describe(types[field])}", "", given
        elif isinstance(value, str):
            continue
        elif value < 0 or value == 0 and value is not False and field not in zero:
            yield (f"{field} >= 0" if field in zero else f"{field} > 0"), "", given


def _wrong_parts(name: str, table: type, value: Any) -> Iterator[tuple[str, str, str]]:
    """Of a size that is a table of positive numbers, or false."""
    hints = typing.get_type_hints(table)
    known = [field.name for field in dataclasses.fields(table)]
    parts = value if isinstance(value, dict) else {}
    if value is not False and not isinstance(value, dict):
        yield f"{name} = false, or a table of {', '.join(known)}", "", f"{name} = {show(value)}"
    for part, number in parts.items():
        if part not in known:
            yield f"parts of {name}: {', '.join(known)}", hint(part, known), f"{name} = {{{part}}}"
        elif not fits(hints[part], number):
            allowed = f"{name} = {{{part} = {describe(hints[part])}}}"
            yield allowed, "", f"{name} = {{{part} = {show(number)}}}"
        elif not isinstance(number, str) and number <= 0:
            yield f"{name} = {{{part} > 0}}", "", f"{name} = {{{part} = {show(number)}}}"
