"""The options of a job by dotted name: descriptions of their types, their help, and faults of wrong values.

All of it is read off the dataclasses of config/sections/ (the string under a field is its help), so a new option needs
nothing here. Needs no torch.
"""

import difflib
import json
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache
from textwrap import wrap
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import PydanticUndefined

from torchtitan.config.job import JobConfig, as_dict
from torchtitan.config.sections.field_types import Form, NameIn
from torchtitan.core.errors import JobError
from torchtitan.core.registry import Option as Option

YES_OR_NO = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
"""What people write for a flag. All but true and false are refused, by what to write."""


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a job. Empty parts are left out of the line."""

    file: str
    key: str
    value: str
    allowed: str
    remedy: str
    intended: str = ""
    """The option or section closest to `key`, if `key` is not an option."""

    def __str__(self) -> str:
        parts = [f"given {self.value}" * bool(self.value), f"allowed: {self.allowed}" * bool(self.allowed), self.remedy]
        line = ": ".join(filter(None, (self.file, self.key, "; ".join(filter(None, parts)))))
        # one fault is one line, and control characters of a file never reach a terminal
        return line if line.isprintable() else line.encode("unicode_escape").decode()


class ConfigError(JobError):
    """All faults of a job, one line each.

    `remaining_config`: the job without the faulty values, if that is a valid job. `unknown`: options without a valid
    value.
    """

    def __init__(
        self, faults: Iterable[Fault], remaining_config: JobConfig | None = None, unknown: Collection[str] = frozenset()
    ) -> None:
        self.faults = list(dict.fromkeys(faults))
        self.rest, self.unknown = remaining_config, unknown
        super().__init__("\n".join(map(str, self.faults)))


@cache
def options() -> dict[str, Option]:
    """Return every option of the job by its dotted name, in the order of the sections in job.py."""
    return dict(options_of(JobConfig, ""))


@cache
def columns(option: str) -> dict[str, Option]:
    """Return the options of each table of an option that is a list of tables; none for any other option."""
    kinds = [get_args(kind)[0] for kind in members(options()[option].annotation) if get_origin(kind) is list]
    return {key: column for kind in kinds if is_dataclass(kind) for key, column in options_of(kind, "")}


@cache
def free_tables() -> dict[str, Any]:
    """Return the options that are tables with entries of any name, and the type of their values."""
    tables = {key: kind for key, option in options().items() for kind in members(option.annotation)}
    return {key: get_args(kind)[1] for key, kind in tables.items() if get_origin(kind) is dict}


def free_table(key: str) -> str:
    """Return the free table of an entry ("optimizer.options" for "optimizer.options.rank"), or an empty text."""
    return next((table for table in free_tables() if key.startswith(f"{table}.")), "")


def option_at(place: str) -> str:
    """Return the option of a fault's key: "training.sources" for "training.sources[0].weight"."""
    return place.partition("[")[0]


@cache
def sections() -> frozenset[str]:
    """Return the dotted names of the tables that hold options."""
    names = (key.rpartition(".")[0] for key in options())
    return frozenset(".".join(name.split(".")[:depth]) for name in names for depth in (1, 2))


def options_of(section: Any, prefix: str) -> Iterator[tuple[str, Option]]:
    """Yield the options of a dataclass and of nested ones, each name with the prefix."""
    nested = []
    for name, info in section.__pydantic_fields__.items():
        if is_dataclass(info.annotation):
            nested.append((info.annotation, f"{prefix}{name}."))
            continue
        annotation = Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
        default = info.default if info.default_factory is None else info.default_factory()
        yield prefix + name, Option(annotation, default, info.description or "")
    for inner, inner_prefix in nested:
        yield from options_of(inner, inner_prefix)


def members(annotation: Any) -> list[Any]:
    """Return the types in an annotation, without None and without ranges."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in members(part)]
    return [] if annotation is type(None) else [annotation]


def choices(annotation: Any) -> list[str]:
    """Return the values that an option takes, if it takes only some: its literals, or the names of its registry."""
    names = [
        str(value) for member in members(annotation) if get_origin(member) is Literal for value in get_args(member)
    ]
    return names + [name for registry in _registries(annotation) for name in registry.names()]


def _registries(annotation: Any) -> Iterator[NameIn]:
    """Yield the registries that an annotation names, also inside a union or a list."""
    for part in get_args(annotation):
        if isinstance(part, NameIn):
            yield part
        else:
            yield from _registries(part)


def describe(annotation: Any) -> str:
    """Describe the values of an option: "a whole number >= 1", 'one of "a", "b"'."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        if form := next((extra for extra in args[1:] if isinstance(extra, Form)), None):
            return form.description
        limits = [limit for extra in args[1:] for limit in (getattr(extra, "metadata", None) or [extra])]
        return f"{describe(args[0])} {' and '.join(filter(None, map(_limit, limits)))}".rstrip()
    if origin in (Union, types.UnionType):
        return " or ".join(describe(part) for part in args if part is not type(None))
    if origin is Literal:
        return "one of " + ", ".join(map(show, args))
    if origin is list:
        return "a list of tables" if is_dataclass(args[0]) else f"a list, each {describe(args[0])}"
    if origin is dict:
        return f"a table, each value {describe(args[1])}"
    return {str: "text", bool: "true or false", int: "a whole number", float: "a number"}[annotation]


def _limit(limit: Any) -> str:
    for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
        if hasattr(limit, name):
            return f"{sign} {getattr(limit, name)}"
    return ""


def fits(annotation: Any, value: Any) -> bool:
    """Return True if an option of this type can have this value."""
    try:
        TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(value)
    except ValidationError:
        return False
    return True


def fault_of_entry(
    entries: Mapping[str, Option], owner: str, setting: str, key: str, value: Any
) -> tuple[str, str, str] | None:
    """Return the given value, what is allowed and the remedy if a table of `owner`'s options cannot have this entry.

    `setting`: the option that names the owner, with its value.
    """
    assignment = f"{key} = {show(value)}"
    if key not in entries:
        allowed = f"options of {owner}: {', '.join(entries)}" if entries else f"nothing with {setting}"
        return assignment, allowed, hint(key, entries) or "leave it out"
    if fits(entries[key].annotation, value):
        return None
    remedy = f"write {key} = {show(value.split(','))}" if isinstance(value, str) and "," in value else ""
    return assignment, f"{key} = {describe(entries[key].annotation)}", remedy


def parse_value(annotation: Any, text: str) -> Any:
    """Parse the text of an argument for an option of this type. Text that does not fit is returned: a fault later."""
    kinds = {get_origin(a) or a for a in members(annotation)}
    if kinds <= {str, Literal}:
        return text
    tables = any(is_dataclass(kind) for member in members(annotation) for kind in get_args(member))
    if list in kinds and not tables and not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in {int, float} & kinds and (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return _from_toml(text) if kinds & {list, dict} else text


def parse_entry(key: str, text: str) -> Any:
    """Parse the text of an argument as an entry of a free table: as TOML, or unchanged if it is none or the table holds
    text. Readers of the table check the type.
    """
    if members(free_tables()[free_table(key)]) == [str]:
        return text
    parsed = parse_value(int | float | bool, text)
    return _from_toml(text) if isinstance(parsed, str) else parsed


def _from_toml(text: str) -> Any:
    """Parse a text as a TOML value, or return it unchanged."""
    try:
        parsed = tomli.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def hint(name: object, candidates: Iterable[str], cutoff: float = 0.6, quote: bool = False) -> str:
    """Return 'did you mean X?', or an empty text if no candidate is close. `name`: a key, which YAML may read as 1."""
    near = nearest(str(name), candidates, cutoff)
    return f"did you mean {show(near) if quote else near}?" if near else ""


def nearest(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the candidate closest to a name, or nothing if none is close."""
    by_case = {candidate.lower(): candidate for candidate in candidates}
    return next((by_case[match] for match in difflib.get_close_matches(name.lower(), by_case, n=1, cutoff=cutoff)), "")


def show(value: Any) -> str:
    """Format a value as TOML would write it, on one line and shortened. Text keeps its end: a path's file name."""
    if value is None:
        return "nothing"
    value = as_dict(value) if is_dataclass(value) else value
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{key} = {show(inner)}" for key, inner in value.items()) + "}"
    elif isinstance(value, list):
        text = "[" + ", ".join(map(show, value)) + "]"
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
        if isinstance(value, str) and len(text) > 100:
            return f"{text[:48]}...{text[-49:]}"
    return text if len(text) <= 100 else text[:97] + "..."


HELP_OPTIONS = ("--help", "-h")
ALL = "all"
OVERVIEW = """\
usage: torchtitan train JOB.toml [--ranks N] [--section.key value ...]

Train a job: a TOML file, or the name of a shipped one (`torchtitan list jobs`), on N ranks of this machine (auto: all
its GPUs, or 2 CPU ranks without any; default: NGPU in the environment, or 1). Options override the file:
  --training.steps 100    --training.steps=100    --compile.enable    --compile.no-enable

Sections of a job, with their number of options:
{sections}

  --help SECTION   options of a section (or one option) with their types, defaults and meanings
  --help all       all options"""


def print_help_if_requested(argv: Sequence[str]) -> None:
    """Print the help that `--help [SECTION|all]` asks for and exit with code 0. Raises JobError for another word."""
    position = next((i for i, argument in enumerate(argv) if argument in HELP_OPTIONS), None)
    if position is None:
        return
    topic = [argument.removeprefix("--") for argument in argv[position + 1 : position + 2]]
    print(help_text(*topic) if topic else overview())
    sys.exit(0)


def overview() -> str:
    """Return the help that fits on a screen: how to give options, and the sections with a line each."""
    lines = []
    for name, section in get_type_hints(JobConfig).items():
        number = sum(key.startswith(f"{name}.") for key in options())
        lines.append(f"  {name:22}{number:3}  {(section.__doc__ or '').splitlines()[0]}")
    return OVERVIEW.format(sections="\n".join(lines))


def help_text(topic: str = ALL) -> str:
    """Return the options with their types, defaults and meanings: of a section, of one option, or all of them.

    Raises JobError if `topic` is none of these.
    """
    selected = {key: option for key, option in options().items() if topic == ALL or f"{key}.".startswith(f"{topic}.")}
    if not selected:
        names = [*sections(), *options()]
        remedy = hint(topic, names) or f"sections are {', '.join(sorted(sections()))}"
        raise JobError(f"--help {topic}: allowed: a section, an option or all; {remedy}")
    lines = ["Options, as --section.key value on the command line or as key = value under [section] in a TOML file."]
    section = ""
    for key, option in selected.items():
        if key.rpartition(".")[0] != section:
            section = key.rpartition(".")[0]
            lines += ["", f"[{section}]"]
        lines += _help_lines("  --", key, option)
        if columns(key):
            lines.append(f"      under each [[{key}]]:")
            lines += [line for name, column in columns(key).items() for line in _help_lines("        ", name, column)]
    return "\n".join(lines)


def _help_lines(indent: str, key: str, option: Option) -> list[str]:
    default = "unset" if option.default is None else show(option.default)
    default = "must be given" if option.default is PydanticUndefined else f"default {default}"
    lines = [f"{key}  ({describe(option.annotation)}; {default})"]
    lines += [f"  {line.strip()}" for line in option.help.splitlines()]
    names = choices(option.annotation)
    if names and "one of" not in lines[0]:
        lines += [f"  {line}" for line in wrap(f"One of {', '.join(names)}.", 110)]
    return [indent + lines[0], *(" " * len(indent) + line for line in lines[1:])]
