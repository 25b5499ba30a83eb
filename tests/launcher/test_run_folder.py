"""A run's folder without its checkpoints is refused, and folders that cannot be written fail before the first step."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.support import jobs, judged
from tests.support.checkpoint_folders import make_step
from tests.support.checkpoint_job import Job, rank, saved_steps
from tests.support.judged import lines
from tests.support.pool import RankFailed, run_ranks
from torchtitan.checkpoint import CheckpointError, NothingLoadable, folders, tensors
from torchtitan.checkpoint.layout import CannotSave
from torchtitan.launcher import run_folder
from torchtitan.metrics.json_lines import JsonLinesWriter, read_records

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
anywhere = judged.anywhere


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return jobs.write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture
def run(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


def saving(folder: Path, texts: Path, **changed: object) -> list[str]:
    return jobs.arguments(
        folder, texts, **dict(checkpoint__enable=True, checkpoint__interval=2, training__steps=4) | changed
    )


# Folders without checkpoints


def judge(run: Path, *arguments: str) -> list[str]:
    return lines("--checkpoint.enable", f"--job.dump_folder={run}", *arguments)


def refused(run: Path, before: str) -> str:
    return (
        f'checkpoint.folder: given "checkpoint": no checkpoint in {run / "checkpoint"}; allowed: the folder to '
        f"which this run saved ({before}); mount its disk or restore it; to start from scratch, give another "
        "job.dump_folder"
    )


def test_a_used_folder_without_checkpoints_is_refused(run):
    assert judge(run) == []
    run_folder.record_save(run, 60)
    make_step(run / "checkpoint", 60)
    assert judge(run) == []
    shutil.rmtree(run / "checkpoint" / "step-00000060")
    assert judge(run) == [refused(run, "step-00000060 by last_checkpoint")]
    (run / "checkpoint").rmdir()
    assert judge(run) == [refused(run, "step-00000060 by last_checkpoint")]
    assert lines(f"--job.dump_folder={run}") == []  # without checkpoints there is nothing to resume


def test_leftovers_that_hold_a_checkpoint_are_no_empty_folder(run):
    """A crash after the first save was moved out of the way; what never was finished is nothing."""
    (run / "checkpoint" / ".tmp-step-00000002-0123456789abcdef").mkdir(parents=True)
    assert judge(run) == []
    (run / "checkpoint" / ".aside-step-00000002-0123456789abcdef").mkdir()
    assert judge(run) == [refused(run, ".aside-step-00000002-0123456789abcdef, moved aside")]


@pytest.mark.parametrize("content", ["", "step-60", "x" * 200, "\0"])
def test_a_note_that_nobody_wrote_means_nothing(run, content):
    (run / "last_checkpoint").write_text(content)
    assert judge(run) == []


def test_a_link_to_nowhere_is_no_folder_to_be_made(run):
    (run / "checkpoint").symlink_to(run / "unmounted")
    (line,) = judge(run)
    assert f"{run / 'checkpoint'} is a link to {run / 'unmounted'}, which is not there (not mounted?)" in line
    (run / "dump").symlink_to(run / "unmounted")
    (line,) = judge(run / "dump")
    assert line.startswith("job.dump_folder") and "which is not there" in line


@pytest.mark.parametrize("name", ["config.toml", "last_checkpoint", "metrics.jsonl", "training.png"])
def test_a_folder_in_the_place_of_a_runs_file_is_told_before_any_rank_exists(run, name):
    (run / name).mkdir()
    (line,) = judge(run)
    assert line.startswith("job.dump_folder") and f"{run / name} is a folder, where a run has a file; move it" in line


@pytest.mark.parametrize("name", ["starts", "logs", "hangs"])
def test_what_is_in_the_place_of_a_runs_folder_is_told_before_any_rank_exists(run, name):
    (run / name).symlink_to(run / "nowhere")
    (line,) = judge(run)
    assert line.startswith("job.dump_folder") and f"{run / name} is no folder, where a run has one; move it" in line


def test_the_trainer_notes_what_it_has_saved(texts, tmp_path):
    run_ranks(1, jobs.train, saving(tmp_path, texts))
    assert (tmp_path / "last_checkpoint").read_text() == "step-00000004\n"
    shutil.rmtree(tmp_path / "checkpoint")
    code, out, err = jobs.run(saving(tmp_path, texts))
    assert code == 2 and "step-00000004 by last_checkpoint" in " ".join(err.split()) and "Traceback" not in err


def test_a_note_that_cannot_be_written_fails_nothing(tmp_path, caplog):
    run_folder.record_save(tmp_path / "absent", 3)
    assert "last_checkpoint cannot be written" in caplog.text


# The history of metrics


def test_a_way_back_is_remembered_for_its_step(tmp_path, caplog):
    assert [run_folder.record_rollback(tmp_path, step) for step in (5, 7, 5)] == [False, False, True]
    (tmp_path / run_folder.ROLLBACKS_FILE).write_text("[")
    assert not run_folder.record_rollback(tmp_path, 5) and "ways_back.json cannot be used: " in caplog.text


def test_no_record_of_metrics_is_ever_lost(tmp_path):
    path = tmp_path / "metrics.jsonl"

    def write(resume_step, *steps):
        file = JsonLinesWriter(path, resume_step)
        for step in steps:
            file.write({"step": step})
        file.close()

    write(None, 1, 2, 3)
    write(None, 4)
    write(None, 5, 6, 7)
    write(6, 8)
    write(5, 9)
    steps_by_file = {file.name: [record["step"] for record in read_records(file)] for file in tmp_path.iterdir()}
    assert steps_by_file == {
        "metrics.jsonl": [5, 9],
        "metrics.previous.jsonl": [1, 2, 3],
        "metrics.previous-2.jsonl": [4],
        "metrics.redone.jsonl": [7, 6, 8],
    }


# The place of the checkpoints


def claimed(folder: Path, problem: str) -> str:
    """Check the folder on two ranks, one of which has the problem; return the error or ""."""
    with pytest.MonkeyPatch.context() as patch:
        if rank() == 1 and problem == "full":
            patch.setattr(folders.os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left")))
        if rank() == 1 and problem == "elsewhere":
            patch.setattr(folders.CheckpointRoot, "marker", property(lambda self: folder.parent / "another" / ".place"))
        try:
            Job(folder, "fsdp").checkpointer.prepare()
        except CannotSave as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("problem", "message"),
    [("nothing", ""), ("full", "rank 1: .*No space left"), ("elsewhere", "the same on all hosts")],
)
def test_an_unwritable_place_is_found_before_the_first_step(tmp_path, problem, message):
    one, two = run_ranks(2, claimed, tmp_path / "checkpoint", problem)
    assert one == two
    assert bool(message) == bool(one)

    assert re.search(message, one)
    assert saved_steps(tmp_path / "checkpoint") == [".place"]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_an_unmounted_disk_is_noticed_and_nothing_is_written_beside_it(tmp_path, mode):
    job = Job(tmp_path / "disk", async_mode=mode)
    job.checkpointer.prepare()
    job.train(2)
    job.checkpointer.finish()
    (tmp_path / "disk").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is not the folder that this run began with"):
        job.train(2)
        job.checkpointer.finish()
    assert not (tmp_path / "disk").exists()
    (tmp_path / "disk").mkdir()  # as the empty folder below it looks
    with pytest.raises(CheckpointError, match="is not the folder that this run began with"):
        job.train(2)
        job.checkpointer.finish()
    assert saved_steps(tmp_path / "disk") == []
    (tmp_path / "disk").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "disk")
    job.train(2)
    job.checkpointer.finish()
    assert saved_steps(tmp_path / "disk") == [".place", "step-00000002", "step-00000008"]


def test_without_a_marker_the_control_saves_beside_the_disk(tmp_path):
    """Control: without the marker an unmounted disk goes unnoticed."""
    job = Job(tmp_path / "disk")
    job.train(2)
    (tmp_path / "disk").rename(tmp_path / "elsewhere")
    job.train(2)
    assert saved_steps(tmp_path / "disk") == ["step-00000004"]


def test_a_place_that_takes_nothing_ends_the_job_before_it_starts(texts, tmp_path):
    """Permissions allow it, and yet no file can be created there."""
    (tmp_path / "checkpoint").symlink_to("/proc")
    code, out, err = jobs.run(saving(tmp_path, texts))
    assert code == 2
    assert "/proc" in err and "Traceback" not in err and "step 1/" not in out


# Finite when published


@pytest.mark.parametrize("where", ["weight", "moment", "nan"])
def test_what_is_not_finite_is_found_by_name(tmp_path, where):
    job = Job(tmp_path)
    job.train(1)
    assert job.checkpointer.not_finite() == []
    parameter = job.model.layers["1"][2].bias
    target = job.optimizers[0].state[parameter]["exp_avg_sq"] if where == "moment" else parameter.data
    target[3] = torch.nan if where == "nan" else -torch.inf
    name = "optimizer.state.layers.1.2.bias.exp_avg_sq" if where == "moment" else "model.layers.1.2.bias"
    assert job.checkpointer.not_finite() == [name]


@pytest.mark.parametrize("world", [1, 2])
def test_no_mode_publishes_what_is_not_finite(texts, tmp_path, world):
    """The step's own loss is finite, its update overflows: with the step inside backward nothing else shows it."""
    options = dict(training__max_norm=0, optimizer__lr=1e40)
    options |= dict(training__local_batch_size=8 // world, checkpoint__enable_first_step_checkpoint=True)
    for number, early in enumerate((True, False)):
        folder = tmp_path / str(number)
        argv = saving(folder, texts, optimizer__early_step_in_backward=early, lr_scheduler__warmup_steps=1, **options)
        with pytest.raises(RankFailed, match="NonFiniteError: .*(weights or moments|loss|norm)"):
            run_ranks(world, jobs.train, argv)
        assert list((folder / "checkpoint").glob("step-*")) == []


def test_a_checkpoint_from_before_is_passed_over_where_it_is_not_finite(tmp_path, caplog):
    job = Job(tmp_path)
    job.train(2)
    expected = job.digest()
    job.train(1)
    with torch.no_grad():
        job.model.layers["0"][0].weight[0, 0] = torch.nan
    job.checkpointer.maybe_save(3, last=True)
    resumed = Job(tmp_path)
    assert resumed.checkpointer.load() == 2
    assert resumed.digest() == expected
    assert "step-00000003" in caplog.text and "model.layers.0.0.weight holds NaN or infinity" in caplog.text
    with pytest.raises(NothingLoadable, match="holds NaN or infinity"):
        Job(tmp_path, load_step=3).checkpointer.load()


def test_numbers_without_values_are_left_out():
    assert tensors.not_finite({"a": torch.empty(0), "b": torch.tensor([1, 2])}) == []
