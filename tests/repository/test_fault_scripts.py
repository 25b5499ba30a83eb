"""Tests of the logic of fault_sweep.py and stress_ranks.py; docs/reliability.md has their results."""

import importlib
import json
import random

import pytest

from tests.support.jobs import ROOT
from torchtitan.config.options import options


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return {name: importlib.import_module(name) for name in ("fault_sweep", "fault_parts", "stress_ranks")}


def test_every_named_point_is_a_function(scripts):
    parts = scripts["fault_parts"]
    points = parts.save_points()
    assert len(points) >= 50 and len({(point.point, point.after) for point in points}) == len(points)
    for name in {point.point for point in points} | set(parts.RETENTION) | set(parts.EXPORT):
        module, _, path = name.partition(":")
        owner = importlib.import_module(module if module == "shutil" else parts.CHECKPOINT + module)
        for part in path.split("."):
            owner = getattr(owner, part)
        assert callable(owner), name


def test_every_place_of_a_step_is_a_function(scripts):
    for module, path in scripts["fault_sweep"].PLACES.values():
        owner = importlib.import_module(module)
        for part in path.split("."):
            owner = getattr(owner, part)
        assert callable(owner), path


def test_cases_have_distinct_names_and_known_faults(scripts):
    parts, known_options = scripts["fault_parts"], options()
    kinds = {"kill", "kill in export", "slow disk", "tracker absent", "tracker raises", "tracker blocks"}
    kinds |= parts.AT_A_STEP.keys()
    for name, make in parts.PARTS.items():
        cases = make()
        assert len({case.name for case in cases}) == len(cases) > 0, name
        for case in cases:
            assert {fault.kind for start in case.faults for fault in start} <= kinds
            assert case.options.keys() <= known_options.keys()


def test_the_table_has_the_newest_row_of_each_case(scripts, tmp_path):
    sweep, results = scripts["fault_sweep"], tmp_path / "results.jsonl"
    assert sweep.rows_of(results) == []
    row = {"part": "clock", "case": "a day back", "faults": 1, "codes": [0], "restarts": 0, "good": True}
    rows = [row | {"same": False}, row | {"same": True}]
    results.write_text("".join(json.dumps(row_of_case) + "\n" for row_of_case in rows))
    assert sweep.table(sweep.rows_of(results)).splitlines()[2:] == ["| clock | a day back | 1 | 0 | 0 | the same |"]


def test_a_case_passes_only_with_equal_tensors_and_no_leftovers(scripts, tmp_path, monkeypatch):
    sweep, case = scripts["fault_sweep"], scripts["fault_parts"].Case("kill", [[scripts["fault_parts"].Fault("kill")]])
    monkeypatch.setattr(sweep, "last_state", lambda folder, steps: "bits")
    (tmp_path / "log-0").write_text("restart 1 of 40 in 0.05 s: rank 1 was ended by SIGKILL\n")
    assert sweep.judge(case, tmp_path, [0], "bits")["good"]
    assert not sweep.judge(case, tmp_path, [0], "other bits")["good"]
    assert not sweep.judge(case, tmp_path, [5], "bits")["good"]
    (tmp_path / "run.lock").touch()
    assert sweep.judge(case, tmp_path, [0], "bits")["left"] == ["run.lock"]


def test_a_killed_export_passes_if_the_next_start_exports(scripts, tmp_path, monkeypatch):
    sweep, case = scripts["fault_sweep"], scripts["fault_parts"].cases_of_exports()[0]
    monkeypatch.setattr(sweep, "last_state", lambda folder, steps: "bits")
    monkeypatch.setattr(sweep, "check_complete", lambda folder: None)
    (tmp_path / "log-0").write_text("training is complete\n")
    assert sweep.judge(case, tmp_path, [10, 0], "bits")["good"]
    assert not sweep.judge(case, tmp_path, [0, 0], "bits")["good"]
    assert not sweep.judge(case, tmp_path, [10, 10], "bits")["good"]


def test_the_stress_test_distinguishes_crashes_from_planted_faults(scripts):
    stress = scripts["stress_ranks"]
    for line in ("Fatal Python error: Segmentation fault", "rank 1 was ended by SIGABRT", "RankCrashed: --- rank 0"):
        assert stress.CRASH.search(line)
    assert not stress.CRASH.search("rank 1 was ended by SIGKILL")
    drawn = [stress.draw(random.Random(0)) for _ in range(2)]
    assert drawn[0] == drawn[1] and drawn[0]["end"] in stress.ENDS


def test_the_crash_rate_bound_is_the_rule_of_three(scripts):
    row = {"crash": [], "unexpected": False, "end": "pool"}
    conclusion = scripts["stress_ranks"].conclusion([row] * 300)
    assert "300 runs" in conclusion and "0 crashed below Python" in conclusion and "3/300 = 1.00 %" in conclusion
    assert "not bounded" in scripts["stress_ranks"].conclusion([row, row | {"crash": ["core"]}])
