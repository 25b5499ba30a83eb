"""The options of a job by dotted name: their types in words, their help, and what is said when one is wrong.

All of it is read off the dataclasses of config.py, so a new option needs nothing here. Needs no torch.
"""

import difflib
import json
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from torchtitan.config import JobConfig


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a job. Empty parts are left out of the line."""

    file: str
    key: str
    given: str
    allowed: str
    remedy: str

    def __str__(self) -> str:
        said = [f"given {self.given}" * bool(self.given), f"allowed: {self.allowed}" * bool(self.allowed), self.remedy]
        line = ": ".join(filter(None, (self.file, self.key, "; ".join(filter(None, said)))))
        # whatever is in a file, one fault is one line, and a terminal is sent no control characters
        return line if line.isprintable() else line.encode("unicode_escape").decode()


class ConfigError(ValueError):
    """Everything that is wrong with a job, one line each; `rest` is the job without what is wrong, if that is one."""

    def __init__(self, faults: Iterable[Fault], rest: JobConfig | None = None) -> None:
        self.faults = list(dict.fromkeys(faults))
        self.rest = rest
        super().__init__("\n".join(map(str, self.faults)))


@dataclass(frozen=True)
class Option:
    annotation: Any
    default: Any
    help: str


@cache
def options() -> dict[str, Option]:
    """Every option of the job by its dotted name, in the order of config.py."""
    return dict(_options_of(JobConfig, ""))


@cache
def sections() -> frozenset[str]:
    """Dotted names of the tables that hold options."""
    names = (key.rpartition(".")[0] for key in options())
    return frozenset(".".join(name.split(".")[:depth]) for name in names for depth in (1, 2))


def _options_of(section: type, prefix: str) -> Iterator[tuple[str, Option]]:
    nested = []
    for name, info in section.__pydantic_fields__.items():
        if is_dataclass(info.annotation):
            nested.append((info.annotation, f"{prefix}{name}."))
            continue
        annotation = Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
        default = info.default_factory() if info.default is PydanticUndefined else info.default
        yield prefix + name, Option(annotation, default, info.description or "")
    for inner, inner_prefix in nested:
        yield from _options_of(inner, inner_prefix)


def help_text() -> str:
    """All options with their types, defaults and help."""
    lines = ["Options, as --section.key value on the command line or as key = value under [section] in a TOML file."]
    section = ""
    for key, option in options().items():
        if key.rpartition(".")[0] != section:
            section = key.rpartition(".")[0]
            lines += ["", f"[{section}]"]
        default = "unset" if option.default is None else show(option.default)
        lines.append(f"  --{key}  ({describe(option.annotation)}; default {default})")
        lines += [f"      {line.strip()}" for line in option.help.splitlines()]
    return "\n".join(lines)


def members(annotation: Any) -> list[Any]:
    """The types that an annotation joins, without None and without the ranges around them."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in members(part)]
    return [] if annotation is type(None) else [annotation]


def choices(annotation: Any) -> list[str]:
    """The words that an option takes, if it takes only some."""
    return [str(c) for a in members(annotation) if get_origin(a) is Literal for c in get_args(a)]


def describe(annotation: Any) -> str:
    """What an option takes, in words: "a whole number >= 1", 'one of "a", "b"'."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = [limit for extra in args[1:] for limit in (getattr(extra, "metadata", None) or [extra])]
        return f"{describe(args[0])} {' and '.join(filter(None, map(_limit, limits)))}"
    if origin in (Union, types.UnionType):
        return " or ".join(describe(part) for part in args if part is not type(None))
    if origin is Literal:
        return "one of " + ", ".join(map(show, args))
    if origin is list:
        return f"a list, each {describe(args[0])}"
    if origin is dict:
        return f"a table, each value {describe(args[1])}"
    return {str: "text", bool: "true or false", int: "a whole number", float: "a number"}[annotation]


def _limit(limit: Any) -> str:
    for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
        if hasattr(limit, name):
            return f"{sign} {getattr(limit, name)}"
    pattern = getattr(limit, "pattern", None)
    return f"of the form {pattern}" if pattern else ""


def hint(given: str, known: Iterable[str], cutoff: float = 0.6, quote: bool = False) -> str:
    """'did you mean X?', or nothing when no known name is near."""
    near = {name.lower(): name for name in known}
    close = difflib.get_close_matches(given.lower(), near, n=1, cutoff=cutoff)
    return f"did you mean {show(near[close[0]]) if quote else near[close[0]]}?" if close else ""


def show(value: Any) -> str:
    """A value as TOML would write it, on one line and shortened."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{key} = {show(inner)}" for key, inner in value.items()) + "}"
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 100 else text[:97] + "..."
