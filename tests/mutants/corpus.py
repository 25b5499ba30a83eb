"""The corpus of mutants: mistakes that other training stacks made, and drawn ones, each as one replacement of text.

A mutant is anchored by its file and by text that occurs there exactly once, not by line numbers, so it survives moved
lines and fails loudly when the code it changes is rewritten. `real.toml` has the mistakes with a public source,
`drawn.toml` the ones that drawing.py drew by a seed, and `results.json` the result of each method for each mutant
(scripts/mutants.py).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
RESULTS = FOLDER / "results.json"
DRAWN = "drawn"
"""The source of a mutant that drawing.py drew."""


class StaleMutant(AssertionError):
    """The text that a mutant replaces does not occur exactly once in its file."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    name: str
    source: str
    """Where the mistake was made: repository#number, arXiv:number, or DRAWN."""
    fault: str
    """The mutated code's behaviour, in one sentence."""
    file: str
    """The changed file, relative to the root of the repository."""
    old: str
    new: str
    first: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the table's rows that can show it; rows that agree with most of them are run first."""
    tests: tuple[str, ...] = ()
    """Modules of tests/ that own the changed code, for the method `modules`."""
    is_race: bool = False
    """True if the outcome depends on timing, so that a test may find it in one run and miss it in the next."""
    equivalent: str = ""
    """Reason why no number changes in float64 under any plan; empty for a mutant that changes one."""

    @property
    def is_drawn(self) -> bool:
        return self.source == DRAWN

    @property
    def digest(self) -> str:
        """Identify the change, so that a result of another version of it is not taken for this one's."""
        return hashlib.sha256("\0".join((self.old, self.new)).encode()).hexdigest()[:12]

    def mutated(self, text: str) -> str:
        """Return the text of the file with the mistake. Raise StaleMutant unless the old text occurs exactly once."""
        count = text.count(self.old)
        if count != 1:
            raise StaleMutant(
                f"{self.name}: its text occurs {count} times in {self.file}, not once; anchor it at the place where "
                f"the code does the same thing now:\n{self.old}"
            )
        return text.replace(self.old, self.new)

    @contextmanager
    def applied(self, root: Path) -> Iterator[None]:
        """Apply the mistake to a copy of the repository at `root`, and take it back at the end."""
        if root.resolve() == ROOT:
            raise ValueError(f"{self.name}: mutants are applied to copies, never to the working tree")
        path = root / self.file
        text = path.read_text()
        path.write_text(self.mutated(text))
        try:
            yield
        finally:
            path.write_text(text)


def load(*files: str) -> list[Mutant]:
    """Return the mutants of these files of the corpus; by default, all of them."""
    mutants = []
    for name in files or ("real.toml", "drawn.toml"):
        tables = tomli.loads((FOLDER / name).read_text())["mutant"]
        mutants += [Mutant(**{**table, "tests": tuple(table.get("tests", ()))}) for table in tables]
    return mutants


def read_results(path: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return {name: {"digest": of the mutant, method: its result}}; empty before the first run."""
    return json.loads(path.read_text()) if path.exists() else {}


def write_results(results: Mapping[str, Any], path: Path = RESULTS) -> None:
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
