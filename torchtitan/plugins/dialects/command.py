"""`torchtitan check --upgrade`: translate a job of PyTorch's torchtitan to today's options, keeping its comments."""

import fnmatch
from argparse import Namespace
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import Comment, Table

from torchtitan.commands.check import refuse
from torchtitan.config.job import JobConfig
from torchtitan.config.job_file import Comments, as_file
from torchtitan.config.layers import Values, assemble, layer_of, merged
from torchtitan.config.manager import LARGEST_FILE, read_layers
from torchtitan.config.options import ConfigError, Fault, show
from torchtitan.core.constraints import LimitError
from torchtitan.core.files import read_file
from torchtitan.job import ResolvedJob
from torchtitan.plugins.dialects.renames import FLOAT8_EXCLUDE, MOVED
from torchtitan.plugins.dialects.upgrade import ERAS, Upgrade, upgrade
from torchtitan.rules import WITHOUT_EFFECT, Facts, UnknownValue, check, judge, without_unknown_names
from torchtitan.rules.loading import fewest_ranks
from torchtitan.rules.optimization import linears_in_blocks

__all__ = ["ERAS", "print_translation", "translate"]


def print_translation(argv: list[str], options: Namespace) -> int:
    """Print a job in today's options. Returns 2 also for a translated job that cannot start without changes."""
    try:
        text, config = translate(argv, ERAS.get(options.era))
    except ConfigError as error:
        return refuse(error.faults)
    print(text, flush=True)
    faults = check(config, options.world_size or fewest_ranks(config.parallelism), options.device)
    return refuse(["translated, but the job cannot start without changes:", *faults], len(faults)) if faults else 0


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
            _read_comments(read_file(layer.name, LARGEST_FILE).decode(), comments)
    head = [f"Translated from {name}, read as a job for PyTorch's torchtitan of {result.era}.", *result.notes]
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


def _read_comments(text: str, comments: Comments) -> None:
    """Add the comments of a file to those that were read, by today's names of its options."""
    pending: list[str] = []
    for name, item in _items(tomlkit.parse(text.removeprefix("\ufeff")), ""):
        if isinstance(item, Comment):
            pending.append(item.as_string().strip())
            continue
        is_first_section = isinstance(item, Table) and not comments.above and not comments.head
        name = MOVED[name].to if name in MOVED else name
        if is_first_section:
            comments.head, pending = pending, []
        elif pending:
            comments.above[name], pending = comments.above.get(name, []) + pending, []
        if item.trivia.comment:
            comments.inline[name] = item.trivia.comment
    comments.above[""] = comments.above.get("", []) + pending


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
