"""The parser of all commands: dashes in options, choices by name, options of a job among a command's own.

Needs no torch, and imports a registry, or the options of jobs, only when they are needed.
"""

import argparse
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from fractions import Fraction
from pkgutil import resolve_name
from typing import Any, NoReturn

from torchtitan.commands import COMMANDS
from torchtitan.core.errors import JobError
from torchtitan.parallelisms.degrees import AXIS_OPTIONS

JOB_HELP = "--section.key value  options of a job; torchtitan train --help lists its sections"

NUMBERS_OF_RANKS = ("--world-size", "--gpus", "--ranks", "--pp")
"""Options for a number of ranks. A command has one of them, and a user may type the one of another command."""
MOST_RANKS = 64
"""Largest degree of a plan that gloo ranks of one machine make."""
DURATIONS = {"min": 60.0, "h": 3600.0, "d": 86400.0}
UNITS = {"MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def hint(name: str, candidates: Iterable[str]) -> str:
    """Return `config.options.hint`, which takes a while to import."""
    return resolve_name("torchtitan.config.options:hint")(name, candidates)


class HelpFormatter(argparse.HelpFormatter):
    """A help formatter that does not break lines within the name of an option."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class CommandParser(argparse.ArgumentParser):
    """The parser of one command.

    `takes`: which arguments of a job the command accepts. "job": options of a job (--section.key) and names of jobs.
    "options": options of a job. "": none. `details` follows the summary of the command in its help.
    """

    def __init__(self, command: str, details: str = "", takes: str = "") -> None:
        summary = COMMANDS[command]
        super().__init__(
            prog=f"torchtitan {command}",
            description=f"{summary[0].upper()}{summary[1:]}. {details}".strip(),
            epilog=JOB_HELP if takes else None,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        self.takes = takes
        if takes == "job":
            self.add_argument("job", nargs="*", metavar="JOB", help="a job's TOML file, or the name of a shipped job")
            self.add_argument("--config", "--config-file", action="append", default=[], metavar="JOB", help="the same")

    def parse(self, argv: Iterable[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the options of the command, and the job's arguments. Raises JobError for invalid arguments."""
        job_options, arguments = [], list(argv)
        if self.takes:
            job_options, arguments = resolve_name("torchtitan.config.manager:split_job_options")(argv)
        arguments = [self._with_dashes(argument) for argument in arguments]
        ends_in_remainder = any(action.nargs == argparse.REMAINDER for action in self._actions)
        if not ends_in_remainder:  # before a missing argument, which may just be misspelled
            before_dashes = itertools.takewhile(lambda argument: argument != "--", arguments)
            self._refuse([argument for argument in before_dashes if argument.startswith("--")])
        parse = self.parse_known_args if ends_in_remainder else self.parse_known_intermixed_args
        options, unknown = parse(arguments)
        self._refuse(unknown)
        files = [*options.config, *options.job] if self.takes == "job" else []
        return options, [*(job_arg for file in files for job_arg in ("--job.config_file", file)), *job_options]

    def _refuse(self, arguments: list[str]) -> None:
        """Raise JobError for the first argument that is no option of the command."""
        for name in (argument.partition("=")[0] for argument in arguments):
            if name not in self._option_string_actions:
                candidates = [*self._option_string_actions]
                ranks = [option for option in NUMBERS_OF_RANKS if option in candidates and name in NUMBERS_OF_RANKS]
                near = f"did you mean {ranks[0]}?" if ranks else hint(name, candidates)
                self.error(f"no option {name}; {near}" if name.startswith("-") else f"one argument too many: {name}")

    def _with_dashes(self, argument: str) -> str:
        """Return an argument with the dashes of its option, which may be spelled with underscores."""
        name, equals, value = argument.partition("=")
        dashed = name.replace("_", "-")
        return f"{dashed}{equals}{value}" if dashed in self._option_string_actions else argument

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ").rstrip("; ")
        if message.endswith(one := ": expected one argument"):
            name = message.removesuffix(one)
            message = f"{name}: given no value; one that starts with a dash is written {name}=VALUE"
        raise JobError(f"{self.prog}: {message}; {self.prog} --help lists the options")


class OneOf:
    """An argument type: one of some names.

    `source`: the names, a function that returns them, or a registry as "module:NAME". `aliases`: names of former
    versions, which are accepted and not offered.
    """

    def __init__(
        self, source: str | Collection[str] | Callable[[], Collection[str]], aliases: Mapping[str, str] | None = None
    ) -> None:
        self._source, self._aliases = source, aliases or {}

    @property
    def names(self) -> list[str]:
        source: Any = resolve_name(self._source) if isinstance(self._source, str) else self._source
        return list(source() if callable(source) else source)

    def __call__(self, text: str) -> str:
        text = self._aliases.get(text, text)
        if text in self.names:
            return text
        near = hint(text, self.names)
        raise argparse.ArgumentTypeError(f"given {text!r}; allowed: {', '.join(self.names)}; {near}".rstrip("; "))


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return an argument type: whole numbers of a range, both ends included."""
    limits = f">= {least}" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        digits = text.removeprefix("-")
        if digits.isascii() and digits.isdecimal() and least <= int(text) <= (2**63 - 1 if most is None else most):
            return int(text)
        raise argparse.ArgumentTypeError(f"given {text!r}; allowed: a whole number {limits}")

    return parse


def number_above_0(text: str) -> float:
    if _is_decimal(text) and 0 < float(text) < math.inf:
        return float(text)
    raise argparse.ArgumentTypeError(f"given {text!r}; allowed: a number above 0")


def _is_decimal(text: str) -> bool:
    return re.fullmatch(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", text) is not None


def number_from_0(text: str) -> float:
    if _is_decimal(text) and float(text) < math.inf:
        return float(text)
    raise argparse.ArgumentTypeError(f"given {text!r}; allowed: a number >= 0")


def size_in_bytes(text: str) -> float:
    """Return the bytes of a size with a unit, as an argument type."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([MGT]i?B)", text)
    if match and float(match[1]) > 0:
        return float(match[1]) * UNITS[match[2]]
    raise argparse.ArgumentTypeError(f"given {text!r}; allowed: a number with one of {', '.join(UNITS)}, as 80GiB")


def plan_degrees(text: str) -> dict[str, int]:
    """Return the degrees of a plan by axis, as of "tp=2,pp=2", as an argument type; axes left out have degree 1."""
    degrees = dict.fromkeys(AXIS_OPTIONS, 1)
    parts = [part.partition("=") for part in text.replace(" ", "").split(",")]
    for number, (axis, sign, value) in enumerate(parts):
        if not sign or axis not in degrees or axis in [name for name, _, _ in parts[:number]]:
            near = hint(axis, degrees)
            allowed = f"degrees like tp=2,pp=2, each axis once: {', '.join(degrees)}"
            raise argparse.ArgumentTypeError(f"given {text!r}; allowed: {allowed}; {near}".rstrip("; "))
        degrees[axis] = whole_number(1, MOST_RANKS)(value)
    return degrees


def relative_time(text: str) -> Fraction:
    if re.fullmatch(r"([0-9]{1,9}(\.[0-9]{0,9})?|\.[0-9]{1,9})", text):
        return Fraction(text)
    raise argparse.ArgumentTypeError(f"given {text!r}; allowed: a number of 0 or more, like 1 or 0.25")


def relative_times(text: str) -> tuple[Fraction, ...]:
    times = tuple(relative_time(part) for part in text.split(":"))
    if len(times) == 3 and times[0] > 0:
        return times
    raise argparse.ArgumentTypeError(f"given {text!r}; allowed: three numbers F:I:W with F > 0, e.g. 1:1.2:0.8")


def share_above_0(text: str) -> Fraction:
    share = relative_time(text)
    if 0 < share <= 1:
        return share
    raise argparse.ArgumentTypeError(f"given {text!r}; allowed: a number above 0, at most 1")


def duration(text: str) -> float:
    """Return the seconds of a duration with a unit."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(min|h|d)", text)
    if match and float(match[1]) > 0:
        return float(match[1]) * DURATIONS[match[2]]
    raise argparse.ArgumentTypeError(f"given {text!r}; allowed: a number with one of {', '.join(DURATIONS)}, as 30d")
