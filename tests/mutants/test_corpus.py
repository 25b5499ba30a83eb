"""The corpus of mutants applies to today's code, its results belong to it, and some are found again."""

import ast
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts import mutants as script
from tests.mutants import methods, page
from tests.mutants.corpus import DRAWN, ROOT, Mutant, StaleMutant, load, read_results
from tests.mutants.drawing import OPERATORS, anchored, draw, sites
from tests.mutants.methods import METHODS, judged, ordered, row_tests, run_tests

EVERY = load()
FOUND_AGAIN = 1, 2
"""Mutants found again in the ordinary and in the full run, at about fifteen seconds each."""


@pytest.mark.parametrize("mutant", EVERY, ids=lambda mutant: mutant.name)
def test_applies_to_the_code(mutant):
    text = (ROOT / mutant.file).read_text()
    mutated = mutant.mutated(text)
    assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(text))
    assert mutated not in text and mutant.file.startswith("torchtitan/")


def test_names_and_sources():
    assert max(Counter(mutant.name for mutant in EVERY).values()) == 1
    real, drawn = load("real.toml"), load("drawn.toml")
    assert len(real) >= 40 and len(drawn) == 20
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+|arXiv:\d{4}\.\d{5}", mutant.source) for mutant in real)
    assert {mutant.source for mutant in drawn} == {DRAWN}
    assert all(re.fullmatch(r"[A-Z].*\.", mutant.fault) for mutant in EVERY)
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in EVERY}) == len(EVERY)


def test_first_rows_name_fields_of_the_table():
    fields = vars(next(iter(row_tests().values()))).keys()
    assert all(mutant.first.keys() <= fields for mutant in EVERY)
    assert all((ROOT / "tests" / f"{name}.py").exists() for mutant in EVERY for name in mutant.tests)


def test_stale_mutants_say_so():
    mutant = Mutant(name="a", source=DRAWN, fault="A sign is wrong.", file="x.py", old="a + b", new="a - b")
    assert mutant.mutated("c = a + b\n") == "c = a - b\n"
    for text, count in (("c = b + a", 0), ("a + b, a + b", 2)):
        with pytest.raises(StaleMutant, match=f"a: its text occurs {count} times in x.py, not once"):
            mutant.mutated(text)


def test_only_copies_are_changed(tmp_path):
    mutant = Mutant(name="a", source=DRAWN, fault="A sign is wrong.", file="x.py", old="+", new="-")
    (tmp_path / "x.py").write_text("a + b")
    with pytest.raises(KeyError), mutant.applied(tmp_path):
        assert (tmp_path / "x.py").read_text() == "a - b"
        raise KeyError
    assert (tmp_path / "x.py").read_text() == "a + b"
    with pytest.raises(ValueError, match="never to the working tree"), mutant.applied(ROOT):
        pass


def test_results_belong_to_the_corpus():
    results, rows = read_results(), row_tests()
    assert results.keys() <= {mutant.name for mutant in EVERY}
    for by_method in results.values():
        for method in ("table", "full"):
            result = by_method.get(method, {"found": False})
            assert not result["found"] or result["by"] in rows


def test_rows_that_agree_come_first():
    ids = ordered(row_tests(), {"tp": 2, "sequence_parallel": False})
    rows = [row_tests()[test] for test in ids]
    agreeing = [(row.tp == 2) + (not row.sequence_parallel) for row in rows]
    assert agreeing == sorted(agreeing, reverse=True)
    assert (rows[0].ranks, rows[0].compile) == (2, "no")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("assert 1 == 2", "differs"),
        ("RankFailed: --- rank 0 ---\nTraceback (most recent call last)\n--- rank 1 ---\nno answer within", "raises"),
        ("RankFailed: --- rank 0 ---\nno answer within 150 s", "hangs"),
    ],
)
def test_a_report_is_judged(text, kind):
    suite = ElementTree.Element("testsuite")
    ElementTree.SubElement(suite, "testcase", name="test_a[1]")
    case = ElementTree.SubElement(suite, "testcase", name="test_a[2]")
    ids = ["x.py::test_a[1]", "x.py::test_a[2]"]
    assert judged(suite, ids) == {"found": False, "tried": 2}
    ElementTree.SubElement(case, "failure", message="").text = text
    assert judged(suite, ids) == {"found": True, "by": ids[1], "kind": kind, "tried": 2}


def test_drawn_mutants_are_drawn_by_the_seed_alone():
    assert draw(3, 5) == draw(3, 5) != draw(4, 5)
    assert {site.operator for site in sites()} <= OPERATORS.keys()
    for site in list(sites())[::40]:
        old, new = anchored(site)
        assert (ROOT / site.file).read_text().count(old) == 1 and old != new


def test_the_page_shows_the_results():
    assert page.PAGE.read_text() == page.written(page.PAGE.read_text()), "run scripts/mutants.py --write"


def test_results_of_another_version_do_not_count():
    mutant = EVERY[0]
    results = {mutant.name: {"digest": mutant.digest, "table": {"found": True}}}
    assert page.current(results, mutant)["table"]["found"]
    assert not page.current(results, replace(mutant, new="pass"))


def test_methods_stop_where_one_finds_it(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "torchtitan/parallelisms", tmp_path / "torchtitan/parallelisms")
    calls = []

    def run_tests(copy, ids):
        calls.append(ids)
        return {"found": len(calls) == 2, "tried": 1, "seconds": 1.0}

    monkeypatch.setattr(script, "run_tests", run_tests)
    monkeypatch.setattr(script, "METHODS", {name: lambda mutant, name=name: [name] for name in METHODS})
    mutant = next(mutant for mutant in EVERY if mutant.file.startswith("torchtitan/parallelisms"))
    results = dict(script.examine(mutant, tuple(METHODS), tmp_path, {}))
    assert [result["found"] for result in results.values()] == [False, True] and calls == [["table"], ["modules"]]
    assert not dict(script.examine(mutant, tuple(METHODS), tmp_path, results))  # nothing is left to do


def test_the_job_is_of_the_row_that_found_the_mutant_or_has_the_ranks_that_it_needs(monkeypatch):
    """What found it may be another test, and a result of a job names no test at all."""
    monkeypatch.setattr(methods, "_answer", lambda tree, question, fields: "" if question == "obstacle" else fields)
    mutant = next(mutant for mutant in EVERY if mutant.name == "loss-divided-by-own-tokens")
    curve = {"found": True, "by": "51.582 % at most"}
    by_test = {"curve": curve, "modules": {"found": True, "by": "tests/core/test_files.py::test_a_file"}}
    assert methods.run_job(ROOT, mutant, by_test) == {"ranks": 2} | dict(mutant.first)
    test, row = next(iter(row_tests().items()))
    assert methods.run_job(ROOT, mutant, {"curve": curve, "table": {"found": True, "by": test}}) == vars(row)


def test_the_list_names_sources_and_files(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["mutants.py", "--list"])
    assert script.main() == 0
    assert len(capsys.readouterr().out.splitlines()) == len(EVERY)


def test_some_are_found_again(is_full_run):
    """Rows that found a mutant find it again: a sample, chosen again whenever the corpus changes."""
    results = read_results()
    surely = [mutant for mutant in EVERY if not mutant.is_race]
    differing = [m for m in surely if page.current(results, m).get("table", {}).get("kind") == "differs"]
    cheap = [m for m in differing if row_tests()[results[m.name]["table"]["by"]].ranks == 2]
    number = FOUND_AGAIN[is_full_run]
    with script.copied_tree() as copy:
        for mutant in sorted(cheap, key=lambda mutant: mutant.digest)[:number]:
            with mutant.applied(copy):
                result = run_tests(Path(copy), [results[mutant.name]["table"]["by"]])
            assert result["found"], f"{mutant.name}: {json.dumps(result)}"
