"""Tests of schedule tables and their simulation: equality with torch's tables and with closed formulas.

Definitions are the simulator's: F, I, W of all stages of a rank, B = I + W, p ranks, m microbatches, v stages a rank,
bubble = makespan - busy time, all ranks end at a common barrier.
"""

from fractions import Fraction
from itertools import product
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from torchtitan.core.errors import JobError
from torchtitan.parallelisms.pipeline.actions import (
    ScheduleTableError,
    count_stages,
    find_faults,
    parse_action,
    running_order,
    stage_ranks,
    with_full_backward,
)
from torchtitan.parallelisms.pipeline.cut import SCHEDULES, stages_of_rank
from torchtitan.parallelisms.pipeline.simulator import Costs, simulate
from torchtitan.parallelisms.pipeline.tables import build_table

HALF, TENTH = Fraction(1, 2), Fraction(1, 10)
TRIPLES = [(f, i, w) for f, i, w in product((HALF, 1, 2), (HALF, 1, 3 * HALF), (HALF, 1, 3 * HALF))]
SHAPES = [(p, n * p) for p in (2, 4, 8) for n in (2, 4)]


def simulate_schedule(schedule, p, m, v=None, costs=(1, 1, 1), **options):
    return simulate(build_table(schedule, p, m, v), Costs(*costs), **options)


def common_bubble(simulation):
    """Return the bubble of every rank, which has to be the same."""
    (idle,) = set(simulation.bubbles)
    return idle


# Tables


def build_torch_table(schedule, p, m, v):
    """Build the table of torch's schedule, without actions that only reduce gradients."""
    ops = get_schedule_ops(schedule, p, m, v, with_comms=False)
    actions = [[a for a in row if a is not None and a.computation_type.value != "REDUCE_GRAD"] for row in ops]
    return [[parse_action(str(action)) for action in row] for row in actions]


@pytest.mark.parametrize(("p", "m"), [*SHAPES, (4, 10)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tables_equal_those_of_torch_where_these_are_valid(schedule, p, m):
    for v in (2, 3) if not SCHEDULES[schedule].fixed_stages else (SCHEDULES[schedule].stages_per_rank,):
        ours, reference = build_table(schedule, p, m, v, overlap=True), build_torch_table(schedule, p, m, v)
        torch_faults = find_faults(reference, p, p * v, m)
        assert ours == reference or (schedule == "1F1B" and torch_faults)
        assert find_faults(ours, p, p * v, m) == []


@pytest.mark.parametrize("m", [1, 2, 3, 5, 7])
def test_tables_of_few_microbatches_are_valid(m):
    for schedule in SCHEDULES.keys() - {"DualPipeV"}:
        table = build_table(schedule, 4, m)
        assert find_faults(table, 4, count_stages(table), m) == []
    assert common_bubble(simulate_schedule("1F1B", 4, m)) == 9


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tables_place_stages_as_the_cut_does(schedule):
    traits, table = SCHEDULES[schedule], build_table(schedule, 4, 8)
    stages = count_stages(table)
    ranks = {stage: rank for rank in range(4) for stage in stages_of_rank(rank, 4, stages, traits.style)}
    assert stage_ranks(table) == ranks


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_torchs_runtime_accepts_the_tables(schedule):
    for merge_backward, overlap in product((False, True), repeat=2):
        table = build_table(schedule, 4, 8, merge_backward=merge_backward, overlap=overlap)
        assert find_faults(table, 4, count_stages(table), 8) == []
        kinds = {single.kind for row in table for action in row for single in action.singles}
        assert not (merge_backward and kinds & {"I", "W"})
        assert overlap or not any(action.parts for row in table for action in row)
        v = count_stages(table) // 4
        stages = [SimpleNamespace(num_stages=4 * v, group_size=4, group_rank=0, submod=None) for _ in range(v)]
        runtime = _PipelineScheduleRuntime(stages, 8)
        order = {rank: [_Action.from_str(str(action)) for action in row] for rank, row in enumerate(table)}
        runtime._prepare_schedule_with_comms(order)  # raises where an action would not get its inputs
        lowered = runtime.pipeline_order_with_comms
        assert {rank: [a for a in row if a.is_compute_op] for rank, row in lowered.items()} == order


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("DualPipeV", 4, 7), "at least 8 microbatches"),
        (("Interleaved1F1B", 4, 9), "the nearest numbers that would do: 8, 10"),
        (("ZBVZeroBubble", 4, 8, 3), "exactly 2 stages per rank"),
        (("1F1B", 4, 8, 2), "exactly 1 stage per rank"),
        (("2F2B", 4, 8), "choose one of GPipe"),
    ],
)
def test_impossible_schedules_are_refused(arguments, message):
    with pytest.raises(JobError, match=message):
        build_table(*arguments)


# Bubbles


def bubbles(table, costs):
    return [common_bubble(simulate(table, Costs(*triple))) for triple in costs]


@pytest.mark.parametrize(
    ("schedule", "v"), [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 4), ("LoopedBFS", 2)]
)
def test_bubbles_of_schedules_with_a_whole_backward(schedule, v):
    costs = TRIPLES[::4]
    for p, m in SHAPES:
        formula = [(p - 1) * (f + i + w) / Fraction(v) for f, i, w in costs]
        assert bubbles(build_table(schedule, p, m, v), costs) == formula


@pytest.mark.parametrize(("p", "v"), product((2, 4, 8), (2, 3)))
def test_bubble_of_interleaved_zero_bubble(p, v):
    formula = [(p - 1) * max(f + max(i - w, 0), i) / Fraction(v) for f, i, w in TRIPLES]
    assert bubbles(build_table("InterleavedZeroBubble", p, 4 * p, v), TRIPLES) == formula


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_bubble_of_zbv_with_a_barrier(p, m):
    assert common_bubble(simulate_schedule("ZBVZeroBubble", p, m)) == Fraction(p - 1, 2)


@pytest.mark.parametrize(
    ("costs", "zbv", "dualpipev"),
    [
        ((1, 1, 1), 3.5, 7.0),
        ((1, 12 * TENTH, 8 * TENTH), 4.2, 8.6),
        ((1, 3 * HALF, HALF), 7.0, 11.75),
        ((1, HALF, 3 * HALF), 5.0, 7.0),
        ((2, 1, HALF), 10.25, 15.75),
    ],
)
def test_bubbles_of_v_schedules_at_other_costs(costs, zbv, dualpipev):
    """There is no closed form; the figures for 8 ranks come from another simulation of torch's tables."""
    for m in (16, 32):
        assert float(common_bubble(simulate_schedule("ZBVZeroBubble", 8, m, costs=costs))) == zbv
        pairs = build_table("DualPipeV", 8, m, overlap=True)
        assert float(common_bubble(simulate(pairs, Costs(*costs)))) == dualpipev


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_bubble_of_dualpipev(p, m):
    """The last rank, which has the most pairs, has the bubble (P/2 - 1)(F&B + B - 3W), with times of one of P = 2p
    chunks and F&B = x (F + B). Without overlap all ranks have it.
    """
    chunk = HALF
    for x in (1, 9 * TENTH, 8 * TENTH, 7 * TENTH):
        result = simulate(build_table("DualPipeV", p, m, overlap=True), overlap=x)
        assert result.bubbles[-1] == (p - 1) * (x * 3 + 2 - 3) * chunk
    assert common_bubble(simulate(build_table("DualPipeV", p, m, overlap=True))) == p - 1


def test_makespans_of_dualpipev_break_even_with_zbv():
    for m, unpaired, pairs, zbv in ((16, 12, 39, 49.5), (8, 12, 15, 25.5)):
        table = build_table("DualPipeV", 4, m, overlap=True)
        for x in (1, 9 * TENTH, 8 * TENTH, 7 * TENTH):
            assert simulate(table, overlap=x).makespan == unpaired + pairs * x
        assert simulate_schedule("ZBVZeroBubble", 4, m).makespan == zbv


def test_makespans_at_even_costs():
    expected = {"GPipe": 57, "1F1B": 57, "InterleavedZeroBubble": 49.5, "ZBVZeroBubble": 49.5}
    expected |= {"Interleaved1F1B": 52.5, "LoopedBFS": 52.5, "DualPipeV": 49.5}
    assert {name: simulate_schedule(name, 4, 16).makespan for name in SCHEDULES} == expected
    assert simulate_schedule("Interleaved1F1B", 4, 16, 4).makespan == 50.25
    pairs = build_table("DualPipeV", 4, 16, overlap=True)
    assert simulate(pairs).makespan == 51 and simulate(pairs, overlap=8 * TENTH).makespan == 432 * TENTH


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_separated_pairs_are_never_slower(p, m):
    tables = [build_table("DualPipeV", p, m, overlap=overlap) for overlap in (False, True)]
    for costs in TRIPLES[::5]:
        separate, paired = (simulate(table, Costs(*costs)).makespan for table in tables)
        assert separate <= paired


def test_bubble_shares_equal_the_formulas():
    def bubble(schedule, pp, microbatches, costs=Costs(), **options):  # noqa: B008
        return simulate(
            build_table(schedule, pp, microbatches, 1 if schedule == "1F1B" else 2, **options), costs
        ).bubble_share

    assert bubble("1F1B", 4, 16) == pytest.approx(3 / 19, rel=1e-12)  # (p-1) / (m+p-1)
    assert bubble("ZBVZeroBubble", 4, 16) == pytest.approx(1.5 / 49.5, rel=1e-12)
    assert bubble("ZBVZeroBubble", 4, 16, merge_backward=True) == pytest.approx(6 / 54, rel=1e-12)
    costs = Costs(1, 1.5, 0.5)
    assert bubble("InterleavedZeroBubble", 4, 16, costs) == pytest.approx(3 / 51, rel=1e-12)


# Activations


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_peak_activations_equal_the_formulas(p, m):
    def peaks(*arguments, **options):
        return simulate(build_table(*arguments, **options)).peak_activations

    assert peaks("GPipe", p, m) == peaks("LoopedBFS", p, m) == [m] * p
    assert peaks("1F1B", p, m) == [min(p - r, m) for r in range(p)]
    assert peaks("ZBVZeroBubble", p, m) == peaks("InterleavedZeroBubble", p, m) == [p] * p
    assert peaks("DualPipeV", p, m) == peaks("DualPipeV", p, m, overlap=True) == [p + HALF] * p
    for v in (2, 4):
        expected = [Fraction(min((v - 1) * p + 2 * (p - 1 - r) + 1, m * v), v) for r in range(p)]
        assert peaks("Interleaved1F1B", p, m, v) == expected
    assert simulate_schedule("Interleaved1F1B", 4, 16, 2).peak_activations == [5.5, 4.5, 3.5, 2.5]


# The simulation itself


def table_of(*rows):
    return [[parse_action(cell) for cell in row.split()] for row in rows]


def test_spans_of_a_small_pipeline():
    result = simulate(table_of("0F0 0F1 0I0 0W0 0B1", "1F0 1B0 1F1 1B1"), Costs(2, 3, 1))
    shown = [[(str(s.action), int(s.start), int(s.end)) for s in row] for row in result.spans]
    assert shown == [
        [("0F0", 0, 2), ("0F1", 2, 4), ("0I0", 8, 11), ("0W0", 11, 12), ("0B1", 14, 18)],
        [("1F0", 2, 4), ("1B0", 4, 8), ("1F1", 8, 10), ("1B1", 10, 14)],
    ]
    assert (result.makespan, result.busy, result.bubbles) == (18, [12, 12], [6, 6])
    assert result.bubble_share == 1 / 3
    assert result.peak_activations == [2, 1]


def test_p2p_time_counts_between_ranks_only():
    forwards = simulate(table_of("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"), p2p=TENTH)
    starts = {str(s.action): s.start for row in forwards.spans for s in row}
    assert starts == {
        "0F0": 0,
        "1F0": HALF + TENTH,
        "2F0": 1 + TENTH,
        "3F0": 3 * HALF + 2 * TENTH,
        "3B0": 2 + 2 * TENTH,
        "2B0": 3 + 3 * TENTH,
        "1B0": 4 + 3 * TENTH,
        "0B0": 5 + 4 * TENTH,
    }


def test_spans_of_an_overlapping_pair():
    table = table_of("0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    sequential, overlapped = simulate(table), simulate(table, overlap=HALF)
    starts = [
        [(str(s.action), s.start, s.end, s.overlapped) for s in r.spans[0][2:4]] for r in (sequential, overlapped)
    ]
    assert starts[0] == [("0F2", 2, 3, False), ("0B0", 4, 6, False)]
    assert starts[1] == [("0F2", 4, 5.5, True), ("0B0", 4, 5.5, True)]
    assert sequential.busy[0] == 9 and overlapped.busy[0] == 7.5
    # the forward's result leaves with the backward's
    assert next(s.start for s in sequential.spans[1] if str(s.action) == "1F2") == 7
    assert sequential.peak_activations == [3, 1]


def test_deadlocks_and_missing_inputs_are_reported():
    with pytest.raises(ScheduleTableError, match="rank 0, step 1, action 0B0: given a deadlock"):
        simulate(table_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    with pytest.raises(ScheduleTableError, match="rank 1, step 0, action 1F1: given without its input 0F1"):
        simulate(table_of("0F0 0B0", "1F1 1B0"))
    with pytest.raises(ScheduleTableError, match="without its input 1I0 or 1B0"):
        list(running_order(with_full_backward(table_of("0F0 0B0", "1F0"))))
