"""`torchtitan check --upgrade`: translate a job of torchtitan's TOML era to today's options, keeping its comments."""

import fnmatch
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
import tomlkit
from tomlkit.items import Comment, Table

from torchtitan.config.job import JobConfig
from torchtitan.config.layers import Values, assemble, layer_of, merged, nest
from torchtitan.config.manager import LARGEST_FILE, read_layers
from torchtitan.config.options import ConfigError, Fault, options, show
from torchtitan.config.renames import FLOAT8_EXCLUDE, MOVED
from torchtitan.config.upgrade import Upgrade, upgrade
from torchtitan.core.constraints import LimitError
from torchtitan.core.files import read_file
from torchtitan.job import ResolvedJob
from torchtitan.rules import WITHOUT_EFFECT, Facts, UnknownValue, judge, without_unknown_names
from torchtitan.rules.optimization import linears_in_blocks


def translate(argv: list[str], era: str | None) -> tuple[str, JobConfig]:
    """Return the translated file, including old defaults that differ from today's, and its job.

    Raises ConfigError with all options that have no translation.
    """
    files, layers = read_layers(argv)
    if faults := [fault for layer in layers for fault in layer.faults]:
        raise ConfigError(faults)
    name = " + ".join(files) or "the job"
    result = upgrade(merged(layer.old for layer in layers), merged(layer.values for layer in layers), era)
    faults = [Fault(name, key, show(value), "", f"has no translation: {reason}") for key, value, reason in result.stuck]
    translated = layer_of(name, result.values.items())
    if faults := faults + translated.all_faults():
        raise ConfigError(faults)
    values = _without_unmatched(_with_effect(translated.values, result), result)
    comments = Comments()
    for layer in layers:
        if Path(layer.name).is_file():
            comments.read(read_file(layer.name, LARGEST_FILE).decode())
    head = [f"Translated from {name}, read as a job for torchtitan of {result.era}.", *result.notes]
    return as_file(head, values, comments), assemble(values, [f"the translation of {name}"])


def _with_effect(values: Values, result: Upgrade) -> Values:
    """Leave out options that have no effect with the other options, and would be a fault here."""
    while faults := [fault for fault in _faults_without_effect(values) if fault.key in values]:
        result.notes += [f"left out, changed nothing: {fault.key} (allowed: {fault.allowed})" for fault in faults]
        values = {key: value for key, value in values.items() if key not in {fault.key for fault in faults}}
    return values


def _faults_without_effect(values: Values) -> list[Fault]:
    return judge(_facts_of(values), WITHOUT_EFFECT)


def _facts_of(values: Values) -> Facts:
    return without_unknown_names(Facts(ResolvedJob(assemble(values, []))))[0]


def _without_unmatched(values: Values, result: Upgrade) -> Values:
    """Leave out filters of float8 that match none of the model's linears: old files named routers for every model."""
    names: Collection[str] = ()
    with suppress(LimitError, UnknownValue):  # the sizes of the model are wrong, or not known
        names = linears_in_blocks(_facts_of(values)) if FLOAT8_EXCLUDE in values else ()
    unmatched = [pattern for pattern in values[FLOAT8_EXCLUDE] if not fnmatch.filter(names, pattern)] if names else []
    if not unmatched:
        return values
    dropped = ", ".join(unmatched)
    result.notes.append(
        f"left out, changed nothing: {dropped} in {FLOAT8_EXCLUDE} (no linear in float8 has such a name)"
    )
    return values | {FLOAT8_EXCLUDE: [pattern for pattern in values[FLOAT8_EXCLUDE] if pattern not in unmatched]}


@dataclass
class Comments:
    """The comments of a file: at its head, and above or next to a section or option (by today's name)."""

    head: list[str] = field(default_factory=list)
    above: dict[str, list[str]] = field(default_factory=dict)
    inline: dict[str, str] = field(default_factory=dict)

    def read(self, text: str) -> None:
        pending: list[str] = []
        for name, item in _items(tomlkit.parse(text.removeprefix("\ufeff")), ""):
            if isinstance(item, Comment):
                pending.append(item.as_string().strip())
                continue
            is_first_section = isinstance(item, Table) and not self.above and not self.head
            name = MOVED[name].to if name in MOVED else name
            if is_first_section:
                self.head, pending = pending, []
            elif pending:
                self.above[name], pending = self.above.get(name, []) + pending, []
            if item.trivia.comment:
                self.inline[name] = item.trivia.comment
        self.above[""] = self.above.get("", []) + pending

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


def _items(table: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, item) in file order: comments (with an empty name), sections and options."""
    for key, item in table.body if isinstance(table, tomlkit.TOMLDocument) else table.value.body:
        if isinstance(item, Comment):
            yield "", item
        elif key is not None:
            name = prefix + key.key
            yield name, item
            if isinstance(item, Table):
                yield from _items(item, f"{name}.")


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
