"""A script's flags: what each takes and what it is without being given, as argparse would read them.

What readers of scripts share: a command line's flags, and the job that they come to mean.
"""

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
    """`choices`: of text, all that the script takes."""

    kind: type
    default: Any = None
    choices: tuple[str, ...] = ()


class Given:
    """The flags of one command line, by their names, with the script's defaults behind them."""

    def __init__(self, line: CommandLine, known: Mapping[str, Flag], meaning: Meaning) -> None:
        self._known, self._values = known, dict[str, Any]()
        for given, text in line.flags:  # of one given twice the last counts
            name = _whole(given, known)
            flag = known.get(name)
            if flag is None:
                meaning.refuse(name, text, f"a flag of {line.script}", hint(name, known))
            elif (value := _value(flag, text)) is not None:
                self._values[name] = value
            else:
                choices = ", ".join(map(show, flag.choices))
                meaning.refuse(name, text, f"one of {choices}" if flag.choices else KINDS[flag.kind])

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name, self._known[name].default)


def _whole(name: str, known: Iterable[str]) -> str:
    """The flag that begins so, where it is one alone."""
    begun = [each for each in known if each.startswith(name)]
    return begun[0] if len(begun) == 1 and name not in begun else name


def _value(flag: Flag, text: str | None) -> Any | None:
    """None where it is none of this flag."""
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
        """Fills in the meaning."""
