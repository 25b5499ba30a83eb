"""What readers of scripts share: a command line's flags, and the job that they come to mean."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torchtitan.importers.command_line import CommandLine
from torchtitan.importers.flags import Flag, Given
from torchtitan.importers.meaning import Meaning


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
