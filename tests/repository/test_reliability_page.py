"""Every test that docs/reliability.md names exists."""

import ast
import re

import pytest

from tests.support.jobs import ROOT

PAGE = (ROOT / "docs/reliability.md").read_text()


def named_tests(text: str) -> list[tuple[str, str]]:
    """Return the tests that a page names, as file and function."""
    return sorted(set(re.findall(r"`((?:\w+/)?test_\w+\.py)::(test_\w+)`", text)))


NAMED = named_tests(PAGE)


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_every_test_that_the_page_names_is_there(file):
    tree = ast.parse((ROOT / "tests" / file).read_text())
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {name for where, name in NAMED if where == file} <= defined


def test_every_row_names_a_test():
    tables = [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)]
    rows = [row for head, _, *rows in tables if head.startswith(("| fault", "| file")) for row in rows]
    assert rows and [row for row in rows if "::test_" not in row] == []
