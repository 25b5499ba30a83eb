"""Tests of the preflight, which compares all ranks before training: its faults, its warnings, and its test sums."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import jobs
from tests.support.pool import run_ranks
from torchtitan.config import manager
from torchtitan.core.errors import JobError
from torchtitan.process.ranks import Ranks, read_ranks
from torchtitan.training import preflight
from torchtitan.training.batches import PeerStopped
from torchtitan.training.preflight import RankFacts, compare, differences, space_faults
from torchtitan.training.trainer import Trainer

SAME = {"code": "a1", "torch": "2.13.0, Python 3.11.7", "job": "b2", "tokenizer": "c3"}


def facts_of_four_ranks(**changed: dict[int, object]) -> list[RankFacts]:
    """Return facts of ranks 0, 1 on host a and 2, 3 on host b. `changed`: field -> {rank: value}."""
    facts = [RankFacts("a" if rank < 2 else "b", dict(SAME), {"sum along tp": 0.001}, 100.0) for rank in range(4)]
    for name, values in changed.items():
        for rank, value in values.items():
            if name in SAME:
                facts[rank].fingerprints[name] = value
            else:
                setattr(facts[rank], name, value)
    return facts


def squeeze_spaces(lines: list[str]) -> list[str]:
    return [re.sub(" +", " ", line) for line in lines]


def test_equal_ranks_pass():
    assert compare(facts_of_four_ranks()) == ([], [])


@pytest.mark.parametrize(
    ("changed", "faults"),
    [
        (dict(code={3: "ff"}), ["code a1 ranks 0-2 (a, b)", "code ff rank 3 (b)"]),
        (
            dict(torch={0: "2.12.0", 2: "2.12.0"}),
            ["torch 2.12.0 ranks 0, 2 (a, b)", "torch 2.13.0, Python 3.11.7 ranks 1, 3 (a, b)"],
        ),
        (dict(tokenizer={2: "dd", 3: "dd"}), ["tokenizer c3 ranks 0-1 (a)", "tokenizer dd ranks 2-3 (b)"]),
        (
            dict(sees_folder={2: False, 3: False}),
            ["job.dump_folder is not the folder of rank 0 on ranks 2-3 (b): all have to share it"],
        ),
        (dict(wrong_axis={1: "tp"}), ["a sum along tp is wrong on rank 1 (a): a broken device, cable or library"]),
    ],
    ids=["code", "torch", "tokenizer", "folder", "sum"],
)
def test_faults_name_ranks_and_hosts(changed, faults):
    hard_faults, warnings = compare(facts_of_four_ranks(**changed))
    assert (squeeze_spaces(hard_faults), warnings) == (faults, [])


@pytest.mark.parametrize(
    ("changed", "warning"),
    [
        (dict(clock={2: 160.0, 3: 160.0}), "the clocks of ranks 2-3 (b) are apart from rank 0's by +60.0 s"),
        (dict(seconds={3: {"sum along tp": 0.5}}), "slow: sum along tp takes 500.0 ms on rank 3 (b), 1.0 ms usually"),
    ],
    ids=["clocks", "slow"],
)
def test_clock_and_speed_differences_are_warnings(changed, warning):
    assert compare(facts_of_four_ranks(**changed)) == ([], [warning])


def test_small_differences_of_time_are_ignored():
    assert compare(facts_of_four_ranks(clock={1: 104.0}, seconds={2: {"sum along tp": 0.015}})) == ([], [])


def test_different_options_are_listed_one_by_one():
    hosts = ["a", "b"]
    lines = differences([{"x.a": "1", "x.b": "2"}, {"x.a": "1", "x.b": "3", "x.c": "4"}], hosts)
    assert squeeze_spaces(lines) == [
        "x.b 2 rank 0 (a)",
        "x.b 3 rank 1 (b)",
        "x.c not known rank 0 (a)",
        "x.c 4 rank 1 (b)",
    ]


def test_space_for_two_checkpoints():
    assert space_faults(20, 10) == []
    (fault,) = space_faults(2**30 - 1, 2**29)
    assert fault == (
        "1.00 GiB are free in job.dump_folder and two checkpoints take 1.00 GiB: make room or give another folder"
    )


@pytest.mark.parametrize(
    ("option", "local", "expected"), [([], 1, True), ([], 2, False), (["true"], 2, True), (["false"], 1, False)]
)
def test_preflight_runs_with_several_machines_or_as_the_job_says(option, local, expected):
    config = manager.load([f"--job.preflight={value}" for value in option])
    assert preflight.is_enabled(config.job.preflight, Ranks(world_size=2, local_world_size=local)) == expected


# On ranks


def start_trainer(argv: list[str], fault: str = "", messages: Sequence[str] = ()) -> str:
    """Create a trainer with a fault planted on rank 1; return "started" or the error.

    `fault`: "slow to see" hides new files from rank 1 until `messages` is not empty.
    """
    with pytest.MonkeyPatch.context() as patch:
        if fault == "code" and dist.get_rank() == 1:
            patch.setattr(preflight, "_code", lambda: "another")
        if fault == "space":
            patch.setattr(preflight.shutil, "disk_usage", lambda folder: dataclasses.make_dataclass("D", ["free"])(9))
        if fault in ("blind", "slow to see"):
            patch.setattr(preflight, "FOLDER_LOG_SECONDS", 0)
            patch.setattr(preflight, "FOLDER_SECONDS", 0.4 if fault == "blind" else 30)
            exists = Path.exists

            def hidden(path: Path) -> bool:
                hides_files = path.name.startswith(".preflight-") and dist.get_rank() == 1
                return exists(path) and not (hides_files and (fault == "blind" or not messages))

            patch.setattr(Path, "exists", hidden)
        if fault == "sum":
            all_reduce = dist.all_reduce

            def flipped(tensor: torch.Tensor, **options: object) -> dist.Work | None:
                work = all_reduce(tensor, **options)
                if dist.get_rank() == 1 and len(tensor) == preflight.ELEMENTS["cpu"]:
                    tensor[7] += 1
                return work

            patch.setattr(preflight.dist, "all_reduce", flipped)
        try:
            trainer = Trainer(manager.load(argv), read_ranks())
        except JobError as error:
            return str(error)
        except PeerStopped as error:
            return f"peer: {error}"
        trainer.metrics.close()
        return "started"


@pytest.fixture(scope="module")
def argv(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preflight")
    texts = jobs.write_texts(folder)
    options = dict(training__local_batch_size=4, checkpoint__enable=True, job__preflight=True)
    return jobs.arguments(folder / "run", texts, **options)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("", "started"),
        ("code", r"  code +\w{16}  rank 0 \(.+\)\n  code +another +rank 1 \("),
        ("sum", r"  a sum along dp_shard is wrong on rank 1 \("),
        ("blind", r"  job.dump_folder is not the folder of rank 0 on rank 1 \(.+\): all have to share it"),
        ("space", r"  9 bytes are free in job.dump_folder and two checkpoints take"),
    ],
)
def test_all_ranks_start_or_none(fault, message, argv):
    first, other = run_ranks(2, start_trainer, argv, fault)
    if not fault:
        assert (first, other) == ("started", "started")
        return
    assert first.startswith("preflight: the ranks do not match, and nothing was started") and re.search(message, first)
    assert other == "peer: the preflight check failed"


def test_without_preflight_a_wrong_sum_is_not_noticed(argv):
    """Control of the test above: the planted fault has no other effect."""
    assert (
        run_ranks(2, start_trainer, [argument for argument in argv if "preflight=" not in argument], "sum")
        == ["started"] * 2
    )


def start_trainer_and_collect_messages(argv: list[str]) -> tuple[str, list[str]]:
    """Return the outcome of a start where rank 1 sees new files late, and the messages logged meanwhile."""
    messages = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight.logger, "info", lambda text, *values: messages.append(text % values))
        return start_trainer(argv, "slow to see", messages), messages


def test_a_folder_that_shows_new_files_late_is_waited_for(argv):
    for outcome, messages in run_ranks(2, start_trainer_and_collect_messages, argv):
        assert outcome == "started"
        assert (
            messages[0].startswith("preflight  1 of 2 ranks do not see yet what rank 0 has made in")
            and len(messages) == 2
        )


def check_data_of_rank(argv: list[str]) -> str:
    try:
        preflight.check_data(manager.load(argv).job.preflight, read_ranks(), {"dataset": f"of rank {dist.get_rank()}"})
    except (JobError, PeerStopped) as error:
        return str(error)
    return "started"


def test_ranks_with_different_data_are_refused(argv):
    first, other = run_ranks(2, check_data_of_rank, argv)
    assert re.search(r"  data +\w{16}  rank 0 \(.+\)\n  data +\w{16}  rank 1", first) and "preflight" in other
