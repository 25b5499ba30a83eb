"""The arguments of a command line: the files of a job, and the options that change it."""

from collections.abc import Iterable
from typing import Any

from torchtitan.config.dialects import Moved, renamed
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
from torchtitan.core.files import shipped_jobs

_ALIASES = dict.fromkeys(("config", "config_file", "config-file", "job.config"), "job.config_file")


def _is_job(argument: str) -> bool:
    return not argument.startswith("-") and (argument.endswith(".toml") or argument in shipped_jobs())


def split_job_options(argv: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split the arguments of a command into options of a job, each with its value, and all others."""
    job_options: list[str] = []
    command_arguments: list[str] = []
    remaining = list(argv)
    while remaining:
        argument = remaining.pop(0)
        is_job_option = argument.startswith("--") and "." in argument.partition("=")[0]
        (job_options if is_job_option else command_arguments).append(argument)
        if is_job_option and _value_follows(argument, remaining):
            job_options.append(remaining.pop(0))
    return job_options, command_arguments


def _value_follows(argument: str, remaining: list[str]) -> bool:
    """Return True if the first of the remaining arguments is the value of this option."""
    name, equals, _ = argument[2:].partition("=")
    key = name.replace("-", "_")
    if equals or not remaining or _positive(key):
        return False
    return remaining[0].lower() in YES_OR_NO if _is_flag(key) else not remaining[0].startswith("--")


def parse_arguments(argv: list[str]) -> tuple[list[str], Layer]:
    """Parse `job.toml`, `--section.key value`, `--section.key=value`, `--section.flag` and `--section.no-flag`.

    Returns the files and the layer of options.
    """
    pairs: list[tuple[str, Any]] = []
    faults: list[Fault] = []
    files: list[str] = []
    remaining = list(argv)
    while remaining:
        argument = remaining.pop(0)
        if _is_job(argument):
            files.append(argument)
            continue
        if not argument.startswith("--") or argument == "--":
            remedy = "every option is named; jobs are .toml files, or names of `torchtitan list jobs`"
            faults.append(
                Fault(COMMAND_LINE, "", show(argument), "--section.key value", hint(argument, shipped_jobs()) or remedy)
            )
            continue
        key, equals, text = argument[2:].partition("=")
        key = _ALIASES.get(key, key).replace("-", "_")
        value: Any = text if equals else remaining.pop(0) if _value_follows(argument, remaining) else None
        if not equals and (flag := _positive(key)):
            key, value = flag, False
        elif value is None and _is_flag(key):
            value = True
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
    """Return the flag that `section.no_flag` turns off, or None."""
    section, _, last = key.rpartition(".")
    flag = f"{section}.{last[3:]}"
    return flag if last.startswith("no_") and (_is_flag(flag) or renamed(flag)) else None


def _is_flag(key: str) -> bool:
    """Return True for flags, by their current or older names."""
    if key not in options() and isinstance(moved := renamed(key), Moved):
        key = moved.to
    return key in options() and members(options()[key].annotation) == [bool]
