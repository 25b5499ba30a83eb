"""The help of a job's options: one screen of sections, one section, or everything. Needs no torch.

All of it is read off the dataclasses of `sections/`: a section's docstring, and the string under each field.
"""

import sys
from collections.abc import Sequence
from textwrap import wrap
from typing import get_type_hints

from pydantic_core import PydanticUndefined

from torchtitan.config.job import JobConfig
from torchtitan.config.options import Option, choices, columns, describe, hint, options, sections, show
from torchtitan.core.errors import JobError

HELP_OPTIONS = ("--help", "-h")
ALL = "all"
OVERVIEW = """\
usage: torchtitan train JOB.toml [--section.key value ...]

Train a job: a TOML file, or the name of a shipped one (`torchtitan list jobs`). Options override the file:
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
