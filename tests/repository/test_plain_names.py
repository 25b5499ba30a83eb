"""Names say what they hold. Docstrings begin with a sentence, and the names that they explain exist. The limits below
only go down.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.jobs import ROOT

PACKAGE = ROOT / "torchtitan"

# fmt: off
UNCLEAR_NAMES = {
    "ahead", "alone", "apart", "asked", "away", "bad", "behind", "beside", "counted", "each", "everybody", "found",
    "given", "gone", "here", "hides", "how", "kept", "known", "lacking", "learned", "leaves", "left", "made", "makes",
    "marked", "meant", "meet", "mine", "named", "nobody", "others", "own", "reads", "rest", "said", "seen", "sees",
    "so", "somebody", "such", "taken", "theirs", "there", "together", "told", "wanted", "went", "what", "who",
    "whole", "whose", "why", "word", "words", "written",
}
# fmt: on
"""Participles, pronouns, adverbs and question words: they do not say what a variable holds."""

# fmt: off
FRAGMENT_OPENINGS = {
    "after", "also", "as", "at", "before", "behind", "beside", "between", "by", "for", "from", "how", "in", "like",
    "of", "on", "once", "over", "that", "those", "through", "to", "until", "what", "when", "where", "whether", "which",
    "while", "who", "whose", "why", "with", "without",
}
# fmt: on
"""A docstring that begins with one of these has, as a rule, neither a subject nor a verb."""

EXPLAINED = re.compile(r"(?:^|[.:]) *(?:\* )?((?:`\w+`(?:, | and )?)+): ", re.MULTILINE)
"""Names that a sentence of a docstring explains, as in "`x`, `y`: two numbers"."""

LIMITS: dict[str, tuple[int, int]] = {
    "launcher": (1, 0),
    "optimizers": (1, 0),
    "plugins": (1, 0),
}
"""Room -> (unclear names, fragments) that it still has. Lower them with every file that you clean up."""


SHARED_CLASS_NAMES = {"Adapter"}
"""Public classes of several modules: the section of a job, and what it makes. The set only shrinks."""


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield every name that a module binds: variables, arguments, functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name


def is_unclear(name: str) -> bool:
    return name.strip("_") in UNCLEAR_NAMES


def docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield text


def is_fragment(docstring: str) -> bool:
    return docstring.split()[0].strip(",.:").lower() in FRAGMENT_OPENINGS


def names_of(node: ast.AST) -> set[str]:
    """Return the arguments of a function or of a class's methods, and what a class or a module binds."""
    names = {child.arg for child in ast.walk(node) if isinstance(child, ast.arg)}
    if isinstance(node, ast.ClassDef):
        names |= {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}
    if isinstance(node, (ast.ClassDef, ast.Module)):
        names |= set(bound_names(node))
    return names


def stale_names(tree: ast.Module) -> Iterator[str]:
    """Yield every name that a docstring explains, although what it documents has no such argument or attribute."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for match in EXPLAINED.finditer(ast.get_docstring(node) or ""):
                yield from set(re.findall(r"\w+", match[1])) - names_of(node) - {"and"}


def counts(paths: list[Path]) -> tuple[int, int]:
    """Return the numbers of unclear names and of fragments in these files."""
    trees = [ast.parse(path.read_text()) for path in paths]
    names = sum(is_unclear(name) for tree in trees for name in bound_names(tree))
    return names, sum(is_fragment(text) for tree in trees for text in docstrings(tree))


def rooms() -> dict[str, list[Path]]:
    files: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        files.setdefault(path.relative_to(PACKAGE).parts[0].removesuffix(".py"), []).append(path)
    return files


@pytest.mark.parametrize("room", rooms())
def test_names_and_docstrings_become_clearer(room):
    names, fragments = counts(rooms()[room])
    most_names, most_fragments = LIMITS.get(room, (0, 0))
    assert names <= most_names, f"{names} unclear names, at most {most_names}: name what a variable holds"
    assert fragments <= most_fragments, (
        f"{fragments} fragments, at most {most_fragments}: begin with a verb or a subject"
    )
    assert (names, fragments) == (most_names, most_fragments), f"lower the limit of {room} to {(names, fragments)}"


@pytest.mark.parametrize("room", rooms())
def test_names_that_docstrings_explain_exist(room):
    assert not [f"{path}: {name}" for path in rooms()[room] for name in stale_names(ast.parse(path.read_text()))]


def test_stale_names_are_found():
    tree = ast.parse('''
"""Constants. `LIMIT`, `REST`: the most; the others."""
LIMIT = 1
def load(path):
    """Load `path`: it is there.

    `path` and `strict`: what to load, and how. `retries`: how often.
    """
class Loader:
    """Loads. `path`: as in load. `names`, `kind`: after it."""
    names: list[str]
    def __init__(self, path): self.kind = 1
''')
    assert Counter(stale_names(tree)) == {"REST": 1, "strict": 1, "retries": 1}


def test_no_two_public_classes_share_a_name():
    names = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in names.items() if count > 1} == SHARED_CLASS_NAMES


def test_the_rules_find_what_they_are_for():
    tree = ast.parse('''
"""Of a batch, what is read."""
def told(own, batch_size): "Whether it is so."
def load(path): "Load a file."
found = rows = 1
''')
    assert Counter(filter(is_unclear, bound_names(tree))) == {"told": 1, "own": 1, "found": 1}
    assert [text for text in docstrings(tree) if is_fragment(text)] == [
        "Of a batch, what is read.",
        "Whether it is so.",
    ]
