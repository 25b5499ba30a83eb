"""Goodput: every second of a run has one cause, also across restarts and rollbacks."""

import json
import math
import os
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests.support import jobs
from tests.support.pool import run_ranks
from torchtitan.config.manager import load
from torchtitan.job import ResolvedJob
from torchtitan.metrics import plot
from torchtitan.metrics.goodput import CAUSE_OF, CAUSES, GPU_HOURS_PER_FAILURE, Goodput
from torchtitan.process.heartbeat import PHASES
from torchtitan.process.ranks import Restart
from torchtitan.training import reporting


class Clock:
    now = 100.0

    def __call__(self):
        return self.now

    def spend(self, goodput, cause, seconds):
        goodput.enter(cause)
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


def test_every_second_has_one_cause(clock):
    goodput = Goodput(clock=clock)
    clock.now += 5
    for cause, seconds in (("compile", 7), ("data", 1), ("train", 80), ("validation", 4), ("save", 3)):
        clock.spend(goodput, cause, seconds)
    row = goodput.row()
    assert row["goodput"] == 0.8 and sum(row[f"{cause}_seconds"] for cause in CAUSES) == 100
    assert goodput.summary() == (
        "80.0 % training, 7.0 % the first step, 5.0 % starting, 4.0 % validation, 3.0 % saving, 1.0 % waiting for data"
    )


def test_every_phase_that_a_rank_tells_in_a_step_has_a_cause():
    assert set(PHASES) - set(CAUSE_OF) == {"start", "load"} and set(CAUSE_OF.values()) <= set(CAUSES)
    assert CAUSE_OF["end"] != "save", "the picture would be a save that holds the run up"


def test_a_restart_counts_from_the_failure_and_knows_what_is_done_again(clock):
    first = Goodput(clock=clock)
    clock.spend(first, "train", 30)
    saved = json.loads(json.dumps(first.state_dict()))
    clock.now += 20  # trained, and lost; the launcher notices it and pauses
    failed_at = clock.now
    clock.now += 9
    second = Goodput(failed_at, clock)
    clock.now += 1
    second.load_state_dict(saved)
    second.failed(20)
    clock.now += 2
    clock.spend(second, "train", 40)
    spent = second.state_dict()
    assert (spent["train"], spent["restart"], spent["redone"], spent["failures"]) == (70, 12, 20, 1)
    assert sum(spent[cause] for cause in CAUSES) == 30 + 20 + 12 + 40


@pytest.mark.parametrize(("background", "failed"), [(False, False), (False, True), (True, False), (True, True)])
def test_the_save_that_a_run_goes_on_from_is_counted(background, failed, clock, tmp_path):
    """The state is from the save's start. A background save overlaps training, which is lost if the run fails then."""
    first = Goodput(clock=clock, wall=clock)
    clock.spend(first, "train", 30)
    first.enter("save")
    saved = json.loads(json.dumps(first.state_dict()))
    clock.now += 4
    os.utime(tmp_path, (clock.now, clock.now))
    clock.now += 6
    second = Goodput(clock.now if failed else None, clock, clock)
    second.load_state_dict(saved)
    restart = Restart(1, "", 0, 1, 0.0, ended=clock.now) if failed else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reporting, "time", SimpleNamespace(monotonic=clock, time=clock))
        reporting.record_start([], background, restart, Mock(), second, 1, tmp_path)
    in_vain = background and failed
    assert second.seconds["save"] == (0 if in_vain else 4) and second.saves == (not in_vain)
    assert second.seconds["redone"] == (10 if in_vain else 6 if failed else 0)


@pytest.mark.parametrize("copied_after, seconds", [(0, 9), (86400, 2)])
def test_a_copied_checkpoint_was_not_saved_for_days(copied_after, seconds, clock, tmp_path):
    """Files of a copy are of its time, and the folder of its end."""
    first = Goodput(clock=clock, wall=lambda: 1000.0)
    state = first.state_dict()
    (tmp_path / "state.json").touch()
    os.utime(tmp_path / "state.json", (0, 1007.0 + copied_after))
    os.utime(tmp_path, (0, 1009.0 + copied_after))
    second = Goodput(clock=clock)
    second.load_state_dict(state)
    reporting.record_start([], False, None, Mock(), second, 1, tmp_path)
    assert (second.seconds["save"], second.saves) == (seconds, 1)


def test_a_way_back_makes_all_since_the_save_done_again(clock):
    goodput = Goodput(clock=clock)
    clock.spend(goodput, "train", 30)
    goodput.enter("save")
    saved = goodput.state_dict()
    clock.now += 4
    goodput.saves += 1
    for cause, seconds in (("data", 2), ("train", 10), ("validation", 1)):
        clock.spend(goodput, cause, seconds)
    goodput.load_state_dict(saved)
    assert goodput.seconds == dict.fromkeys(CAUSES, 0.0) | {"train": 30.0, "save": 4.0, "redone": 13.0}
    assert (goodput.failures, goodput.saves) == (1, 1)


def test_the_best_interval_is_that_of_young_and_daly(clock):
    goodput = Goodput(clock=clock)
    clock.spend(goodput, "train", 10_000)
    assert goodput.best_interval(8) is None
    clock.spend(goodput, "save", 4)
    goodput.saves = 2
    # 10 h between failures and 2 s a save: 268 s
    assert goodput.best_interval(5000) == pytest.approx(math.sqrt(2 * 36_000 * 2)) and GPU_HOURS_PER_FAILURE == 5e4
    goodput.failures = 4  # its own are known
    assert goodput.best_interval(5000) == pytest.approx(math.sqrt(2 * 10_004 / 4 * 2))


@pytest.mark.parametrize("train_seconds, advised", [(3500, False), (3600, True)])
def test_only_a_run_of_an_hour_or_more_is_advised_how_often_to_save(train_seconds, advised, clock, tmp_path, caplog):
    goodput = Goodput(clock=clock)
    clock.spend(goodput, "train", train_seconds)
    clock.spend(goodput, "save", 4)
    goodput.saves = 2
    arguments = [f"--job.dump_folder={tmp_path}", "--model.tokenizer_path=bytes", "--training.steps=100"]
    with caplog.at_level("INFO"):
        ranks = Mock(is_main=True, world_size=5000)
        reporting.log_end(ResolvedJob(load(arguments)), ranks, Mock(path=tmp_path / "metrics.jsonl"), goodput, {}, 100)
    assert ("Young" in caplog.text) == advised
    if advised:  # sqrt(2 x 36000 s x 2 s) = 379 s, at 36 s a step
        assert "saves       best every 6:19, or 11 steps, by as many failures as others report" in caplog.text


def test_a_run_accounts_for_itself_over_its_starts(tmp_path):
    texts = jobs.write_texts(tmp_path / "texts")
    options = dict(checkpoint__enable=True, checkpoint__interval=2, lr_scheduler__total_steps=6)
    for steps in (4, 6):
        run_ranks(1, jobs.train, jobs.arguments(tmp_path / "run", texts, training__steps=steps, **options))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    events = [row for row in rows if row.get("event") == "goodput"]
    assert [row["step"] for row in events] == [2, 4, 6] and all(row["saved"] for row in events)
    assert events[2]["save_seconds"] > events[1]["save_seconds"] > events[0]["save_seconds"] > 0
    assert all(0 < row["goodput"] < 1 and row["start_seconds"] > 0 and row["compile_seconds"] > 0 for row in events)
    for earlier, later in zip(events, events[1:], strict=False):
        assert all(later[f"{cause}_seconds"] >= earlier[f"{cause}_seconds"] for cause in CAUSES)
    assert events[2]["start_seconds"] > events[1]["start_seconds"]  # of both starts


def test_a_restart_is_marked_in_the_picture(tmp_path, monkeypatch):
    rows = [{"step": s, "loss": 4.0 - s / 10, "lr": 1e-3, "tokens_per_second": 100.0} for s in range(1, 6)]
    rows[3:3] = [{"step": 3, "event": "restart", "cause": "rank 1 was ended by SIGKILL"}]
    rows[2:2] = [{"step": 2, "event": "rollback", "cause": "the loss is nan"}, {"step": 2, "event": "goodput"}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = []
    monkeypatch.setattr(plot, "save_picture", lambda figure, path: drawn.append(figure))
    assert plot.draw_training_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png", "a run")
    for axes in drawn[0].axes:
        marks = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"]
        assert marks == [2, 3]
