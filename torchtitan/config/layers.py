"""The options of one file or of the command line, by dotted name, their faults, and the file of chosen ones."""

import difflib
import json
import math
import os
import shlex
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import date, time
from typing import Any

import tomli_w
from pydantic import TypeAdapter, ValidationError

from torchtitan.config.changes import Moved, Removed, missing_dialect, old_section, renamed
from torchtitan.config.job import JobConfig
from torchtitan.config.options import (
    YES_OR_NO,
    Fault,
    Option,
    choices,
    columns,
    describe,
    fits,
    free_table,
    free_tables,
    hint,
    members,
    nearest,
    option_at,
    options,
    parse_value,
    sections,
    show,
)
from torchtitan.core.cadence import NO_LIMIT
from torchtitan.core.errors import JobError
from torchtitan.core.plugins import missing_plugin
from torchtitan.process.ranks import MEMORY_LIMIT

COMMAND_LINE = "command line"

OTHER_ENDS = ("training.epochs", "training.tokens")

_JOB = TypeAdapter(JobConfig)

Values = dict[str, Any]
"""Options by dotted name ("training.dataloader.num_workers"), as given."""


class Entries(dict[str, Any]):
    """Entries of a free table that are set one by one: other entries of earlier layers remain."""


def merged(parts: Iterable[Values]) -> Values:
    """Merge the values of several layers, in rising precedence."""
    values: Values = {}
    for part in parts:
        values |= {key: _onto(values.get(key), value) for key, value in part.items()}
    return values


def _onto(table: Any, value: Any) -> Any:
    if not isinstance(value, Entries) or not isinstance(table, dict):
        return value
    return table | {name: _onto(table.get(name), entry) for name, entry in value.items()}


def joined_entries(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield options unchanged, and the entries of each free table as one table."""
    tables: dict[str, Entries] = {}
    for key, value in pairs:
        if not (table := free_table(key)):
            yield key, value
            continue
        *path, last = key.removeprefix(f"{table}.").split(".")
        inner = tables.setdefault(table, Entries())
        for name in path:
            inner = inner.setdefault(name, Entries())
        inner[last] = value
    yield from tables.items()


@dataclass(frozen=True)
class Layer:
    """The options of one file or of the command line."""

    name: str
    values: Values
    faults: list[Fault]
    """Faults of values in neither of the other two."""
    old: Values
    """Options of older dialects, see changes.py."""

    def unknown(self, faults: Iterable[Fault]) -> set[str]:
        """Return the options that these faults of the layer leave without a value."""
        return {key for fault in faults for key in self._options_of(fault)}

    def _options_of(self, fault: Fault) -> Iterator[str]:
        key = option_at(fault.key)
        if key in ("", "extends", "job.config_file"):  # a file that cannot be read may set any option
            yield from options().keys() - self.values.keys() - {"job.config_file"}
        elif key in options():
            yield key
        else:
            prefix = fault.intended or key.rpartition(".")[0]
            yield from (option for option in options() if prefix and f"{option}.".startswith(f"{prefix}."))

    def all_faults(self) -> list[Fault]:
        """Return all faults, including wrong values and one for each option of an older dialect."""
        first = next((key for key in self.old if not isinstance(renamed(key), Removed)), None)
        old = (_old_fault(self.name, key, value, advise=key == first) for key, value in self.old.items())
        return [*self.faults, *_wrong_values(self.name, self.values), *old]


def assemble(values: Values, files: list[str]) -> JobConfig:
    """Build the job from values without faults."""
    if "training.steps" not in values and any(values.get(key) is not None for key in OTHER_ENDS):
        values = {**values, "training.steps": NO_LIMIT}
    printable = [file.encode("utf-8", "backslashreplace").decode() for file in files]  # names may not be UTF-8
    return _JOB.validate_json(json.dumps(nest({**values, "job.config_file": printable})))


def nest(values: Values) -> dict[str, Any]:
    """Convert dotted names to nested tables."""
    tables: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
    return tables


def walk(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of a nested table, down to options or unknown names."""
    for key, value in table.items():
        name = prefix + (show(key) if "." in key else key)  # a quoted "a.b" is one key, not an option
        inner = name in sections() or (name not in options() and not renamed(name) and old_section(name))
        if inner and isinstance(value, dict):
            yield from walk(value, name + ".")
        else:
            yield name, value


def layer_of(name: str, pairs: Iterable[tuple[str, Any]]) -> Layer:
    """Sort (dotted name, value) pairs into current options, options of older dialects, and faults."""
    values: Values = {}
    old: Values = {}
    faults: list[Fault] = []
    for key, value in pairs:
        if key == "job.config_file" and name != COMMAND_LINE:
            faults.append(Fault(name, key, show(value), "the command line only", 'in a file, write extends = "..."'))
        elif key in options():
            fault = _unusual(name, key, value)
            faults += [fault] if fault else []
            values |= {} if fault else {key: value}
        elif renamed(key):
            old[key] = value
        elif remedy := missing_plugin(key):  # runs record the options of plugins that they do not use
            faults += [Fault(name, key, show(value), "a known option", remedy)] if name == COMMAND_LINE else []
        else:
            faults.append(_unknown(name, key, value))
    unknown = next((number for number, fault in enumerate(faults) if fault.key not in options()), None)
    if name != COMMAND_LINE and unknown is not None and (remedy := missing_dialect()):
        parts = filter(None, (faults[unknown].remedy, remedy))
        faults[unknown] = replace(faults[unknown], remedy="; ".join(parts))
    return Layer(name, values, faults, old)


def of_environment() -> list[Layer]:
    """Return the options that launch scripts set in the environment. They take precedence, and the run logs them."""
    text = os.environ.get(MEMORY_LIMIT, "").strip()
    return [layer_of(f"{MEMORY_LIMIT} in the environment", [("memory.limit", number_of(text))])] if text else []


def number_of(text: str) -> int | float | str:
    """Parse a memory limit: whole numbers above 1 as int, other numbers as float. Other text is unchanged."""
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number > 1 and number.is_integer() else number


# Faults


def _old_fault(name: str, key: str, value: Any, advise: bool) -> Fault:
    """Return the fault of an option of an older dialect. `advise`: mention that the file can be translated."""
    rename = renamed(key)
    if isinstance(rename, Removed):
        return Fault(name, key, show(value), f"no such option here ({rename.reason})", "leave it out")
    assert rename is not None
    translate = (
        "" if name == COMMAND_LINE or not advise else f", or let `torchtitan check {name} --upgrade` translate the file"
    )
    remedy = _write_today(rename, value, name == COMMAND_LINE) + translate
    return Fault(name, key, show(value), f"{rename.to}, where it has moved", remedy)


def _write_today(rename: Moved, value: Any, in_shell: bool) -> str:
    """Return what to write for an option that has moved: its new name, and the value converted for it.

    Text on a command line, or in quotes, may be meant as a number or a flag.
    """
    annotation = options()[rename.to].annotation
    if value is None:
        return f"write --{rename.to} VALUE"
    meanings = [value, parse_value(int | float | bool, value)] if isinstance(value, str) else [value]
    try:
        for new in map(rename.translate, meanings):
            if new is None:
                return "leave it out"
            if fits(annotation, new):
                quoted = shlex.quote(new if isinstance(new, str) else show(new))
                return f"write --{rename.to}={quoted}" if in_shell else f"write {rename.to} = {show(new)}"
    except JobError as error:
        return str(error)
    return f"write {'--' * in_shell}{rename.to}, {describe(annotation)}"


def _unknown(name: str, key: str, value: Any) -> Fault:
    if key in sections():
        return Fault(name, key, show(value), f"a table: [{key}] and options under it", "")
    if isinstance(value, dict) and not key.rpartition(".")[0]:
        section_names = {section for section in sections() if "." not in section}
        remedy = hint(key, section_names) or "sections are " + ", ".join(sorted(section_names))
        return Fault(name, key, f"the section [{key}]", "a section of the job", remedy, nearest(key, section_names))
    stem = ".".join(key.split(".")[:2])
    if stem not in options() and key != stem and (table := nearest(stem, free_tables(), 0.8)):
        remedy = f"did you mean {table}{key.removeprefix(stem)}?"
        return Fault(name, key, show(value), "a known option", remedy, table)
    section, _, last = key.rpartition(".")
    siblings = {k[len(section) + 1 :].split(".")[0] for k in options() if k.startswith(f"{section}.")}
    elsewhere = [section_names for section_names in options() if section_names.rpartition(".")[2] == last]
    depth = min(
        (section_names.count(".") for section_names in elsewhere), default=0
    )  # prefer lr_scheduler's warmup to an adapter's
    elsewhere = [section_names for section_names in elsewhere if section_names.count(".") == depth]
    if close := difflib.get_close_matches(last, siblings, n=1, cutoff=0.75):
        remedy, intended = f"did you mean {section}.{close[0]}?", f"{section}.{close[0]}"
    elif name == COMMAND_LINE and (close := _flags_like(section, last)):
        remedy, intended = f"did you mean {section}.no_{close[0]}?", f"{section}.{close[0]}"
    else:  # the right key in the wrong section, or a slip in the section's name
        intended = nearest(key, elsewhere, 0 if len(elsewhere) == 1 or not section else 0.6)
        intended = intended or ("" if section in sections() else nearest(key, options(), 0.7))
        remedy = f"did you mean {intended}?" if intended else "`torchtitan check --help-config` lists them"
    return Fault(name, key, show(value), "a known option", remedy, intended)


def _flags_like(section: str, last: str) -> list[str]:
    """Return the flag of a section that a misspelled `no_flag` on the command line may be meant to turn off."""
    keys = (key for key, option in options().items() if members(option.annotation) == [bool])
    flags = [key.removeprefix(f"{section}.") for key in keys if key.startswith(f"{section}.")]
    return difflib.get_close_matches(last[3:], flags, n=1, cutoff=0.75) if last.startswith("no_") else []


def _unusual(name: str, key: str, value: Any) -> Fault | None:
    """Return the fault of a TOML value that JSON cannot represent; options are validated as JSON."""
    allowed = describe(options()[key].annotation)
    for leaf in _scalars(value):
        if isinstance(leaf, (date, time)):
            return Fault(name, key, f"a date or time, {leaf}", allowed, "quote it if it is meant as text")
        if isinstance(leaf, float) and not math.isfinite(leaf):
            return Fault(name, key, str(leaf), allowed, "the number must be finite")
        if isinstance(leaf, int) and abs(leaf) >= 2**63:
            return Fault(name, key, "a number of more than 63 bits", allowed, "")
        if isinstance(leaf, str) and any("\ud800" <= c <= "\udfff" for c in leaf):
            return Fault(name, key, show(leaf), allowed, "the text must be UTF-8")
        if isinstance(leaf, str) and "\0" in leaf:  # no file name can contain it, and no other option needs it
            return Fault(name, key, show(leaf), allowed, "the text must not have NUL characters (\\u0000) in it")
    return None


def _wrong_values(name: str, values: Values) -> Iterator[Fault]:
    try:
        _JOB.validate_json(json.dumps(nest(values)))
    except ValidationError as error:
        for key, *location in dict.fromkeys(_place(fault["loc"]) for fault in error.errors()):
            if location:
                number, column = location
                yield _wrong_table(name, key, number, column, values[key])
            else:
                option, value = options()[key], values[key]
                yield Fault(name, key, show(value), describe(option.annotation), _remedy(option, value, key))


def _place(location: tuple[int | str, ...]) -> tuple[Any, ...]:
    """Return the option of a fault; for a list of tables also the table's number and the option in the table."""
    key, remaining = _known_start(location, options())
    assert key, f"a fault outside every option: {location}"
    if not columns(key) or len(remaining) < 2:
        return (key,)
    column, _ = _known_start(remaining[1:], columns(key))
    return key, remaining[0], column or ".".join(map(str, remaining[1:]))


def _known_start(location: tuple[int | str, ...], names: Collection[str]) -> tuple[str, tuple[int | str, ...]]:
    """Return the name with which a location begins, and the parts after it."""
    prefixes = (".".join(map(str, location[:depth])) for depth in range(1, len(location) + 1))
    name = next((prefix for prefix in prefixes if prefix in names), "")
    return name, location[name.count(".") + 1 :]


def _wrong_table(name: str, key: str, number: int, column: str, tables: list[Any]) -> Fault:
    """Return the fault in one of a list of tables: an unknown or missing option, or a wrong value."""
    location, option = f"{key}[{number}].{column}", columns(key).get(column)
    value: Any = tables[number]
    for part in column.split("."):
        value = value.get(part) if isinstance(value, dict) else value
    if option is None:
        remedy = hint(column, columns(key)) or f"there are {', '.join(columns(key))}"
        return Fault(name, location, show(value), f"a known option of [[{key}]]", remedy)
    remedy = f"every [[{key}]] needs it" if value is None else _remedy(option, value)
    return Fault(name, location, show(value), describe(option.annotation), remedy)


def _remedy(option: Option, value: Any, key: str = "") -> str:
    if key and columns(key):
        return f"write [[{key}]] for each in a file, or '[{{...}}, {{...}}]' on the command line"
    if isinstance(value, float) and value.is_integer() and "whole number" in describe(option.annotation):
        return f"write {int(value)}"
    if members(option.annotation) == [bool] and str(value).lower() in YES_OR_NO:
        return f"write {show(YES_OR_NO[str(value).lower()])}"
    if isinstance(value, str):
        if close := hint(value, choices(option.annotation), quote=True):
            return close
        parsed = parse_value(int | float | bool, value)
        if not isinstance(parsed, str) and fits(option.annotation, parsed):
            return f"write {show(parsed)}, without quotes"
    return f"help: {' '.join(option.help.split())}"


def _scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _scalars(inner)
    else:
        yield value


@dataclass
class Comments:
    """The comments of a file: at its head, and above or next to a section or option (by today's name)."""

    head: list[str] = field(default_factory=list)
    above: dict[str, list[str]] = field(default_factory=dict)
    inline: dict[str, str] = field(default_factory=dict)

    def without_option(self, translated: set[str]) -> list[str]:
        """Return the comments of options that were not translated, each followed by the option's name."""
        lines = [
            f"{line}  [{name}]"
            for name, lines in self.above.items()
            if name not in translated
            for line in lines
            if name
        ]
        return lines + [f"{line}  [{name}]" for name, line in self.inline.items() if name not in translated]


def _is_table(value: Any) -> bool:
    """Return True for a table or a list with tables."""
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value))


def as_file(head: list[str], values: Values, comments: Comments | None = None) -> str:
    """Format options by section in their usual order, with `head` above them and comments where they were."""
    comments = comments or Comments()
    ordered = {key: values[key] for key in options() if key in values}
    sections = dict.fromkeys(key.rpartition(".")[0] for key in ordered)
    lines = [*comments.head, *(f"# {line}" for line in head), *comments.without_option({*ordered, *sections})]
    for section in sections:
        comment = comments.inline.get(section, "")
        lines += ["", *comments.above.get(section, []), f"[{section}]  {comment}".rstrip()]
        of_section = {key: value for key, value in ordered.items() if key.rpartition(".")[0] == section}
        for key, value in sorted(of_section.items(), key=lambda pair: _is_table(pair[1])):
            lines += comments.above.get(key, [])
            if _is_table(value):  # a separate table, after the plain values
                lines += _tables(key, value)
            else:
                text = tomli_w.dumps({key.rpartition(".")[2]: value}).rstrip()
                lines += [f"{text}  {comments.inline.get(key, '')}".rstrip()]
    return "\n".join([*lines, *comments.above.get("", [])])


def _tables(key: str, value: Any) -> list[str]:
    """Format a table, or a list of tables with a header each.

    As one line of its section the list would need that section open, and another table may have ended it.
    """
    if isinstance(value, dict):
        return ["", tomli_w.dumps(nest({key: value})).rstrip()]
    texts = (tomli_w.dumps(nest({key: item})).rstrip().removeprefix(f"[{key}]\n") for item in value)
    return [line for text in texts for line in ("", f"[[{key}]]", text)]
