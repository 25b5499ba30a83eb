"""scripts/simulate_overlap.py: clocks of ranks against the simulator of tables, a bound, and what the docs say."""

import importlib

import pytest

from tests.support.jobs import ROOT
from torchtitan.parallelisms.pipeline.actions import faults_of
from torchtitan.parallelisms.pipeline.runtime import build_table
from torchtitan.parallelisms.pipeline.simulator import Costs, simulate


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("simulate_overlap")


@pytest.mark.parametrize("a", [0, 0.5, 1])
@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV"])
def test_without_overlap_nodes_take_what_their_actions_take(script, schedule, a):
    """Attention, experts and two all-to-alls for each of the rank's two stages; gradients of weights need no other."""
    table = build_table(schedule, 2, 5, 2)
    costs = Costs(4 + 4 * a, 4 + 4 * a, 4)
    assert script.step(table, "none", a, overlap=False) == simulate(table, costs).makespan


@pytest.mark.parametrize("policy", ["none", "full_keep_comm"])
def test_what_was_tried_is_legal_and_not_under_the_bound(script, policy):
    p, m = 3, 7
    table = build_table("DualPipeV", p, m, 2, overlap=True)
    for change in script.TRIED.values():
        changed = change(table)
        assert changed != table and faults_of(changed, p, 2 * p, m) == []
        assert script.least(p, m, 1) <= script.step(changed, policy, 1, overlap=True)


def test_a_rank_has_one_all_to_all_on_its_way_at_a_time(script):
    """Where these are long, the pairs cannot be faster than the 8 of each microbatch, one behind the other."""
    p, m, a = 2, 12, 8
    table = build_table("DualPipeV", p, m, 2, overlap=True)
    assert 8 * m * a <= script.step(table, "none", a, overlap=True) < 1.3 * 8 * m * a


def test_the_docs_have_what_is_simulated(script):
    """p = 4 and m = 16, to ZBV that waits for each all-to-all."""
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
