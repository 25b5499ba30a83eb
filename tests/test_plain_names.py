"""Names say what they hold, and docstrings begin with a sentence. The limits below only go down."""

import ast
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

LIMITS: dict[str, tuple[int, int]] = {
    "launcher": (1, 0),
    "optimizers": (1, 0),
    "plugins": (1, 0),
}
"""Room -> (unclear names, fragments) that it still has. Lower them with every file that you clean up."""


def bound_names(tree: ast.Module) -> Iterator[str]:
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
