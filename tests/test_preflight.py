"""The look at all ranks before training: what it refuses, what it only says, and that it is right about sums."""

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
from torchtitan.training.preflight import Facts, differences, judge, space
from torchtitan.training.trainer import Trainer

SAME = {"code": "a1", "torch": "2.13.0, Python 3.11.7", "job": "b2", "tokenizer": "c3"}


def four(**changed: dict[int, object]) -> list[Facts]:
    """The facts of ranks 0, 1 on host a and 2, 3 on host b, some changed on some ranks."""
    found = [Facts("a" if rank < 2 else "b", dict(SAME), {"sum along tp": 0.001}, 100.0) for rank in range(4)]
    for name, values in changed.items():
        for rank, value in values.items():
            if name in SAME:
                found[rank].same[name] = value
            else:
                setattr(found[rank], name, value)
    return found


def words(lines: list[str]) -> list[str]:
    return [re.sub(" +", " ", line) for line in lines]


def test_ranks_that_are_alike_are_fine():
    assert judge(four()) == ([], [])


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
        (dict(wrong={1: "tp"}), ["a sum along tp is wrong on rank 1 (a): a broken device, cable or library"]),
    ],
    ids=["code", "torch", "tokenizer", "folder", "sum"],
)
def test_what_would_make_the_run_wrong_is_refused_by_rank_and_host(changed, faults):
    found, strange = judge(four(**changed))
    assert (words(found), strange) == (faults, [])


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (dict(clock={2: 160.0, 3: 160.0}), "the clocks of ranks 2-3 (b) are apart from rank 0's by +60.0 s"),
        (dict(seconds={3: {"sum along tp": 0.5}}), "slow: sum along tp takes 500.0 ms on rank 3 (b), 1.0 ms usually"),
    ],
    ids=["clocks", "slow"],
)
def test_what_is_only_strange_is_said(changed, told):
    assert judge(four(**changed)) == ([], [told])


def test_small_differences_of_time_are_nothing():
    assert judge(four(clock={1: 104.0}, seconds={2: {"sum along tp": 0.015}})) == ([], [])


def test_options_that_differ_are_told_one_by_one():
    hosts = ["a", "b"]
    lines = differences([{"x.a": "1", "x.b": "2"}, {"x.a": "1", "x.b": "3", "x.c": "4"}], hosts)
    assert words(lines) == [
        "x.b 2 rank 0 (a)",
        "x.b 3 rank 1 (b)",
        "x.c not known rank 0 (a)",
        "x.c 4 rank 1 (b)",
    ]


def test_space_for_two_checkpoints():
    assert space(20, 10) == []
    (told,) = space(2**30 - 1, 2**29)
    assert told == (
        "1.00 GiB are free in job.dump_folder and two checkpoints take 1.00 GiB: make room or give another folder"
    )


@pytest.mark.parametrize(
    ("option", "local", "expected"), [([], 1, True), ([], 2, False), (["true"], 2, True), (["false"], 1, False)]
)
def test_it_is_made_with_several_machines_or_as_the_job_says(option, local, expected):
    config = manager.load([f"--job.preflight={word}" for word in option])
    assert preflight.wanted(config, Ranks(world_size=2, local_world_size=local)) == expected


# On ranks


def look(argv: list[str], plant: str = "", said: Sequence[str] = ()) -> str:
    """What becomes of the start of a job on this rank, of which rank 1 is spoilt; if slow to see, until something is
    said."""
    with pytest.MonkeyPatch.context() as patch:
        if plant == "code" and dist.get_rank() == 1:
            patch.setattr(preflight, "_code", lambda: "another")
        if plant == "space":
            patch.setattr(preflight.shutil, "disk_usage", lambda folder: dataclasses.make_dataclass("D", ["free"])(9))
        if plant in ("blind", "slow to see"):
            patch.setattr(preflight, "FOLDER_SAID_SECONDS", 0)
            patch.setattr(preflight, "FOLDER_SECONDS", 0.4 if plant == "blind" else 30)
            exists = Path.exists

            def hidden(path: Path) -> bool:
                here = path.name.startswith(".preflight-") and dist.get_rank() == 1
                return exists(path) and not (here and (plant == "blind" or not said))

            patch.setattr(Path, "exists", hidden)
        if plant == "sum":
            sums = dist.all_reduce

            def flipped(tensor: torch.Tensor, **options: object) -> dist.Work | None:
                work = sums(tensor, **options)
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
    ("plant", "told"),
    [
        ("", "started"),
        ("code", r"  code +\w{16}  rank 0 \(.+\)\n  code +another +rank 1 \("),
        ("sum", r"  a sum along dp_shard is wrong on rank 1 \("),
        ("blind", r"  job.dump_folder is not the folder of rank 0 on rank 1 \(.+\): all have to share it"),
        ("space", r"  9 bytes are free in job.dump_folder and two checkpoints take"),
    ],
)
def test_all_ranks_start_or_none_does(plant, told, argv):
    first, other = run_ranks(2, look, argv, plant)
    if not plant:
        assert (first, other) == ("started", "started")
        return
    assert first.startswith("preflight: not all ranks fit together, and nothing was started") and re.search(told, first)
    assert other == "peer: the preflight has found what cannot work"


def test_without_it_a_wrong_sum_is_trained_on(argv):
    """The control."""
    assert run_ranks(2, look, [word for word in argv if "preflight=" not in word], "sum") == ["started"] * 2


def look_and_listen(argv: list[str]) -> tuple[str, list[str]]:
    """What becomes of a start whose rank 1 sees new files late, and what is said meanwhile."""
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight.logger, "info", lambda text, *values: said.append(text % values))
        return look(argv, "slow to see", said), said


def test_a_folder_that_shows_new_files_late_is_waited_for(argv):
    for found, said in run_ranks(2, look_and_listen, argv):
        assert found == "started"
        assert said[0].startswith("preflight  1 of 2 ranks do not see yet what rank 0 has made in") and len(said) == 2


def look_at_data(argv: list[str]) -> str:
    try:
        preflight.check_data(manager.load(argv), read_ranks(), {"dataset": f"of rank {dist.get_rank()}"})
    except (JobError, PeerStopped) as error:
        return str(error)
    return "started"


def test_other_data_are_refused(argv):
    first, other = run_ranks(2, look_at_data, argv)
    assert re.search(r"  data +\w{16}  rank 0 \(.+\)\n  data +\w{16}  rank 1", first) and "preflight" in other
