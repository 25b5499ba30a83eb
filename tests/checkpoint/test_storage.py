"""Checkpoints on disks that corrupt, fill up and recover, and runs that save before their time limit."""

import itertools
import json
import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from tests.support import jobs
from tests.support.checkpoint_folders import make_step, names
from tests.support.checkpoint_job import Job, saved_steps
from tests.support.pool import run_ranks
from torchtitan.checkpoint import CheckpointError, checkpointer, layout, saving, storage
from torchtitan.checkpoint.agreement import Peers
from torchtitan.config.manager import load
from torchtitan.config.options import ConfigError
from torchtitan.guards.stop_conditions import TimeLimit, seconds_of, shortest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# Verification after writing


@pytest.mark.parametrize("verify", [True, False])
def test_corrupted_writes_are_detected_before_publishing(tmp_path, monkeypatch, verify):
    """The control: without reading back, the damaged checkpoint is published."""
    job = Job(tmp_path, verify=verify)
    write = saving._write

    def write_corrupted(snapshot, temporary, peers):
        share = write(snapshot, temporary, peers)
        damage(temporary / "__0_0.distcp")
        return share

    monkeypatch.setattr(saving, "_write", write_corrupted)
    if verify:
        with pytest.raises(CheckpointError, match="__0_0.distcp is read back with other content than was written"):
            job.train(2)
        assert saved_steps(tmp_path) == []
    else:
        job.train(2)
        assert saved_steps(tmp_path) == ["step-00000002"]
        with pytest.raises(CheckpointError, match="damaged: __0_0.distcp"):
            Job(tmp_path).checkpointer.load()


# Retention verifies contents


def retain(root, keep, good=frozenset(), protected=()):
    saving.delete_old(root, keep, set(protected), Peers("test"), None if good is None else set(good))


def test_good_checkpoints_are_not_deleted_for_damaged_newer_ones(tmp_path, caplog):
    saved = [make_step(tmp_path, step) for step in range(1, 7)]
    for folder in saved[4:]:
        damage(folder / "__0_0.distcp")
    retain(tmp_path, 2)
    assert names(tmp_path) == [folder.name for folder in saved[2:]]  # 5 and 6 are damaged, so 3 and 4 stay
    assert caplog.text.count("older checkpoints are kept") == 2
    damage(saved[3] / "state.json")
    retain(tmp_path, 3)  # now 4, 5 and 6 are all damaged
    assert names(tmp_path) == [folder.name for folder in saved[2:]]


def test_retention_does_not_verify_known_good_checkpoints(tmp_path, monkeypatch):
    saved = [make_step(tmp_path, step) for step in range(1, 6)]
    checked, is_whole = [], saving.is_undamaged
    monkeypatch.setattr(saving, "is_undamaged", lambda folder, peers: checked.append(folder) or is_whole(folder, peers))
    retain(tmp_path, 3, good=[saved[4]])
    assert checked == [saved[3]]
    assert names(tmp_path) == [folder.name for folder in saved[2:]]
    retain(tmp_path, 3, good=[saved[4]])
    assert checked == [saved[3]]  # nothing to delete, so nothing is verified


def test_without_verify_retention_deletes_by_age_alone(tmp_path):
    saved = [make_step(tmp_path, step) for step in range(1, 5)]
    for folder in saved[2:]:
        damage(folder / "__0_0.distcp")
    retain(tmp_path, 2, good=None)
    assert names(tmp_path) == [folder.name for folder in saved[2:]]
    assert not any(saving.is_undamaged(folder, Peers("test")) for folder in saved[2:])


def retain_on_ranks(folder):
    """Run retention on two ranks, which share the verification and its results."""
    job = Job(folder, "fsdp", interval=1, keep_latest_k=2)
    job.train(2)
    if job.checkpointer.main_peers.is_main:
        damage(folder / "step-00000002" / "__1_0.distcp")
    job.checkpointer.main_peers.maximum(0)
    job.train(1)
    return saved_steps(folder)


def test_retention_on_several_ranks(tmp_path):
    expected = [f"step-0000000{step}" for step in (1, 2, 3)]
    assert run_ranks(2, retain_on_ranks, tmp_path) == [expected] * 2


# Full disks, retries, runs that continue


def fail_writes(monkeypatch, times):
    write, remaining = storage.write_tensors, [times]

    def fail(*args):
        if remaining[0]:
            remaining[0] -= 1
            raise OSError(122, "Disk quota exceeded")
        return write(*args)

    monkeypatch.setattr(storage, "write_tensors", fail)
    return remaining


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_failed_save_is_retried(tmp_path, monkeypatch, caplog, mode):
    remaining = fail_writes(monkeypatch, 2)
    job = Job(tmp_path, async_mode=mode, retry_pauses=(0.001, 0.001))
    job.train(2)
    job.checkpointer.finish()
    assert remaining == [0] and saved_steps(tmp_path) == ["step-00000002"]
    assert caplog.text.count("Disk quota exceeded") == 2 and "again in 0.001 s" in caplog.text
    remaining[0] = 3
    with pytest.raises(CheckpointError, match="Disk quota exceeded"):
        job.train(2)
        job.checkpointer.finish()
    assert saved_steps(tmp_path) == ["step-00000002"]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_run_continues_after_a_failed_save_except_the_last(tmp_path, monkeypatch, caplog, mode):
    remaining = fail_writes(monkeypatch, 1)
    job = Job(tmp_path, async_mode=mode, on_save_error="continue")
    failures = []
    job.checkpointer.hooks.after_failed_save = failures.append
    job.train(3)
    if job.checkpointer.running:
        job.checkpointer.running.join()
    job.train(1)  # the next due step saves, even if it is the one that notices the failure
    job.checkpointer.finish()
    assert saved_steps(tmp_path) == ["step-00000004"]
    assert "the run goes on without it" in caplog.text
    assert len(failures) == 1 and "Disk quota exceeded" in failures[0]
    remaining[0] = 1
    with pytest.raises(CheckpointError, match="Disk quota exceeded"):
        job.train(1, last=True)
        job.checkpointer.finish()
    assert saved_steps(tmp_path) == ["step-00000004"]


def failed_saves_of(argv):
    """Train with a first save that fails, and return the rows about it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer, "RETRY_PAUSES", ())
        fail_writes(patch, 1)
        jobs.train(argv)
    rows = map(json.loads, (Path(load(argv).job.dump_folder) / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row.get("event") == "failed_save"]


def test_a_failed_save_is_a_row_of_the_metrics(tmp_path):
    texts = jobs.write_texts(tmp_path)
    options = dict(checkpoint__enable=True, checkpoint__interval=1, training__steps=2)
    (rows,) = run_ranks(1, failed_saves_of, jobs.arguments(tmp_path / "run", texts, **options))
    assert [row["step"] for row in rows] == [1] and "Disk quota exceeded" in rows[0]["reason"]


def test_the_last_save_is_written_also_after_a_failed_one(tmp_path, monkeypatch):
    fail_writes(monkeypatch, 1)
    job = Job(tmp_path, async_mode="async", on_save_error="continue")
    job.train(2)
    job.checkpointer.running.join()
    job.train(1, last=True)
    job.checkpointer.finish()
    assert saved_steps(tmp_path) == ["step-00000003"]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_rollback_skips_a_failed_save(tmp_path, monkeypatch, caplog, mode):
    """The failure is noticed only at the rollback; without any save a rollback is impossible."""
    remaining = fail_writes(monkeypatch, 1)
    job = Job(tmp_path, async_mode=mode, on_save_error="continue")
    job.train(2)
    assert not job.checkpointer.prepare_roll_back() and "the run goes on without it" in caplog.text
    job.train(2)
    assert job.checkpointer.prepare_roll_back()
    remaining[0] = 1
    job.train(3)
    assert job.checkpointer.prepare_roll_back() and caplog.text.count("the run goes on without it") == 2
    job.checkpointer.roll_back()
    assert job.step == 4 and saved_steps(tmp_path) == ["step-00000004"]
    job.train(2)
    job.checkpointer.finish()
    assert saved_steps(tmp_path) == ["step-00000004", "step-00000006"]


def test_a_run_that_stops_for_a_failed_save_does_not_roll_back(tmp_path, monkeypatch):
    job = Job(tmp_path, async_mode="async")
    job.train(2)
    job.checkpointer.finish()
    fail_writes(monkeypatch, 1)
    job.train(2)
    with pytest.raises(CheckpointError, match="step 4 was not saved: .*Disk quota exceeded"):
        job.checkpointer.prepare_roll_back()


Usage = namedtuple("Usage", "total used free")


def test_free_space_is_checked_before_writing(tmp_path, monkeypatch):
    job = Job(tmp_path)
    job.train(2)
    size = job.checkpointer.needed_bytes
    assert size == sum(path.stat().st_size for path in (tmp_path / "step-00000002").glob("[!sm]*"))
    usage = [Usage(0, 0, size)]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage[0])
    monkeypatch.setattr(saving, "_write", None)
    with pytest.raises(CheckpointError, match="KiB free and a checkpoint needs .*checkpoint.keep_latest_k"):
        job.train(2)
    assert saved_steps(tmp_path) == ["step-00000002"]
    monkeypatch.undo()
    usage[0] = Usage(0, 0, 2 * size)
    job.train(2)
    assert saved_steps(tmp_path) == ["step-00000002", "step-00000006"]


def test_the_first_save_estimates_its_size_from_the_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 100))
    with pytest.raises(CheckpointError, match="a checkpoint needs"):
        Job(tmp_path).train(2)


# Time limits


def test_no_decision_depends_on_the_wall_clock():
    """Setting the clock changes no behaviour: wall-clock times are only reported, or compared with SLURM's."""
    package = jobs.ROOT / "torchtitan"
    sources = {str(path.relative_to(package)): path.read_text() for path in package.rglob("*.py")}
    asks = {path for path, text in sources.items() if re.search(r"\btime\.time\b", text)}
    # allowed: time of a metrics row, time lost by a restart, duration of a save, SLURM's end time, and the check that
    # the clocks of machines agree
    assert asks == {
        "commands/bench.py",
        "training/reporting.py",
        "metrics/goodput.py",
        "process/ranks.py",
        "training/preflight.py",
    }


def test_time_limits_have_slurms_format():
    assert [seconds_of(text) for text in ("0:00:07", "12:34:56", "2-01:00:00")] == [7.0, 45296.0, 176400.0]
    assert shortest(None, 5.0, None, 3.0) == 3.0 and shortest(None) is None
    assert load(["--job.time_limit=1-00:00:00"]).job.time_limit == "1-00:00:00"
    for malformed in ("90", "1:60:00", "1:00", "x"):
        with pytest.raises(ConfigError, match="job.time_limit"):
            load([f"--job.time_limit={malformed}"])


def test_the_time_limit_leaves_room_for_two_steps_and_saves():
    now = itertools.count(0, 10)  # a step takes 10 seconds
    limit = TimeLimit(200, clock=lambda: next(now))
    turn_starts = []
    while not limit.is_near(save_seconds=5):
        turn_starts.append(limit._step_started)
    # 200 - 2 * (10 + 5) - 5 % = 160
    assert turn_starts[-1] == 150 and limit._step_started == 160
    turns = iter([0, 1000, 1010, 1020])  # the first step compiles, so its duration does not count
    compiled = TimeLimit(2000, clock=lambda: next(turns, 1030))
    assert not any(compiled.is_near(save_seconds=5) for _ in range(3))
    assert TimeLimit.is_near(limit := TimeLimit(2000, clock=iter([0, 0, 1000]).__next__), 5) is False
    assert limit.is_near(5)  # until the second step, the duration of the first is used
    forever = TimeLimit(None, clock=lambda: next(now))
    assert not any(forever.is_near(1e9) for _ in range(5))


def test_a_run_saves_before_its_time_limit_and_resumes(tmp_path):
    """The number of steps is not asserted: it depends on the load of the machine."""
    texts = jobs.write_texts(tmp_path / "texts")
    options = dict(
        checkpoint__enable=True, training__steps=10**6, training__local_batch_size=4, job__time_limit="0:00:05"
    )
    argv = jobs.arguments(tmp_path / "run", texts, **options)
    code, out, err = jobs.run(argv, ranks=2)
    assert code == 11, err  # not 143: no signal was sent
    assert "before the time limit" in out
    assert "the weights will be lost" not in err
    last = jobs.logged_steps(tmp_path / "run")[-1]["step"]
    assert layout.check_complete(tmp_path / "run" / "checkpoint" / layout.step_name(last)).step == last < 10**6
    assert (tmp_path / "run" / "last_checkpoint").read_text().strip() == layout.step_name(last)
