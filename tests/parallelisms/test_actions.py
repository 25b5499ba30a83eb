"""Tests of schedules from CSV files: valid tables are read as torch writes them, faults name their place."""

import os
import re

import pytest
from torch.distributed.pipelining.schedules import _Action, get_schedule_class

from torchtitan.parallelisms.pipeline.actions import (
    Action,
    ScheduleTableError,
    count_stages,
    find_faults,
    input_keys,
    load_schedule_csv,
    pair,
    parse_action,
    split_pairs,
    to_csv,
    with_full_backward,
)
from torchtitan.parallelisms.pipeline.cut import SCHEDULES
from torchtitan.parallelisms.pipeline.tables import build_table

GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def faults_of_file(tmp_path, text, ranks=2, num_stages=None, microbatches=2):
    """Load a file with this text; return its fault lines without the file's name."""
    path = tmp_path / "table.csv"
    path.write_text(text)
    try:
        load_schedule_csv(path, ranks, num_stages, microbatches)
        return []
    except ScheduleTableError as error:
        lines = str(error).splitlines()
        assert len(lines) == len(error.faults) and all(line.startswith(f"{path}, ") for line in lines)
        assert all(fault.value and fault.allowed and fault.remedy for fault in error.faults)
        return [line.removeprefix(f"{path}, ") for line in lines]


# Valid files


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_round_trips_through_csv(schedule, tmp_path):
    for table in (build_table(schedule, 4, 8, overlap=True), build_table(schedule, 4, 8, merge_backward=True)):
        path = tmp_path / "table.csv"
        path.write_text(to_csv(table))
        stages = count_stages(table)
        assert load_schedule_csv(path, 4, stages, 8) == load_schedule_csv(path, 4, None, 8) == table
        # an action is written as torch writes it, pairs included
        cells = [str(action) for row in table for action in row]
        assert [str(_Action.from_str(cell)) for cell in cells] == cells


def test_a_csv_file_of_torch_with_idle_cells_is_read(tmp_path):
    stages = [type("Stage", (), dict(num_stages=8, group_size=4, group_rank=0, submod=None)) for _ in range(2)]
    schedule = get_schedule_class("InterleavedZeroBubble")(stages, 8)
    schedule._dump_csv(tmp_path / "table.csv", format="compute_only")
    assert re.search(r"^,", (tmp_path / "table.csv").read_text(), re.MULTILINE)
    assert load_schedule_csv(tmp_path / "table.csv", 4, 8, 8) == build_table("InterleavedZeroBubble", 4, 8)


def test_blanks_and_trailing_empty_rows_are_ignored(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("\ufeff 0F0 ,, 0F1,0I0,0W0,(0F2; 0B1)OVERLAP_F_B ,0B2,\r\n1F0,1B0,1F1,1B1,1F2,1B2\r\n,,\r\n\r\n")
    table = load_schedule_csv(path, 2, 2, 3)
    assert table[0][4] == pair(Action(0, "F", 2), Action(0, "B", 1)) and len(table[0]) == 6


def test_merged_and_apart():
    table = [[parse_action(cell) for cell in ["0F0", "0F1", "0I0", "0W0", "(0F2;0B1)OVERLAP_F_B", "0I2", "0W2"]]]
    assert [str(a) for a in with_full_backward(table)[0]] == ["0F0", "0F1", "0B0", "(0F2;0B1)OVERLAP_F_B", "0B2"]
    assert [str(a) for a in split_pairs(table)[0]] == ["0F0", "0F1", "0I0", "0W0", "0F2", "0B1", "0I2", "0W2"]


def test_inputs_of_actions():
    assert input_keys(parse_action("0F3"), 2) == () and input_keys(parse_action("1F3"), 2) == ((0, "F", 3),)
    assert input_keys(parse_action("0B3"), 2) == input_keys(parse_action("0I3"), 2) == ((0, "F", 3), (1, "I", 3))
    assert input_keys(parse_action("1B3"), 2) == ((1, "F", 3),)
    assert input_keys(parse_action("1W3"), 2) == ((1, "I", 3),)
    assert input_keys(parse_action("(1F3;0B2)OVERLAP_F_B"), 2) == ((0, "F", 3), (0, "F", 2), (1, "I", 2))


# Invalid files


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            GOOD.replace("0F1", "0Q1"),
            ["rank 0, step 1, action 0Q1: given no action; allowed: stage, one of F I W B, and microbatch, as 3F0"],
        ),
        (GOOD.replace("0F1", "0F1x"), ["rank 0, step 1, action 0F1x: given no action"]),
        (GOOD.replace("0F1", "0F1234567"), ["rank 0, step 1, action 0F1234567: given no action"]),
        (
            GOOD.replace("1F0,", "1RECV_F0,1F0,"),
            ["rank 1, step 0, action 1RECV_F0: given an action that the runtime adds by itself"],
        ),
        (
            GOOD.replace("0F1,0B0", "(0F1;0B0;0B1)OVERLAP_F_B"),
            ["rank 0, step 1, action (0F1;0B0;0B1)OVERLAP_F_B: given no pair that can overlap"],
        ),
        (
            GOOD.replace("1F0,1B0", "(1F0;1B0)OVERLAP_F_B"),
            ["rank 1, step 0, action (1F0;1B0)OVERLAP_F_B: given no pair that can overlap"],
        ),
        (
            GOOD.replace("1F0,1B0", "2F0,1B0").replace("0B1", "0B2"),
            [
                "rank 1, step 0, action 2F0: given stage 2; allowed: 0 to 1",
                "rank 0, step 3, action 0B2: given microbatch 2; allowed: 0 to 1",
            ],
        ),
        (
            GOOD.replace("0F1", "0F7").replace("0B1", "0B7"),
            ["rank 0, step 1, action 0F7: given microbatch 7 (and 1 more such actions); allowed: 0 to 1"],
        ),
        (
            GOOD.replace("1B1", ",0B1"),
            [
                "rank 1, step 4, action 0B1: given stage 0, which is on rank 0; allowed: each stage on one rank",
                "rank 1, step 4, action 0B1: given a second time, after rank 0, step 3, action 0B1",
            ],
        ),
        (
            GOOD.replace("0B1", "0B1,0W1"),
            ["rank 0, step 4, action 0W1: given a second time, after rank 0, step 3, action 0B1"],
        ),
        (GOOD.replace("0F1,", ""), ["rank 0, stage 0: given no action 0F1; allowed: every action of 2 microbatches"]),
        (GOOD.replace("1B1", "1I1"), ["rank 1, stage 1: given no action 1W1"]),
        (
            GOOD.replace("0B0,0B1", "").replace("1B0", ""),
            ["rank 0, stage 0: given no action 0B0, 0B1;", "rank 1, stage 1: given no action 1B0;"],
        ),
        (
            GOOD + "2F0,2F1,2B0,2B1\n",
            [
                "the table: given 3 rows; allowed: 2, one for each rank of the pipeline",
                "rank 2, step 0, action 2F0: given stage 2 (and 3 more such actions); allowed: 0 to 1",
            ],
        ),
        (GOOD.replace("1F0,1B0,1F1,1B1", ",,").replace("\n", "\n\n"), ["the table: given 1 rows; allowed: 2"]),
        ("0F0,0F1,0B0,0B1\n,\n1F0,1B0,1F1,1B1\n", ["the table: given 3 rows", "rank 1: given no actions"]),
        ("", ["the file: given no rows"]),
        (" ,\n,,\n", ["the file: given no rows"]),
    ],
)
def test_faults_name_action_rank_and_step(text, expected, tmp_path):
    lines = faults_of_file(tmp_path, text, num_stages=2)
    assert len(lines) == len(expected), lines
    for line, beginning in zip(lines, expected, strict=True):
        assert line.startswith(beginning)


def test_valid_files_have_no_faults(tmp_path):
    assert faults_of_file(tmp_path, GOOD) == faults_of_file(tmp_path, GOOD, num_stages=2) == []


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (dict(microbatches=3), "the table: given 2 microbatches; allowed: 3; write it for 3, or use 2"),
        (dict(num_stages=4), "the table: given 2 stages; allowed: 4; write it for 4, or use 2"),
        (dict(ranks=4), "the table: given 2 rows; allowed: 4, one for each rank of the pipeline"),
    ],
)
def test_a_table_for_other_numbers_than_the_job_is_refused(numbers, expected, tmp_path):
    (fault,) = faults_of_file(tmp_path, GOOD, **numbers)
    assert fault.startswith(expected)


def test_the_number_of_stages_is_inferred_from_the_table(tmp_path):
    (fault,) = faults_of_file(tmp_path, GOOD.replace("1F0", "999999F0"))
    # three different numbers occur, so there would be stages 0 to 2
    assert fault.startswith("rank 1, step 0, action 999999F0: given stage 999999; allowed: 0 to 2")


@pytest.mark.parametrize(
    ("text", "where", "description", "remedy"),
    [
        (
            "0F0,0B0,0F1,0B1\n1F1,1F0,1B1,1B0\n",
            "rank 0, step 1, action 0B0",
            "a deadlock: 0B0 waits for 1B0 (rank 1, step 3), which comes after 1F1 (rank 1, step 0); "
            "1F1 waits for 0F1 (rank 0, step 2), which comes after 0B0 (rank 0, step 1)",
            "move 1B0 before 1F1 or move 0F1 before 0B0",
        ),
        (
            "0F0,0F1,,0B0,0B1\n1F0,1B0,,1B1,1F1\n",  # steps are cells, idle ones too
            "rank 1, step 3, action 1B1",
            "a deadlock: 1B1 waits for 1F1 (rank 1, step 4), which comes after 1B1 (rank 1, step 3)",
            "move 1F1 before 1B1",
        ),
        (
            "0F0,0F1,0W0,0I0,0B1\n1F0,1B0,1F1,1B1\n",
            "rank 0, step 2, action 0W0",
            "a deadlock: 0W0 waits for 0I0 (rank 0, step 3), which comes after 0W0 (rank 0, step 2)",
            "move 0I0 before 0W0",
        ),
        (
            "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n",  # both actions of a pair start together
            "rank 0, step 1, action (0F1;0B0)OVERLAP_F_B",
            "a deadlock: (0F1;0B0)OVERLAP_F_B waits for (1F1;1B0)OVERLAP_F_B (rank 1, step 1); "
            "(1F1;1B0)OVERLAP_F_B waits for (0F1;0B0)OVERLAP_F_B (rank 0, step 1)",
            "take one of the pairs apart",
        ),
    ],
)
def test_a_deadlock_is_reported_as_its_cycle(text, where, description, remedy, tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(ScheduleTableError) as error:
        load_schedule_csv(path, 2, 2, 2)
    (fault,) = error.value.faults
    assert (fault.where, fault.value, fault.remedy) == (f"{path}, {where}", description, remedy)
    assert fault.allowed == "every action after the actions that produce its inputs"


def test_long_lists_are_shortened():
    table = build_table("1F1B", 2, 20)
    (fault,) = find_faults([[a for a in table[0] if a.kind == "F" or a.microbatch > 15], table[1]], 2, 2, 20)
    assert fault.value == "no action 0B0, 0B1, 0B2, 0B3, 0B4, 0B5 and 10 more"


def test_unreadable_files_are_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\x89PNG\xff")
    (tmp_path / "nul").write_bytes(b"0F0\0" + b'"' + b"a" * 200_000)
    os.mkfifo(tmp_path / "pipe")  # opening it would block forever
    for name in ("binary", "nul", "none", "pipe", ".", "a\0b"):
        with pytest.raises(ScheduleTableError) as error:
            load_schedule_csv(tmp_path / name, 2, 2, 2)
        (fault,) = error.value.faults
        refused = "what cannot be read (", "what is not a regular file but a"
        assert any(f"the file: given {reason}" in str(fault) for reason in refused) or "no action" in fault.value
