"""Tests of decisions by validation metrics: the best checkpoint is retained and exported, and early stopping."""

import json
import math

import pytest
import torch

from tests.support import jobs, judged
from tests.support.judged import lines
from tests.support.pool import RankFailed, run_ranks
from torchtitan.checkpoint.folders import Metric, best_in
from torchtitan.checkpoint.layout import NothingLoadable, step_of
from torchtitan.checkpoint.weight_sources import open_weights
from torchtitan.commands import checkpoints
from torchtitan.commands.generate import find_checkpoint
from torchtitan.config import manager
from torchtitan.core.cadence import cadence_of
from torchtitan.core.errors import LimitError
from torchtitan.guards.stop_conditions import ValidationResults
from torchtitan.job import ResolvedJob
from torchtitan.process.ranks import read_ranks
from torchtitan.training.trainer import Trainer

anywhere = judged.anywhere
LOSS, ACCURACY = Metric.of("validation_loss", None), Metric.of("validation_accuracy", None)


def first_end(findings, values):
    """Return the number of the validation after which the run ends, or None."""
    for number, value in enumerate(values, 1):
        findings.record(number, {findings.metric.name: value})
        if findings.stop_reason:
            return number
    return None


@pytest.mark.parametrize(
    "metric, min_delta, values, end",
    [
        (LOSS, 0.0, [5, 4, 3, 2, 1], None),
        (LOSS, 0.0, [5, 5, 5], 3),
        (LOSS, 0.0, [5, 6, 4, 6, 3, 9, 3], 7),
        (LOSS, 0.5, [5, 4.6, 4.4, 4.0, 3.95], 5),  # 4.4 is better than 5 by more than .5, 3.95 than 4.4 is not
        (LOSS, 0.0, [math.nan, math.nan], 2),
        (LOSS, 0.0, [5, math.nan, -math.inf], 3),
        (ACCURACY, 0.0, [0.1, 0.2, 0.2, 0.3, 0.3, 0.2], 6),
    ],
)
def test_early_stop_after_patience_validations_without_improvement(metric, min_delta, values, end):
    assert first_end(ValidationResults(metric, 2, min_delta), values) == end
    assert first_end(ValidationResults(metric, None, min_delta), values) is None
    for cut in range(len(values)):  # and with a resume after each validation
        first, second = ValidationResults(metric, 2, min_delta), ValidationResults(metric, 2, min_delta)
        if first_end(first, values[:cut]) is None:
            second.load_state_dict(cut, json.loads(json.dumps(first.state_dict(cut), allow_nan=False)))
            assert second.is_missing(cut) == (cut == 0)  # a validation that was not finite counts too, and only once
            remaining = first_end(second, values[cut:])
            assert (remaining and remaining + cut) == end


def test_message_and_state_of_early_stopping():
    findings = ValidationResults(LOSS, 1, 0.25)
    findings.record(4, {"validation_loss": 2.0, "validation_f1": math.nan})
    state = {"best": 2.0, "in_vain": 0, "step": 4, "metric": "validation_loss", "highest": False}
    assert findings.state_dict(4) == {"measured": {"validation_loss": 2.0}, "early_stop": state}
    assert findings.state_dict(5) == {"early_stop": state}  # a later step was not validated
    findings.record(8, {"validation_loss": 1.9})
    message = "validation_loss was not better than 2 by more than 0.25 in 1 validation (early_stop.patience)"
    assert findings.stop_reason == message
    assert ValidationResults(LOSS).state_dict(0) == {} and not ValidationResults(LOSS).is_missing(3)
    resumed = ValidationResults(LOSS, 1)
    resumed.load_state_dict(7, {})  # a checkpoint of a run without early stopping
    assert resumed.stop_reason == "" and resumed.is_missing(7)
    assert Metric.of("validation_loss", "max").highest and not Metric.of("validation_accuracy", "min").highest


@pytest.mark.parametrize("other", [ACCURACY, Metric("validation_loss", highest=True)], ids=["name", "direction"])
def test_a_changed_metric_resets_the_count(other, caplog):
    """Values of different metrics cannot be compared: a loss of 2 would beat any accuracy."""
    first = ValidationResults(LOSS, 2)
    for step, loss in ((4, 2.0), (8, 3.0)):
        first.record(step, {"validation_loss": loss, "validation_accuracy": 0.5})
    assert first.since_best == 1
    for step_of_state, best in ((8, 0.5 if other is ACCURACY else 3.0), (9, None)):  # at 9 nothing was measured
        caplog.clear()
        second = ValidationResults(other, 2)
        with caplog.at_level("INFO"):
            second.load_state_dict(step_of_state, first.state_dict(step_of_state))
        assert (second.best, second.since_best) == (best, 0)
        message = f"early_stop: the checkpoint has counted by another metric, so {other.name} begins anew"
        assert caplog.messages == [message]
    same = ValidationResults(LOSS, 2)
    caplog.clear()
    same.load_state_dict(8, first.state_dict(8))
    assert (same.best, same.since_best) == (2.0, 1) and not caplog.messages


FAULTS = [
    (
        ["--checkpoint.best_metric=validation_loss", "--checkpoint.enable"],
        'checkpoint.best_metric: given "validation_loss"; allowed: nothing without validation.enable; set both, or '
        "leave it out",
    ),
    (
        ["--checkpoint.best_metric=validation_loss", "--validation.enable", "--checkpoint.interval=10"],
        'checkpoint.best_metric: given "validation_loss"; allowed: nothing with checkpoint.enable = false; set '
        "checkpoint.enable = true, or leave it out",
    ),
    (
        ["--checkpoint.best_metric=validation_los", "--checkpoint.enable", "--validation.enable"],
        'checkpoint.best_metric: given "validation_los"; allowed: "validation_loss"; did you mean "validation_loss"?',
    ),
    (
        ["--checkpoint.best_metric=validation_loss", "--checkpoint.enable", "--validation.enable"]
        + ["--validation.freq=7", "--checkpoint.interval=24"],
        "checkpoint.interval: given 24 steps; allowed: a multiple of the 7 steps between validations (validation.freq) "
        "with checkpoint.best_metric; write 21 or 28",
    ),
    (
        ["--checkpoint.best_metric=validation_loss", "--checkpoint.enable", "--validation.enable"]  # steps of the data
        + ["--validation.freq=3", "--checkpoint.interval=4", "--task.kind=sft", "--training.epochs=1"],
        "checkpoint.interval: given 4 steps; allowed: a multiple of the 3 steps between validations (validation.freq) "
        "with checkpoint.best_metric; write 3 or 6",
    ),
    (
        ["--checkpoint.best_metric=validation_loss", "--checkpoint.enable", "--validation.enable"]
        + ["--validation.freq=0.05", "--checkpoint.interval=0.03", "--training.steps=100"],
        "checkpoint.interval: given 3 steps; allowed: a multiple of the 5 steps between validations (validation.freq) "
        "with checkpoint.best_metric; write 5",
    ),
    (
        ["--checkpoint.best_metric=validation_loss", "--checkpoint.enable", "--validation.enable"]
        + ["--checkpoint.interval_type=seconds"],
        'checkpoint.interval_type: given "seconds"; allowed: "steps" with checkpoint.best_metric; each checkpoint '
        "must coincide with a validation, and validations are scheduled in steps",
    ),
    (
        ["--checkpoint.best_metric=validation_loss", "--checkpoint.enable", "--validation.enable"]
        + ["--checkpoint.load_only"],
        'checkpoint.best_metric: given "validation_loss"; allowed: nothing with checkpoint.load_only, which never '
        "saves; drop one of the two",
    ),
    (
        ["--checkpoint.best_metric=validation_loss", "--checkpoint.enable", "--validation.enable"]
        + ["--checkpoint.export_best"],
        "checkpoint.export_best: given true; allowed: false without checkpoint.last_save_model_only or "
        "adapter.last_save_in_peft; they select the export; set one of them",
    ),
    (
        ["--checkpoint.best_mode=max"],
        'checkpoint.best_mode: given "max"; allowed: nothing without checkpoint.best_metric; set '
        "checkpoint.best_metric",
    ),
    (
        ["--early_stop.patience=2"],
        "early_stop.patience: given 2; allowed: nothing without validation.enable; set both, or leave it out",
    ),
    (
        ["--early_stop.min_delta=0.1"],
        "early_stop.min_delta: given 0.1; allowed: nothing without early_stop.patience; set both or neither",
    ),
    (
        ["--early_stop.patience=2", "--early_stop.metric=validation_accuracy", "--validation.enable"],
        'early_stop.metric: given "validation_accuracy"; allowed: "validation_loss"; a validation '
        "of this task measures only these",
    ),
]


@pytest.mark.parametrize(
    "arguments, fault", FAULTS, ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else ""
)
def test_options_without_effect_are_refused(arguments, fault):
    assert lines(*arguments) == [fault]


def test_cadences_in_shares_are_judged_before_the_start():
    job = ["--checkpoint.best_metric=validation_loss", "--checkpoint.enable", "--validation.enable"]
    job = manager.load([*job, "--training.steps=10", "--checkpoint.interval=0.35", "--validation.freq=0.3"])
    with pytest.raises(LimitError, match="given 4 steps; allowed: a multiple of the 3 steps between"):
        _ = ResolvedJob(job).schedule.cadence  # the trainer calls it before it creates a process group


@pytest.mark.parametrize(
    "interval, freq, multiple",
    [("0.1", "0.05", 2), ("epoch", "2/epoch", 2), ("0.15", "0.05", 3), ("0.05", "0.05", 1), ("epoch", "3/epoch", 3)],
)
def test_intervals_stay_multiples_of_validations_for_every_total(interval, freq, multiple):
    """A save falls at most one validation after its exact step, though 0.15 / 0.05 is no whole number in floats."""
    arguments = ["--checkpoint.best_metric=validation_loss", "--checkpoint.enable", "--validation.enable"]
    config = manager.load([*arguments, f"--checkpoint.interval={interval}", f"--validation.freq={freq}"])
    config.training.epochs = 3
    for total in range(1, 400):
        _, validate, save = cadence_of(config, total)
        exact = total / 3 if interval == "epoch" else float(interval) * total
        assert save % validate == 0 and exact - 1e-9 <= save < exact + validate and save <= multiple * validate
        config.training.steps = total
        assert ResolvedJob(config).schedule.cadence.save == save  # the run has nothing against it
    (fault,) = lines(*arguments, "--checkpoint.interval=0.1", "--validation.freq=0.04", "--training.steps=103")
    assert fault.startswith("checkpoint.interval: given 11 steps; allowed: a multiple of the 5 steps")
    assert not lines(*arguments, "--checkpoint.interval=0.1", "--validation.freq=0.05", "--training.steps=103")


# Runs with scripted validation losses


class Scripted(Trainer):
    """A trainer with scripted validation losses on rank 0; other ranks have a better one, which does not count."""

    script: dict[int, float]
    stop_at = 0

    def maybe_validate(self, done):
        agree = self.preparer.agree

        def agreed(*arguments):
            self.valid, stopping = agree(*arguments)
            return self.valid, stopping

        def evaluate(batches):
            return {"": torch.tensor((self.script[self.current_step] if self.ranks.is_main else -1.0) * self.valid)}

        original_whole = self.model.sum_over_ranks
        self.preparer.agree, self.model.evaluate, self.model.sum_over_ranks = agreed, evaluate, lambda total: total
        super().maybe_validate(done)
        self.preparer.agree, self.model.sum_over_ranks = agree, original_whole

    def step(self, batch):
        super().step(batch)
        self.stops.requested |= self.current_step == self.stop_at


def run_script(argv, script, stop_at=0):
    """Run the script; return whether the run finished, and its last step."""
    trainer = Scripted(manager.load(argv), read_ranks())
    trainer.script, trainer.stop_at = dict(script), stop_at
    finished = trainer.train()
    trainer.metrics.close()
    return finished, trainer.current_step


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return jobs.write_texts(tmp_path_factory.mktemp("texts"))


def job(folder, texts, **options):
    settings = dict(training__steps=12, training__local_batch_size=4, checkpoint__enable=True, checkpoint__interval=2)
    settings |= dict(validation__enable=True, validation__freq=2, validation__dataset="text", validation__samples=4)
    settings |= dict(validation__dataset_path=texts, checkpoint__keep_latest_k=2)
    return jobs.arguments(folder, texts, **settings | options)


def saved(folder):
    return sorted(step_of(path.name) for path in (folder / "checkpoint").glob("step-*"))


SCRIPT = [(2, 5.0), (4, 3.0), (6, 4.0), (8, math.nan), (10, 4.0), (12, 3.0)]
BEST = dict(checkpoint__best_metric="validation_loss", checkpoint__last_save_model_only=True)


def test_the_best_checkpoint_is_retained_and_exported(texts, tmp_path, capsys):
    argv = job(tmp_path, texts, **BEST, checkpoint__export_best=True)
    assert run_ranks(2, run_script, argv, SCRIPT, 9) == [(False, 10)] * 2  # stopped before step 10 was validated
    assert saved(tmp_path) == [4, 8, 10]
    one = job(tmp_path, texts, **BEST, checkpoint__export_best=True, training__local_batch_size=8)
    assert run_ranks(1, run_script, one, SCRIPT) == [(True, 12)]  # over a resume, and on other ranks
    assert saved(tmp_path) == [4, 10, 12]
    assert checkpoints.main([str(tmp_path)]) == 0
    assert "the best is step 4, with a validation_loss of 3\na resume takes step 12" in capsys.readouterr().out
    for folder in (tmp_path, tmp_path / "checkpoint"):
        assert find_checkpoint(folder, f"{tmp_path}/config.toml", best=True)[1].name == "step-00000004"
    args = ResolvedJob(manager.load(argv)).model.args
    with (
        open_weights(str(tmp_path / "model"), "llama3", args) as export,
        open_weights(str(tmp_path / "checkpoint/step-00000004"), "llama3", args) as best,
        open_weights(str(tmp_path / "checkpoint/step-00000012"), "llama3", args) as last,
    ):
        name = "layers.1.attention.wq.weight"
        assert torch.equal(export.full_tensor(name), best.full_tensor(name)) and not torch.equal(
            best.full_tensor(name), last.full_tensor(name)
        )


def test_runs_without_a_best_checkpoint(texts, tmp_path, capsys):
    argv = job(tmp_path / "never", texts, **BEST, checkpoint__export_best=True, training__steps=2)
    with pytest.raises(RankFailed, match="no checkpoint in it has a validation_loss, which tells the best"):
        run_ranks(1, run_script, argv, [(2, math.nan)])
    run_ranks(1, run_script, job(tmp_path / "plain", texts, training__steps=2), [(2, 1.0)])
    with pytest.raises(NothingLoadable, match="its job has no checkpoint.best_metric"):
        best_in(tmp_path / "plain" / "checkpoint")
    assert checkpoints.main([str(tmp_path / "plain")]) == 0
    assert "the best" not in capsys.readouterr().out


@pytest.mark.parametrize("stops", [[], [5]], ids=["straight", "stopped ahead of a validation"])
def test_a_run_without_improvement_ends_as_finished(stops, texts, tmp_path):
    script = [(2, 5.0), (4, 4.4), (6, 4.2), (8, 4.0), (10, 1.0), (12, 1.0)]
    early = dict(early_stop__patience=2, early_stop__min_delta=0.5)
    argv = job(tmp_path, texts, **early, checkpoint__last_save_model_only=True)
    for stop in stops:
        assert run_ranks(2, run_script, argv, script, stop) == [(False, stop + 1)] * 2
    assert run_ranks(2, run_script, argv, script) == [(True, 8)] * 2
    assert saved(tmp_path)[-1] == 8 and (tmp_path / "model").is_dir()
    if stops:
        return
    assert run_ranks(2, run_script, argv, script) == [(True, 8)] * 2  # started again it is still done
    more = job(tmp_path, texts, **early | dict(early_stop__patience=3))
    assert run_ranks(2, run_script, more, script) == [(True, 12)] * 2
