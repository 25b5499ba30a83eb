"""What the ordinary and the quick run of the suite leave out (tests/support/selection.py)."""

import itertools
import json
from types import SimpleNamespace

import pytest

from tests.plans.combinations import Combination, other_models, table
from tests.support import selection
from tests.support.selection import (
    AXES,
    DurationRecorder,
    expected_seconds,
    left_out_items,
    longest_items,
    pairwise_cover,
    settings,
    slow_modules,
)


@pytest.fixture(scope="module")
def rows() -> list[Combination]:
    return table() + other_models()


def test_the_cover_has_every_pair_of_settings_and_every_value(rows):
    cover = pairwise_cover(rows)
    assert cover < set(rows) and len(cover) < 0.46 * len(rows)

    def pairs(chosen):
        return {pair for row in chosen for pair in itertools.combinations(settings(row), 2)}

    def values(chosen):
        return {(name, value) for row in chosen for name, value in vars(row).items()}

    def under_axes(chosen):
        """Return the axes, each with the settings and the models in full training under it."""
        axes = [(axis, row) for row in chosen for axis in AXES if getattr(row, axis) > 1]
        trained = {(axis, row.model) for axis, row in axes if row.adapter == "none"}
        return trained | {(axis, row.multi_token_prediction) for axis, row in axes}

    assert pairs(cover) == pairs(rows)
    assert values(cover) == values(rows)
    assert under_axes(cover) == under_axes(rows) >= {("pp", "llama3.2"), ("tp", "opt")}


def test_every_worker_chooses_the_same_rows(rows):
    assert pairwise_cover(rows) == pairwise_cover(iter(rows))


def item(nodeid: str, **params: object) -> SimpleNamespace:
    class Item(SimpleNamespace):
        __hash__ = object.__hash__

    return Item(nodeid=nodeid, callspec=SimpleNamespace(params=params))


def test_the_ordinary_run_takes_a_cover_of_the_table(rows, monkeypatch):
    monkeypatch.setattr(selection, "ORDINARY_SECONDS", 10.0**6)
    cover = pairwise_cover(rows)
    items = [item(f"tests/plans/test_combinations.py::test_equal[{row}]", row=row) for row in rows]
    stepping = item("tests/plans/test_optimizer_plans.py::test_x", row=Combination(optimizer="Lion"))
    other = item("tests/models/test_llama.py::test_y", row="a word")
    left_out = left_out_items([*items, stepping, other], quick=False)
    assert left_out == {test for test in items if test.callspec.params["row"] not in cover}


def test_the_ordinary_run_leaves_out_the_longest_tests(tmp_path, monkeypatch):
    durations = {
        "modules": {"test_a": 50.0, "test_b": 10.0, "test_c": 7.0},
        "tests": {"tests/test_a.py::x": 30.0, "tests/test_b.py::z": 4.0},
    }
    monkeypatch.setattr(selection, "DURATIONS", tmp_path / "durations.json")
    selection.DURATIONS.write_text(json.dumps(durations))
    items = [
        item(f"tests/{name}")
        for name in ("test_a.py::x", "test_a.py::y", "test_b.py::z", "test_b.py::w", "room/test_c.py::v")
    ]
    x, y, z, w, v = items
    assert expected_seconds(items) == {x: 30.0, y: 20.0, z: 4.0, w: 6.0, v: 0.0}
    for budget, longest in ((60.0, set()), (59.0, {x}), (29.0, {x, y}), (5.0, {x, y, w}), (0.0, {x, y, w, z})):
        assert longest_items(items, set(), budget) == longest
    assert longest_items(items, {x}, 29.0) == {y}
    monkeypatch.setattr(selection, "ORDINARY_SECONDS", 59.0)
    assert left_out_items(items, quick=False) == {x}


def test_the_quick_run_leaves_out_the_longest_modules(tmp_path, monkeypatch):
    durations = tmp_path / "durations.json"
    monkeypatch.setattr(selection, "DURATIONS", durations)
    durations.write_text(json.dumps({"modules": {"test_a": 100.0, "test_b": 10.0, "test_c": 30.0, "test_d": 1.0}}))
    assert slow_modules(50) == {"test_a"}
    assert slow_modules(15) == {"test_a", "test_c"}
    monkeypatch.setattr(selection, "QUICK_SECONDS", 50.0)
    rows = [item(f"tests/plans/test_combinations.py::test_equal[{n}]", row=Combination(ranks=n)) for n in (1, 2, 4)]
    left_out = left_out_items([*rows, item("tests/test_a.py::x"), item("tests/test_b.py::y[1::2]")], quick=True)
    assert {test.nodeid for test in left_out} == {"tests/test_a.py::x", *(row.nodeid for row in rows[1:])}


def test_a_run_adds_up_the_time_of_tests_and_modules(tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "DURATIONS", tmp_path / "durations.json")
    recorder = DurationRecorder()
    for nodeid, when, duration in (
        ("tests/test_a.py::x", "setup", 4.0),
        ("tests/test_a.py::x", "call", 1.5),
        ("tests/test_a.py::y[a/b::c]", "call", 0.25),
        ("tests/test_b.py::z", "call", 2.0),
        ("tests/test_b.py::z", "teardown", 1.0),
        ("tests/room/test_a.py::w", "call", 0.5),
    ):
        recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, when=when, duration=duration))
    recorder.pytest_sessionfinish(pytest.ExitCode.INTERRUPTED)
    assert not selection.DURATIONS.exists()
    recorder.pytest_sessionfinish(pytest.ExitCode.OK)
    assert json.loads(selection.DURATIONS.read_text()) == {
        "modules": {"room/test_a": 0.5, "test_a": 5.8, "test_b": 3.0},
        "tests": {"tests/test_a.py::x": 1.5, "tests/test_b.py::z": 2.0},
    }
