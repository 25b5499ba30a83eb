"""Step guards: all ranks skip, roll back or stop at the same bad steps, and at no others."""

import json
import math
import random

import pytest

from tests.support import jobs, judged
from tests.support.guarded_jobs import PLANS, options
from tests.support.judged import lines
from tests.support.pool import run_ranks
from torchtitan.config import manager
from torchtitan.guards import BadStep, NonFiniteError
from torchtitan.guards.steps import StepGuard
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.process.ranks import read_ranks
from torchtitan.training.batches import PeerStopped
from torchtitan.training.trainer import Trainer

anywhere = judged.anywhere

# Verdicts of StepGuard


def normal_steps(steps, seed=0):
    """Return (loss, gradient norm) of normal steps: a falling, noisy loss, and norms with a long tail."""
    draw = random.Random(seed)
    for step in range(1, steps + 1):
        yield step, 2 + 8 / math.sqrt(step) + draw.gauss(0, 0.05), math.exp(draw.gauss(0, 0.15))


def test_two_thousand_ordinary_steps_are_all_applied():
    guard = StepGuard(spike="skip", non_finite="skip")
    assert all(guard.judge(*step).action == "go on" for step in normal_steps(2000))
    assert guard.counts() == {"steps_skipped": 0, "rolled_back": 0}


@pytest.mark.parametrize("quantity", ["loss", "norm"])
def test_a_spike_is_skipped_and_not_added_to_the_window(quantity):
    guard = StepGuard(spike="skip", spike_window=32, patience=10)
    for step in normal_steps(300):
        guard.judge(*step)
    window = guard.state_dict()["seen"]
    loss, norm = window["loss"][-1], window["norm"][-1]
    far = (loss + 20 * 0.05, norm) if quantity == "loss" else (loss, norm * 8)
    verdict = guard.judge(301, *far)
    assert verdict.action == "skip" and ("loss" if quantity == "loss" else "gradient norm") in verdict.reason
    assert "of the 32 steps before" in verdict.reason
    assert guard.state_dict()["seen"] == window and guard.judge(302, loss, norm).action == "go on"


def test_no_spike_is_seen_before_half_a_window_or_below_the_floor():
    guard = StepGuard(spike="skip", spike_window=8)
    for step in range(1, 4):
        assert guard.judge(step, 1.0, 1.0).action == "go on"
    assert guard.judge(4, 100.0, 1.0).action == "go on"
    constant = StepGuard(spike="skip", spike_window=8)
    for step in range(1, 9):
        constant.judge(step, 1.0, 1.0)
    assert constant.judge(9, 1.05, 1.0).action == "go on" and constant.judge(10, 1.2, 1.0).action == "skip"


def test_a_resumed_guard_decides_as_an_uninterrupted_one():
    series = [(step, loss * (3 if step % 97 == 0 else 1), norm) for step, loss, norm in normal_steps(600)]
    uninterrupted, first = (StepGuard(spike="skip", loss_rise=50.0) for _ in range(2))
    verdicts = [uninterrupted.judge(*step).action for step in series]
    for step in series[:250]:
        first.judge(*step)
    second = StepGuard(spike="skip", loss_rise=50.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert [second.judge(*step).action for step in series[250:]] == verdicts[250:]
    assert "skip" in verdicts[250:] and second.state_dict() == uninterrupted.state_dict()
    forgetful = StepGuard(spike="skip", loss_rise=50.0)  # the control: its window is not restored
    assert [forgetful.judge(*step).action for step in series[250:]] != verdicts[250:]


def test_too_many_bad_steps_in_a_row_end_the_run():
    guard = StepGuard(non_finite="skip", patience=3)
    assert [guard.judge(step, math.nan, 1.0).action for step in (1, 2)] == ["skip"] * 2
    assert guard.judge(3, 1.0, 1.0).action == "go on"
    assert [guard.judge(step, 1.0, math.inf).action for step in (4, 5, 6)] == ["skip", "skip", "stop"]


def test_a_step_that_is_bad_again_after_a_rollback_is_skipped():
    guard = StepGuard(non_finite="rollback")
    assert guard.judge(7, math.nan, 1.0).action == "roll back"
    guard.load_state_dict({})  # the checkpoint is older than the rollback
    guard.on_rollback(4)
    assert guard.judge(7, math.nan, 1.0).action == "skip"
    assert guard.counts() == {"steps_skipped": 1, "rolled_back": 1}
    assert guard.judge(8, math.nan, 1.0, prepare_roll_back=lambda: False).action == "skip"
    assert guard.judge(9, math.nan, None, can_skip=False).action == "roll back"
    guard.load_state_dict({})
    assert guard.judge(9, math.nan, None, can_skip=False).action == "stop"


def test_rollbacks_to_one_checkpoint_are_limited():
    guard = StepGuard(non_finite="rollback", patience=3)
    for step in (5, 6, 7):
        assert guard.judge(step, math.nan, 1.0).action == "roll back"
        guard.load_state_dict({})
        guard.on_rollback(4)
    verdict = guard.judge(8, math.nan, 1.0)
    assert verdict.action == "stop" and "3 times back to step 4 (guard.patience)" in verdict.reason


def test_a_loss_that_keeps_rising_stops_the_run():
    guard = StepGuard(loss_rise=0.5, spike_window=4)
    for step in range(1, 40):
        assert guard.judge(step, 2.0 - step / 100, 1.0).action == "go on"
    rising = [guard.judge(step, 1.6 + (step - 40) / 10, 1.0) for step in range(40, 50)]
    stopped = next(verdict for verdict in rising if verdict.action == "stop")
    assert "the mean loss of the last 4 steps is " in stopped.reason and rising[0].action == "go on"


def test_loss_threshold_counts_steps_in_a_row():
    losses = [9, 9, 1, 9, 9, 9, 9, 1, 9, 5.0]  # the last one is not above 5
    for policy, action in (("stop", "stop"), ("skip", "skip"), ("rollback", "roll back")):
        guard = StepGuard(loss_threshold=5.0, loss_patience=3, loss_policy=policy)
        verdicts = [guard.judge(step, loss, 1.0) for step, loss in enumerate(losses, 1)]
        assert [verdict.action for verdict in verdicts] == ["go on"] * 5 + [action] * 2 + ["go on"] * 3
        assert "the loss is 9, above 5 for 3 steps (guard.loss_threshold)" in verdicts[5].reason
    uninterrupted, first, second = (StepGuard(loss_threshold=5.0) for _ in range(3))
    for step in (1, 2):
        uninterrupted.judge(step, 9, 1.0), first.judge(step, 9, 1.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.judge(3, 9, 1.0) == uninterrupted.judge(3, 9, 1.0) and second.above == 3
    assert StepGuard(loss_threshold=5.0, loss_patience=1, non_finite="skip").judge(1, math.nan, 1.0).action == "skip"


def test_a_guard_without_options_has_no_state():
    guard = StepGuard()
    assert not guard.is_active and guard.state_dict() == {} and guard.counts() == {}


# Guards in a run

BAD = 5


class FaultyTrainer(Trainer):
    """In step `BAD` only the last rank gets a bad gradient norm or loss: once, or each time the step is repeated."""

    error_kind, once, has_failed, stops_before = "", False, False, False

    def fetch(self):
        self.stops.requested |= self.stops_before and self.current_step == BAD - 1
        fetched = super().fetch()
        is_bad_rank = self.current_step == BAD - 1 and self.ranks.rank == self.ranks.world_size - 1
        self.model.fault = is_bad_rank and self.error_kind if not (self.once and self.has_failed) else ""
        self.has_failed |= is_bad_rank
        return fetched


class FaultyModel(ParallelModel):
    """A model with a wrong loss or gradient norm, according to `fault`."""

    fault = ""

    def forward_backward(self, *args, **kwargs):
        loss = super().forward_backward(*args, **kwargs)
        return loss + 1e3 if self.fault == "spike" else loss * math.nan if self.fault == "loss" else loss

    def clip_gradients(self, max_norm):
        norm = super().clip_gradients(max_norm)
        return norm * float(self.fault) if self.fault in ("nan", "inf") else norm


def train_with_fault(argv, error_kind, once=False, stops=False):
    """Train with a fault of `error_kind` in step `BAD`; `stops` requests a stop before that step.

    Returns the name of the error raised, the last step, the state hash after each step, the guard's counts, and the
    number of samples read.
    """
    trainer = FaultyTrainer(manager.load(argv), read_ranks())
    trainer.error_kind, trainer.once, trainer.stops_before = error_kind, once, stops
    trainer.model.__class__ = FaultyModel
    states, step = {}, trainer.step

    def record_state(batches):
        step(batches)
        states[trainer.current_step] = jobs.state_hash(trainer)

    trainer.step, raised = record_state, None
    try:
        trainer.train()
    except (BadStep, PeerStopped) as error:
        raised = type(error).__name__
    trainer.metrics.close()
    return raised, trainer.current_step, states, trainer.guards.steps.counts(), trainer.state.position.samples


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return jobs.write_texts(tmp_path_factory.mktemp("texts"))


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_that_one_rank_finds_bad_is_skipped_by_all(plan, texts, tmp_path):
    argv = jobs.arguments(tmp_path, texts, **options(guard__non_finite="skip", **PLANS[plan]))
    one, two = run_ranks(2, train_with_fault, argv, "nan")
    raised, last, states, counts, _ = one
    assert (raised, last, counts) == (None, 8, {"steps_skipped": 1, "rolled_back": 0})
    assert (two[1], two[3]) == (last, counts) and two[2][BAD] == two[2][
        BAD - 1
    ]  # states differ: a pipeline rank has other layers
    assert states[BAD] == states[BAD - 1] and len(set(states.values())) == 7
    rows = jobs.logged_steps(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["steps_skipped"] for row in rows] == [0] * 4 + [1] * 4 and "skipped" in rows[BAD - 1]["marked"]
    uninterrupted = run_ranks(
        2, train_with_fault, jobs.arguments(tmp_path / "straight", texts, **options(**PLANS[plan])), ""
    )[0]
    assert (
        uninterrupted[2][BAD - 1] == states[BAD - 1] and uninterrupted[4] == one[4]
    )  # a skipped step consumes its data


@pytest.mark.parametrize("plan", ["FSDP", "PP", "EP"])
def test_a_transient_error_leaves_no_trace_after_a_rollback(plan, texts, tmp_path):
    """The run equals one without the error, bit for bit. An error that comes again is skipped."""
    job = options(guard__non_finite="rollback", **PLANS[plan])
    uninterrupted = run_ranks(2, train_with_fault, jobs.arguments(tmp_path / "straight", texts, **job), "")[0]
    once = run_ranks(2, train_with_fault, jobs.arguments(tmp_path / "once", texts, **job), "inf", True)
    assert [answer[3] for answer in once] == [{"steps_skipped": 0, "rolled_back": 1}] * 2
    assert once[0][2] == uninterrupted[2] and once[0][4] == uninterrupted[4]
    rows = [json.loads(line) for line in (tmp_path / "once/metrics.jsonl").read_text().splitlines()]
    (event,) = [row for row in rows if row.get("event") == "rollback"]
    assert (event["step"], event["steps_lost"]) == (3, 1) and "gradient norm is inf" in event["cause"]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9))
    assert '"step": 4' in (tmp_path / "once/metrics.redone.jsonl").read_text()
    if plan == "FSDP":
        repeated = run_ranks(2, train_with_fault, jobs.arguments(tmp_path / "again", texts, **job), "inf")
        assert [answer[3] for answer in repeated] == [{"steps_skipped": 1, "rolled_back": 1}] * 2
        assert repeated[0][2][BAD] == uninterrupted[2][BAD - 1]


def test_a_stop_request_is_obeyed_after_a_rollback(texts, tmp_path):
    """The state to which it rolled back is saved."""
    job = options(guard__non_finite="rollback")
    raised, last, states, *_ = run_ranks(
        1, train_with_fault, jobs.arguments(tmp_path, texts, **job), "nan", True, True
    )[0]
    assert (raised, last, max(states)) == (None, 3, BAD - 1)


def test_before_the_first_checkpoint_a_rollback_becomes_a_skip(texts, tmp_path):
    job = options(guard__non_finite="rollback", checkpoint__interval=100)
    (raised, last, states, counts, _) = run_ranks(2, train_with_fault, jobs.arguments(tmp_path, texts, **job), "nan")[0]
    assert (raised, last, counts) == (None, 8, {"steps_skipped": 1, "rolled_back": 0})


SPIKES = dict(guard__spike="skip", guard__spike_window=4)


def test_a_spike_is_skipped_and_applied_without_the_guard(texts, tmp_path):
    one, two = run_ranks(2, train_with_fault, jobs.arguments(tmp_path / "on", texts, **options(**SPIKES)), "spike")
    assert one[3] == two[3] == {"steps_skipped": 1, "rolled_back": 0} and one[2][BAD] == one[2][BAD - 1]
    off = run_ranks(2, train_with_fault, jobs.arguments(tmp_path / "off", texts, **options()), "spike")[0]
    assert off[2][BAD] != off[2][BAD - 1]


def test_loss_threshold_stops_the_run_also_between_logged_steps(texts, tmp_path):
    above = options(guard__loss_threshold=0.5, guard__loss_patience=BAD, metrics__log_freq=100)
    answers = run_ranks(2, train_with_fault, jobs.arguments(tmp_path, texts, **above), "")
    assert {answer[:2] for answer in answers} == {("BadStep", BAD - 1)}
    assert (tmp_path / "checkpoint" / f"step-{BAD - 1:08d}" / "manifest.json").exists()


def test_policy_stop_saves_the_last_good_step(texts, tmp_path):
    for error_kind, job, raised in (
        ("spike", SPIKES | dict(guard__spike="stop"), "BadStep"),
        ("nan", {}, "NonFiniteError"),
    ):
        argv = jobs.arguments(tmp_path / error_kind, texts, **options(**job))
        answers = (
            run_ranks(2, train_with_fault, argv, error_kind)
            if error_kind == "spike"
            else run_ranks(1, train_with_fault, argv, error_kind)
        )
        assert {answer[:2] for answer in answers} == {(raised, BAD - 1)}
        assert (tmp_path / error_kind / "checkpoint" / f"step-{BAD - 1:08d}" / "manifest.json").exists()


def test_the_guard_state_is_restored_on_resume(texts, tmp_path):
    job = options(guard__non_finite="skip", guard__patience=2, **SPIKES)
    uninterrupted = run_ranks(1, train_with_fault, jobs.arguments(tmp_path / "a", texts, **job), "nan")[0]
    for steps in (6, 8):
        argv = jobs.arguments(tmp_path / "b", texts, **job | dict(training__steps=steps, lr_scheduler__total_steps=8))
        resumed = run_ranks(1, train_with_fault, argv, "nan")[0]
    assert resumed[3] == uninterrupted[3] == {"steps_skipped": 1, "rolled_back": 0}
    assert resumed[2][8] == uninterrupted[2][8]


def test_steps_in_backward_are_rolled_back_and_never_skipped(texts, tmp_path):
    job = options(guard__non_finite="rollback", optimizer__early_step_in_backward=True, training__max_norm=0)
    job |= dict(training__local_batch_size=8)

    def run(folder, error_kind, once=False):
        return run_ranks(1, train_with_fault, jobs.arguments(tmp_path / folder, texts, **job), error_kind, once)[0]

    uninterrupted = run("straight", "")
    lost = run("once", "loss", True)
    assert lost[2] == uninterrupted[2] and lost[3] == {"steps_skipped": 0, "rolled_back": 1}
    assert run("again", "loss")[0] == NonFiniteError.__name__
    assert not (tmp_path / "again/checkpoint" / f"step-{BAD - 1:08d}").exists()


# Faults of jobs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--guard.spike=skip", "--optimizer.early_step_in_backward", "--training.max_norm=0"],
            'guard.spike: given "skip"; allowed: "stop" or "rollback" with optimizer.early_step_in_backward; each '
            "update happens in backward, before the loss or the norm is known",
        ),
        (
            ["--guard.non_finite=rollback"],
            'guard.non_finite: given "rollback"; allowed: "rollback" only with checkpoint.enable; a rollback needs '
            "a checkpoint; set it, or write skip",
        ),
        (
            ["--guard.spike_sigmas=3"],
            "guard.spike_sigmas: given 3.0; allowed: 6.0 without guard.spike; set both, or leave it out",
        ),
        (
            ["--guard.patience=3"],
            "guard.patience: given 3; allowed: 5 without a guard with skip or rollback; set both, or leave it out",
        ),
        (
            ["--guard.loss_policy=skip", "--guard.patience=4"],
            'guard.loss_policy: given "skip"; allowed: "stop" without guard.loss_threshold; set both, or leave it out',
        ),
        (
            ["--guard.loss_threshold=3", "--guard.loss_policy=rollback"],
            'guard.loss_policy: given "rollback"; allowed: "rollback" only with checkpoint.enable; a rollback needs '
            "a checkpoint; set it, or write skip",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_impossible_guard_options_are_refused(options, message, anywhere):
    assert lines(*options) == [message]
