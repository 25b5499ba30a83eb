"""The words of a command line -> the job's files, and the options said beside them."""

from typing import Any

from torchtitan.config.layers import COMMAND_LINE, Layer, joined_entries, layer_of
from torchtitan.config.options import (
    YES_OR_NO,
    Fault,
    describe,
    free_table,
    hint,
    members,
    options,
    parse_entry,
    parse_value,
    show,
)
from torchtitan.config.renames import Moved, renamed
from torchtitan.core.presets import jobs

_WORDS_FOR_THE_JOB = dict.fromkeys(("config", "config_file", "config-file", "job.config"), "job.config_file")


def _is_job(word: str) -> bool:
    return not word.startswith("-") and (word.endswith(".toml") or word in jobs())


def parse_arguments(argv: list[str]) -> tuple[list[str], Layer]:
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
            faults.append(Fault(COMMAND_LINE, "", show(word), "--section.key value", hint(word, jobs()) or remedy))
            continue
        key, equals, text = word[2:].partition("=")
        key = _WORDS_FOR_THE_JOB.get(key, key).replace("-", "_")
        value: Any = text if equals else None
        positive = _positive(key)
        if positive and not equals:
            key, value = positive, False
        elif value is None and _is_flag(key):
            value = rest.pop(0) if rest and rest[0].lower() in YES_OR_NO else True
        elif value is None and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        if value is None and (key in options() or free_table(key)):
            allowed = describe(options()[key].annotation) if key in options() else "an entry and its value"
            faults.append(Fault(COMMAND_LINE, key, "nothing", allowed, f"write --{key} VALUE"))
        elif key == "job.config_file":
            files.append(value)
        elif earlier := _said_before(key, pairs):
            value = _meaning(key, value)
            faults.append(Fault(COMMAND_LINE, key, f"{show(value)} after {earlier}", "once", "keep one"))
        else:
            pairs.append((key, _meaning(key, value)))
    layer = layer_of(COMMAND_LINE, joined_entries(pairs))
    return files, Layer(COMMAND_LINE, layer.values, faults + layer.faults, layer.old)


def _meaning(key: str, value: Any) -> Any:
    """Parse an argument for this option, or for an entry of a free table."""
    if not isinstance(value, str):
        return value
    if key in options():
        return parse_value(options()[key].annotation, value)
    return parse_entry(key, value) if free_table(key) else value


def _said_before(key: str, pairs: list[tuple[str, Any]]) -> str:
    """Describe an earlier argument for the same option, or for its table or an entry of it; empty if there is none."""
    for other, value in pairs:
        if other == key:
            return show(value)
        if other.startswith(f"{key}.") or key.startswith(f"{other}."):
            return f"{other} = {show(value)}"
    return ""


def _positive(key: str) -> str | None:
    """The flag that `section.no_flag` turns off."""
    section, _, last = key.rpartition(".")
    flag = f"{section}.{last[3:]}"
    return flag if last.startswith("no_") and (_is_flag(flag) or renamed(flag)) else None


def _is_flag(key: str) -> bool:
    """True for flags, under their names of today and of older dialects."""
    moved = renamed(key)
    key = moved.to if isinstance(moved, Moved) else key
    return key in options() and members(options()[key].annotation) == [bool]
