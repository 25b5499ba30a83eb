"""What the ordinary and the quick run of the suite leave out (tests/support/selection.py)."""

import itertools
import json
from types import SimpleNamespace

import pytest

from tests.combinations import Combination, other_models, table
from tests.support import selection
from tests.support.selection import DurationRecorder, left_out_items, pairwise_cover, settings, slow_modules


@pytest.fixture(scope="module")
def rows() -> list[Combination]:
    return table() + other_models()


def test_the_cover_has_every_pair_of_settings_and_every_value(rows):
    cover = pairwise_cover(rows)
    assert cover < set(rows) and len(cover) < 0.4 * len(rows)

    def pairs(chosen):
        return {pair for row in chosen for pair in itertools.combinations(settings(row), 2)}

    def values(chosen):
        return {(name, value) for row in chosen for name, value in vars(row).items()}

    assert pairs(cover) == pairs(rows)
    assert values(cover) == values(rows)


def test_every_worker_chooses_the_same_rows(rows):
    assert pairwise_cover(rows) == pairwise_cover(iter(rows))


def item(nodeid: str, **params: object) -> SimpleNamespace:
    class Item(SimpleNamespace):
        __hash__ = object.__hash__

    return Item(nodeid=nodeid, callspec=SimpleNamespace(params=params))


def test_the_ordinary_run_leaves_out_rows_of_the_table_alone(rows):
    items = [item(f"tests/test_combinations.py::test_equal[{row}]", row=row) for row in rows]
    stepping = item("tests/test_optimizer_plans.py::test_x", row=Combination(optimizer="Lion"))
    other = item("tests/test_llama.py::test_y", row="a word")
    left_out = left_out_items([*items, stepping, other], quick=False)
    assert left_out == {each for each in items if each.callspec.params["row"] not in pairwise_cover(rows)}


def test_the_quick_run_leaves_out_the_longest_modules(tmp_path, monkeypatch):
    durations = tmp_path / "durations.json"
    monkeypatch.setattr(selection, "DURATIONS", durations)
    durations.write_text(json.dumps({"test_a": 100.0, "test_b": 10.0, "test_c": 30.0, "test_d": 1.0}))
    assert slow_modules(50) == {"test_a"}
    assert slow_modules(15) == {"test_a", "test_c"}
    monkeypatch.setattr(selection, "QUICK_SECONDS", 50.0)
    rows = [item(f"tests/test_combinations.py::test_equal[{n}]", row=Combination(ranks=n)) for n in (1, 2, 4)]
    left_out = left_out_items([*rows, item("tests/test_a.py::x"), item("tests/test_b.py::y[1::2]")], quick=True)
    assert {each.nodeid for each in left_out} == {"tests/test_a.py::x", *(row.nodeid for row in rows[1:])}


def test_a_run_adds_up_what_each_module_took(tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "DURATIONS", tmp_path / "durations.json")
    recorder = DurationRecorder()
    for nodeid, duration in (
        ("tests/test_a.py::x", 1.5),
        ("tests/test_a.py::y[a/b::c]", 0.25),
        ("tests/test_b.py::z", 2.0),
    ):
        recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, duration=duration))
    recorder.pytest_sessionfinish(pytest.ExitCode.INTERRUPTED)
    assert not selection.DURATIONS.exists()
    recorder.pytest_sessionfinish(pytest.ExitCode.OK)
    assert json.loads(selection.DURATIONS.read_text()) == {"test_a": 1.8, "test_b": 2.0}
