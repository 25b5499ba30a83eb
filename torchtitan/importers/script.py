"""Base classes for readers of scripts: flags with types and defaults, parsed as by argparse."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.config.options import hint, show
from torchtitan.importers.command_line import CommandLine
from torchtitan.importers.translation import Meaning, is_finite

WORDS = {"true": True, "false": False}
KINDS = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false, or nothing"}


@dataclass(frozen=True)
class Flag:
    """A flag of a script. `choices`: the values that a text flag accepts."""

    kind: type
    default: Any = None
    choices: tuple[str, ...] = ()


class Given:
    """The flags of one command line by name, with the script's defaults for unset ones."""

    def __init__(self, line: CommandLine, flags: Mapping[str, Flag], meaning: Meaning) -> None:
        self._known, self._values = flags, dict[str, Any]()
        for raw_name, text in line.flags:  # the last of repeated flags wins
            name = _whole(raw_name, flags)
            flag = flags.get(name)
            if flag is None:
                meaning.refuse(name, text, f"a flag of {line.script}", hint(name, flags))
            elif (value := _value(flag, text)) is not None:
                self._values[name] = value
            else:
                choices = ", ".join(map(show, flag.choices))
                meaning.refuse(name, text, f"one of {choices}" if flag.choices else KINDS[flag.kind])

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name, self._known[name].default)


def _whole(name: str, flag_names: Iterable[str]) -> str:
    """Return the flag that `name` abbreviates, or `name` itself if it is ambiguous or unknown."""
    matches = [flag_name for flag_name in flag_names if flag_name.startswith(name)]
    return matches[0] if len(matches) == 1 and name not in matches else name


def _value(flag: Flag, text: str | None) -> Any | None:
    """Return the parsed value, or None if it is invalid for this flag."""
    if flag.kind is bool:
        return True if text is None else WORDS.get(text.lower())
    if text is None or (flag.choices and text.lower() not in flag.choices):
        return None
    try:
        value = flag.kind(text.lower() if flag.choices else text)
    except ValueError:
        return None
    return None if flag.kind is float and not is_finite(value) else value


class Script(ABC):
    """One command line of a script that takes `FLAGS`. `meaning_of` is its reader (meaning.Reader)."""

    FLAGS: ClassVar[Mapping[str, Flag]]

    def __init__(self, line: CommandLine) -> None:
        self.line, self.meaning = line, Meaning()
        self.given = Given(line, self.FLAGS, self.meaning)
        self.values, self.note, self.refuse = self.meaning.values, self.meaning.notes.append, self.meaning.refuse

    @classmethod
    def meaning_of(cls, line: CommandLine) -> Meaning:
        script = cls(line)
        script.read()
        return script.meaning

    @abstractmethod
    def read(self) -> None:
        """Fill in the meaning."""
