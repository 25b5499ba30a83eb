"""What a reader makes of a command line: today's options, and all that is to be said beside them."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchtitan.config.options import Fault, show
from torchtitan.importers.command_line import CommandLine

SAID_BY = "the command line"


@dataclass
class Meaning:
    """`values`: options by dotted name. `notes`: what a reader of the job should know, a line each. `faults`: what has
    no meaning here, or none at all; with any of them there is no job. `said_by`: the line, or a file; `dashes`: ahead
    of the names in it. `measures`: of a line that trains nothing, the words with which `torchtitan evaluate` does what
    it did with the job. `launched`: options of the line's launcher that the reader has read itself.
    """

    said_by: str = SAID_BY
    dashes: str = "--"
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    measures: list[str] | None = None
    launched: set[str] = field(default_factory=set)

    def refuse(self, flag: str, given: Any, allowed: str, remedy: str = "") -> None:
        self.faults.append(Fault(self.said_by, f"{self.dashes}{flag}", show(given), allowed, remedy))


def is_finite(number: float) -> bool:
    """Whether it is a number, and one that a float can hold."""
    return abs(number) <= sys.float_info.max


Reader = Callable[[CommandLine], Meaning]
