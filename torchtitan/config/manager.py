"""TOML files and the command line -> JobConfig, and back to TOML. Needs no torch.

Precedence: command line > later file > earlier file or `extends` > defaults. An option's value is replaced as a whole,
lists and tables included. Each file, and the command line, is checked by itself, so all faults of all of them come
out at once and each names its place; a wrong value is a fault even where something later overrides it.
"""

import difflib
import json
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from datetime import date, time
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli
import tomli_w
from pydantic import TypeAdapter, ValidationError

from torchtitan.config.job import JobConfig, as_dict
from torchtitan.config.options import (
    ConfigError,
    Fault,
    Option,
    choices,
    columns,
    describe,
    help_text,
    hint,
    members,
    option_at,
    options,
    sections,
    show,
)
from torchtitan.config.renames import Gone, old_section, renamed
from torchtitan.errors import JobError
from torchtitan.shipped import job_file, jobs

__all__ = ["ConfigError", "Fault", "load", "to_toml"]

LONGEST_CHAIN, MOST_FILES = 8, 64
COMMAND_LINE = "command line"
LARGEST_FILE = 2**20
"""Bytes. A job is a page; what is larger is something else given by mistake, and is not read into memory."""
NOT_KEPT = {("job", "config_file"), ("job", "print_config")}
"""Options about loading itself: not part of the resolved job, which stands alone."""

_JOB = TypeAdapter(JobConfig)

Values = dict[str, Any]
"""Options by dotted name ("training.dataloader.num_workers"), as given."""


@dataclass(frozen=True)
class Layer:
    """What one file or the command line says."""

    name: str
    values: Values
    faults: list[Fault]
    """Of what is in neither of the other two."""
    old: Values
    """Options of older dialects, see renames.py."""

    def all_faults(self) -> list[Fault]:
        """Also those of wrong values, and one for each old option, which only a translation may use."""
        old = (_old_fault(self.name, key, value) for key, value in self.old.items())
        return [*self.faults, *_wrong_values(self.name, self.values), *old]


def load(argv: list[str]) -> JobConfig:
    """The job that the arguments describe (`--job.config_file job.toml --section.key value ...`).

    Raises ConfigError with all faults. `--help` prints the options and exits.
    """
    if asked := {"--help", "-h"} & set(argv):
        after = argv[argv.index(asked.pop()) + 1 :]
        print(help_text(after[0].removeprefix("--") if after else ""))
        raise SystemExit(0)
    files, layers = read_layers(argv)
    faults = [fault for layer in layers for fault in layer.all_faults()]
    values = {key: value for layer in layers for key, value in layer.values.items()}
    if not faults:
        return assemble(values, files)
    wrong = {option_at(fault.key) for fault in faults}
    old = any(layer.old for layer in layers)  # wants a translation first; what is left of it says little
    raise ConfigError(faults, None if old else assemble({k: v for k, v in values.items() if k not in wrong}, files))


def said_by(argv: list[str]) -> dict[str, str]:
    """Of each option that is said somewhere, the file that has the last word, or the command line."""
    return {key: layer.name for layer in read_layers(argv)[1] for key in layer.values}


def assemble(values: Values, files: list[str]) -> JobConfig:
    """The job of values that have no faults."""
    return _JOB.validate_json(json.dumps(nest({**values, "job.config_file": files})))


def to_toml(config: JobConfig) -> str:
    """The resolved job; loaded alone, it reproduces `config` (but for how it was loaded)."""
    sections = as_dict(config)
    for section, key in NOT_KEPT:
        sections[section].pop(key, None)
    return tomli_w.dumps(sections)


# Reading


def read_layers(argv: list[str]) -> tuple[list[str], list[Layer]]:
    """The files that `argv` names, and the layers in rising precedence: each file after what it extends, `argv`."""
    files, command_line = _parse_arguments(argv)
    files = [job_file(file) for file in files]
    read: list[str] = []
    layers = [layer for file in files for layer in _read_file(file, COMMAND_LINE, "job.config_file", (), read)]
    return files, [*layers, command_line]


def _read_file(name: str, said_by: str, key: str, chain: tuple[Path, ...], read: list[str]) -> list[Layer]:
    """The layers of a file: those of the files that it extends, then its own. `said_by` and `key` asked for it; `read`
    grows by what is read."""
    read.append(name)
    if len(read) > MOST_FILES:  # eight tiny files that each extend the next one eight times would be two million
        fault = Fault(said_by, key, show(name), f"at most {MOST_FILES} files in all", "merge some")
        return [Layer(name, {}, [fault], {})] if len(read) == MOST_FILES + 1 else []  # which is said once
    if len(chain) > LONGEST_CHAIN:
        allowed = f"at most {LONGEST_CHAIN} files in a chain of extends"
        return [Layer(name, {}, [Fault(said_by, key, show(name), allowed, "merge some")], {})]
    try:
        path = Path(name).resolve()
        refused = _not_a_job(name, path, said_by, key, chain)
        content = b"" if refused else path.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a NUL in the name; RuntimeError: a loop of links
        reason = getattr(error, "strerror", None) or str(error)
        refused = Fault(said_by, key, f"{show(name)} ({reason})", "the path of a readable TOML file", "")
    table = refused or _parse_toml(name, content)
    if isinstance(table, Fault):
        return [Layer(name, {}, [table], {})]

    layers: list[Layer] = []
    bases = table.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        layers.append(Layer(name, {}, [Fault(name, "extends", show(bases), "a file name or a list of them", "")], {}))
        bases = []
    for base in bases:
        beside = str(Path(name).parent / base) if base.strip() else base  # relative to the file that says it
        layers += _read_file(beside, name, "extends", (*chain, path), read)
    return [*layers, layer_of(name, walk(table))]


def _not_a_job(name: str, path: Path, said_by: str, key: str, chain: tuple[Path, ...]) -> Fault | None:
    """What can be said against a file before it is read."""
    allowed = "the path of a TOML file"
    if not name.strip():
        return Fault(said_by, key, f"{show(name)} (an empty name)", allowed, "")
    if path.is_dir():
        return Fault(said_by, key, f"{show(name)} (a folder)", allowed, "")
    if not path.exists():
        beside = path.parent.glob("*.toml") if path.parent.is_dir() else []
        near = hint(path.name, [*(file.name for file in beside), *jobs()]) or f"looked for it as {path}"
        return Fault(said_by, key, f"{show(name)} (no such file)", allowed, near)
    if path in chain:
        cycle = " -> ".join(p.name for p in (*chain[chain.index(path) :], path))
        return Fault(said_by, key, show(name), "a file that does not extend this one", f"the cycle is {cycle}")
    if said_by != COMMAND_LINE and path.suffix != ".toml":
        # whose lines, as they are no TOML, would be quoted: a stranger's job must not show this machine's files
        return Fault(said_by, key, show(name), "a file whose name, links followed, ends in .toml", "name it so")
    if not path.is_file() or path.stat().st_size > LARGEST_FILE:
        return Fault(said_by, key, show(name), f"a regular file of at most {LARGEST_FILE} bytes", "give a job's TOML")
    return None


def _parse_toml(name: str, content: bytes) -> dict[str, Any] | Fault:
    """A file's table, or its one fault: TOML cannot be read past the first error."""
    try:
        text = content.decode().removeprefix("\ufeff")  # Windows editors begin a file with a byte order mark
        return tomli.loads(text)
    except UnicodeDecodeError as error:
        given = f"byte 0x{content[error.start]:02x} at offset {error.start}, which is not UTF-8"
        return Fault(name, "", given, "TOML in UTF-8", "save the file as UTF-8")
    except tomli.TOMLDecodeError as error:
        lines = [*text.split("\n"), ""]
        given = f"{show(lines[error.lineno - 1].strip())} in line {error.lineno}, column {error.colno}"
        twice = "the same key or table twice" if error.msg.startswith("Cannot") else "not TOML"
        return Fault(name, "", given, "valid TOML", f"{twice}: {error.msg}")
    except RecursionError:
        return Fault(name, "", "brackets in hundreds of brackets", "valid TOML of a job's size", "")
    except ValueError:  # Python's own limit, which TOML has not
        return Fault(name, "", "a number of thousands of digits", "valid TOML of a job's size", "")


def walk(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of what a nested table says, down to options or to what is not known."""
    for key, value in table.items():
        name = prefix + (show(key) if "." in key else key)  # a quoted "a.b" is one key, and none of ours
        inner = name in sections() or (name not in options() and not renamed(name) and old_section(name))
        if inner and isinstance(value, dict):
            yield from walk(value, name + ".")
        else:
            yield name, value


def layer_of(name: str, pairs: Iterable[tuple[str, Any]]) -> Layer:
    """Sort what was said into options of today, options of older dialects, and faults."""
    values, old, faults = {}, {}, []
    for key, value in pairs:
        if key == "job.config_file" and name != COMMAND_LINE:
            faults.append(Fault(name, key, show(value), "the command line only", 'in a file, write extends = "..."'))
        elif key in options():
            fault = _unusual(name, key, value)
            faults += [fault] if fault else []
            values |= {} if fault else {key: value}
        elif renamed(key):
            old[key] = value
        else:
            faults.append(_unknown(name, key, value))
    return Layer(name, values, faults, old)


# Faults


def _old_fault(name: str, key: str, value: Any) -> Fault:
    rename = renamed(key)
    if isinstance(rename, Gone):
        return Fault(name, key, show(value), f"no such option here ({rename.why})", "leave it out")
    assert rename is not None
    translate = "" if name == COMMAND_LINE else f", or let `torchtitan check {name} --upgrade` translate the file"
    try:
        new = rename.translate(value)
        remedy = "leave it out" if new is None else f"write {rename.to} = {show(new)}"
    except JobError as error:
        remedy = str(error)
    return Fault(name, key, show(value), f"{rename.to}, where it has moved", remedy + translate)


def _unknown(name: str, key: str, value: Any) -> Fault:
    if key in sections():
        return Fault(name, key, show(value), f"a table: [{key}] and options under it", "")
    if isinstance(value, dict) and not key.rpartition(".")[0]:
        known = {section for section in sections() if "." not in section}
        remedy = hint(key, known) or "sections are " + ", ".join(sorted(known))
        return Fault(name, key, f"the section [{key}]", "a section of the job", remedy)
    section, _, last = key.rpartition(".")
    siblings = {k[len(section) + 1 :].split(".")[0] for k in options() if k.startswith(f"{section}.")}
    elsewhere = [known for known in options() if known.rpartition(".")[2] == last]
    if close := difflib.get_close_matches(last, siblings, n=1, cutoff=0.75):
        remedy = f"did you mean {section}.{close[0]}?"
    else:  # the right key in the wrong section, or a slip in the section's name
        remedy = hint(key, elsewhere, 0 if len(elsewhere) == 1 or not section else 0.6)
        remedy = remedy or ("" if section in sections() else hint(key, options(), 0.7))
    return Fault(name, key, show(value), "a known option", remedy or "`torchtitan check --help-config` lists them")


def _unusual(name: str, key: str, value: Any) -> Fault | None:
    """Values that TOML has and JSON, through which options are validated, has not."""
    allowed = describe(options()[key].annotation)
    for leaf in _leaves(value):
        if isinstance(leaf, (date, time)):
            return Fault(name, key, f"a date or time, {leaf}", allowed, "quote it if it is meant as text")
        if isinstance(leaf, float) and not math.isfinite(leaf):
            return Fault(name, key, str(leaf), allowed, "the number must be finite")
        if isinstance(leaf, int) and abs(leaf) >= 2**63:
            return Fault(name, key, "a number of more than 63 bits", allowed, "")
        if isinstance(leaf, str) and any("\ud800" <= c <= "\udfff" for c in leaf):
            return Fault(name, key, show(leaf), allowed, "the text must be UTF-8")
        if isinstance(leaf, str) and "\0" in leaf:  # no file can have such a name, and nothing else wants it
            return Fault(name, key, show(leaf), allowed, "the text must not have NUL characters (\\u0000) in it")
    return None


def _wrong_values(name: str, values: Values) -> Iterator[Fault]:
    try:
        _JOB.validate_json(json.dumps(nest(values)))
    except ValidationError as error:
        for key, *place in dict.fromkeys(_place(fault["loc"]) for fault in error.errors()):
            if place:
                yield _wrong_table(name, key, *place, values[key])
            else:
                option, given = options()[key], values[key]
                yield Fault(name, key, show(given), describe(option.annotation), _remedy(option, given, key))


def _place(location: tuple[int | str, ...]) -> tuple[Any, ...]:
    """The option in which a fault is; in a list of tables also the table's number and the option in the table."""
    key, rest = _known_start(location, options())
    assert key, f"a fault outside every option: {location}"
    if not columns(key) or len(rest) < 2:
        return (key,)
    column, _ = _known_start(rest[1:], columns(key))
    return key, rest[0], column or ".".join(map(str, rest[1:]))


def _known_start(location: tuple[int | str, ...], known: Collection[str]) -> tuple[str, tuple[int | str, ...]]:
    """The known name that a location begins with, and what comes after it."""
    names = (".".join(map(str, location[:depth])) for depth in range(1, len(location) + 1))
    found = next((name for name in names if name in known), "")
    return found, location[found.count(".") + 1 :]


def _wrong_table(name: str, key: str, number: int, column: str, tables: list[Any]) -> Fault:
    """What is wrong in one of a list of tables: an option that is not known there, is missing, or has a wrong value."""
    place, option = f"{key}[{number}].{column}", columns(key).get(column)
    given: Any = tables[number]
    for part in column.split("."):
        given = given.get(part) if isinstance(given, dict) else given
    if option is None:
        remedy = hint(column, columns(key)) or f"there are {', '.join(columns(key))}"
        return Fault(name, place, show(given), f"a known option of [[{key}]]", remedy)
    remedy = f"every [[{key}]] needs it" if given is None else _remedy(option, given)
    return Fault(name, place, show(given), describe(option.annotation), remedy)


def _remedy(option: Option, given: Any, key: str = "") -> str:
    if key and columns(key):
        return f"write [[{key}]] for each in a file, or '[{{...}}, {{...}}]' on the command line"
    if isinstance(given, float) and given.is_integer() and "whole number" in describe(option.annotation):
        return f"write {int(given)}"
    if members(option.annotation) == [bool] and str(given).lower() in _YES_OR_NO:
        return f"write {show(_YES_OR_NO[str(given).lower()])}"
    if isinstance(given, str):
        if close := hint(given, choices(option.annotation), quote=True):
            return close
        parsed = _parse_value(int | float | bool, given)
        if not isinstance(parsed, str) and "text" not in describe(option.annotation):
            return f"write {show(parsed)}, without quotes"
    return f"help: {' '.join(option.help.split())}"


# The command line


_WORDS_FOR_THE_JOB = dict.fromkeys(("config", "config_file", "config-file", "job.config"), "job.config_file")
_YES_OR_NO = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
"""What people write for a flag. All but true and false are refused, by what to write."""


def _is_job(word: str) -> bool:
    return not word.startswith("-") and (word.endswith(".toml") or word in jobs())


def _parse_arguments(argv: list[str]) -> tuple[list[str], Layer]:
    """Files and options of `job.toml`, `--section.key value`, `--section.key=value`, `--section.flag`,
    `--section.no-flag`.
    """
    pairs: list[tuple[str, Any]] = []
    faults: list[Fault] = []
    files: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if _is_job(word):
            files.append(word)
            continue
        if not word.startswith("--") or word == "--":
            remedy = "every option is named; jobs are .toml files, or names of `torchtitan list jobs`"
            faults.append(Fault(COMMAND_LINE, "", show(word), "--section.key value", remedy))
            continue
        key, equals, text = word[2:].partition("=")
        key = _WORDS_FOR_THE_JOB.get(key, key).replace("-", "_")
        value: Any = text if equals else None
        positive = _positive(key)
        if positive and not equals:
            key, value = positive, False
        elif value is None and _is_flag(key):
            value = rest.pop(0) if rest and rest[0].lower() in _YES_OR_NO else True
        elif value is None and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        if value is None:
            allowed = describe(options()[key].annotation) if key in options() else "a known option and its value"
            faults.append(Fault(COMMAND_LINE, key, "nothing", allowed, f"write --{key} VALUE"))
        elif key == "job.config_file":
            files.append(value)
        elif key in dict(pairs):
            faults.append(Fault(COMMAND_LINE, key, f"{show(value)} after {show(dict(pairs)[key])}", "once", "keep one"))
        else:
            known = options()[key].annotation if key in options() else None
            pairs.append((key, _parse_value(known, value) if isinstance(value, str) and known else value))
    layer = layer_of(COMMAND_LINE, pairs)
    return files, Layer(COMMAND_LINE, layer.values, faults + layer.faults, layer.old)


def _positive(key: str) -> str | None:
    """The flag that `section.no_flag` turns off."""
    section, _, last = key.rpartition(".")
    flag = f"{section}.{last[3:]}"
    return flag if last.startswith("no_") and (_is_flag(flag) or renamed(flag)) else None


def _is_flag(key: str) -> bool:
    return key in options() and members(options()[key].annotation) == [bool]


def _parse_value(annotation: Any, text: str) -> Any:
    """What the text of an argument means for an option of this type. What does not fit stays text: a fault later."""
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
    if kinds & {list, dict}:
        try:
            parsed = tomli.loads(f"value = {text}")
            return parsed["value"] if len(parsed) == 1 else text
        except (ValueError, RecursionError):
            pass
    return text


def nest(values: Values) -> dict[str, Any]:
    """Dotted names -> nested tables."""
    tables: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
    return tables


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value
