"""scripts/simulate_overlap.py: its times against the schedule table's, a lower bound, and the figures in the docs."""

import importlib

import pytest

from tests.support.jobs import ROOT
from torchtitan.parallelisms.pipeline.actions import find_faults
from torchtitan.parallelisms.pipeline.simulator import Costs, simulate
from torchtitan.parallelisms.pipeline.tables import build_table


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("simulate_overlap")


@pytest.mark.parametrize("a", [0, 0.5, 1])
@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV"])
def test_without_overlap_times_equal_the_schedule_table(script, schedule, a):
    """Each of a rank's two stages takes attention, experts and two all-to-alls; weight gradients need no all-to-all."""
    table = build_table(schedule, 2, 5, 2)
    costs = Costs(4 + 4 * a, 4 + 4 * a, 4)
    assert script.step(table, "none", a, overlap=False) == simulate(table, costs).makespan


@pytest.mark.parametrize("policy", ["none", "full_keep_comm"])
def test_rejected_orders_are_legal_and_not_below_the_bound(script, policy):
    p, m = 3, 7
    table = build_table("DualPipeV", p, m, 2, overlap=True)
    for change in script.TRIED.values():
        changed = change(table)
        assert changed != table and find_faults(changed, p, 2 * p, m) == []
        assert script.least(p, m, 1) <= script.step(changed, policy, 1, overlap=True)


def test_a_rank_has_one_all_to_all_in_flight(script):
    """With long all-to-alls, a step takes at least the 8 of each microbatch, one after the other."""
    p, m, a = 2, 12, 8
    table = build_table("DualPipeV", p, m, 2, overlap=True)
    assert 8 * m * a <= script.step(table, "none", a, overlap=True) < 1.3 * 8 * m * a


def test_documented_figures_are_the_simulated_ones(script):
    """The figures are for p = 4 and m = 16, relative to ZBV without overlap."""
    lines = (ROOT / "docs/dualpipev.md").read_text().splitlines()
    (row,) = (line for line in lines if line.startswith("| DualPipeV as shipped |"))
    zbv = build_table("ZBVZeroBubble", 4, 16, 2)
    pairs = build_table("DualPipeV", 4, 16, 2, overlap=True)
    for policy, cell in zip(("none", "full_keep_comm", "full"), row.split("|")[2:5], strict=True):
        for a, figure in zip((1, 0.5), cell.split("/"), strict=True):
            ratio = script.step(pairs, policy, a, overlap=True) / script.step(zbv, policy, a, overlap=False)
            assert f"{ratio:.3f}" == figure.strip()
    bounds = " and ".join(
        f"{script.least(p, m, 1) / script.step(build_table('ZBVZeroBubble', p, m, 2), 'none', 1, overlap=False):.3f}"
        for p, m in ((4, 16), (8, 32))
    )
    assert f"12m + 12p - 13 units, {bounds} of ZBV's" in " ".join(lines)
    assert script.least(4, 16, 1) == 12 * 16 + 12 * 4 - 13
