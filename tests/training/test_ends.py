"""Ends of a run: after its last step, beyond it, and with nothing left to train."""

import signal
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from tests.support.jobs import SHALLOW, arguments, run, write_texts
from tests.support.pool import run_ranks
from tests.support.preference_jobs import write_pairs
from torchtitan import train as train_program
from torchtitan.checkpoint import CheckpointError
from torchtitan.config import manager
from torchtitan.core.errors import JobError
from torchtitan.datasets.sources import DataError
from torchtitan.guards import BadStep, ReplicasDiffer
from torchtitan.metrics.json_lines import read_records
from torchtitan.process.exit import stop_signals
from torchtitan.process.ranks import Ranks, read_ranks
from torchtitan.training import trainer as trainer_module
from torchtitan.training.trainer import Trainer

SAVING = dict(model__overrides=SHALLOW, checkpoint__enable=True, checkpoint__interval=100)


def train_to_end(argv: list[str]) -> tuple[bool, int, list[int]]:
    """Train a job; return whether it is done, its last step, and the steps that were made."""
    torch._dynamo.reset()
    trainer = Trainer(manager.load(argv), read_ranks())
    first, done = trainer.current_step, trainer.train()
    trainer.report()
    dist.barrier()
    return done, trainer.current_step, list(range(first + 1, trainer.current_step + 1))


def test_fewer_steps_than_the_newest_checkpoint_export_it_and_end_well(tmp_path):
    texts = write_texts(tmp_path)
    options = dict(SAVING, training__steps=4)
    assert run(arguments(tmp_path / "run", texts, **options))[0] == 0
    options |= dict(training__steps=2, checkpoint__last_save_model_only=True)
    code, out, err = run(arguments(tmp_path / "run", texts, **options))
    assert (code, err) == (0, "") and "nothing was left to train" in out and "stopped as asked" not in out
    assert (tmp_path / "run/model").is_dir()


def test_equal_steps_with_validation_export_once_more(tmp_path):
    texts = write_texts(tmp_path)
    options = dict(SAVING, training__steps=3, validation__enable=True, validation__split=0.1, validation__samples=4)
    options |= dict(validation__freq=1)
    argv = arguments(tmp_path / "run", texts, **options)
    assert run_ranks(1, train_to_end, argv) == [(True, 3, [1, 2, 3])]
    assert run_ranks(1, train_to_end, [*argv, "--checkpoint.last_save_model_only"]) == [(True, 3, [])]
    assert (tmp_path / "run/model").is_dir()
    argv = arguments(tmp_path / "run", texts, **options | dict(training__steps=2, early_stop__patience=1))
    assert run_ranks(1, train_to_end, argv) == [(True, 3, [])]


@pytest.mark.parametrize("unit, more, fewer", [("epochs", 2, 1), ("tokens", 1024, 300)])
def test_fewer_epochs_or_tokens_than_were_trained_end_well(tmp_path, unit, more, fewer):
    texts = write_texts(tmp_path, documents=12)
    options = dict(SAVING, training__seq_len=64)
    argv = arguments(tmp_path / "run", texts, **options, **{f"training__{unit}": more})
    ((done, last, _),) = run_ranks(1, train_to_end, argv)
    assert done and last > 1
    argv = arguments(tmp_path / "run", texts, **options, **{f"training__{unit}": fewer})
    assert run_ranks(1, train_to_end, argv) == [(True, last, [])]


def test_fewer_steps_of_pairs_read_no_reference(tmp_path):
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    options = dict(SAVING, task__kind="dpo", training__steps=3, training__seq_len=64)
    argv = arguments(tmp_path / "run", pairs, **options)
    assert run_ranks(1, train_to_end, argv) == [(True, 3, [1, 2, 3])]
    argv = arguments(tmp_path / "run", pairs, **options | dict(training__steps=1))
    assert run_ranks(1, train_to_end, argv) == [(True, 3, [])]


def end_events(folder) -> list[tuple]:
    events = [record for record in read_records(folder / "metrics.jsonl") if record.get("event") == "end"]
    return [(event["step"], event["cause"], event["exit_code"], event["reason"]) for event in events]


def test_each_start_of_a_run_records_its_end(tmp_path):
    texts = write_texts(tmp_path)
    options = dict(SAVING, training__steps=2, training__local_batch_size=4, metrics__plot=True)
    assert run(arguments(tmp_path / "run", texts, **options), ranks=2)[0] == 0
    code, out, _ = run(arguments(tmp_path / "run", texts, **options), ranks=2)
    assert code == 0 and "the last run in this folder: finished after step 2 (exit code 0)" in out
    options |= dict(training__steps=9, early_stop__patience=1, early_stop__min_delta=100, validation__freq=1)
    options |= dict(validation__enable=True, validation__dataset="text", validation__dataset_path=texts)
    assert run(arguments(tmp_path / "run", texts, **options), ranks=2)[0] == 0
    *earlier, (step, cause, code, reason) = end_events(tmp_path / "run")
    assert earlier == [(2, "finished", 0, ""), (2, "nothing left to train", 0, "")]
    assert (step, cause, code) == (3, "early stop", 0) and "(early_stop.patience)" in reason


def test_data_that_cannot_be_read_are_the_cause_of_an_end(tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "one"}\n' * 40 + '{"text": 5.5}\n' * 40)
    options = dict(SAVING, training__shuffle=False, training__local_batch_size=4)
    code, _, err = run(arguments(tmp_path / "run", texts, **options), ranks=2)
    ((step, cause, exit_code, reason),) = end_events(tmp_path / "run")
    assert (cause, exit_code, code) == ("data", 2, 2) and reason.startswith(f"{texts}"), (reason, err)


class FailingTrainer:
    error: BaseException
    callbacks = nullcontext()

    def __init__(self, config, ranks):
        self.current_step, self.model, self.optimizers = 3, torch.nn.Linear(2, 2), ()
        self.model.device = torch.device("cpu")

    def train(self):
        raise self.error


FAILURES = {
    "crashed": (ValueError("no"), 1, "ValueError: no"),
    "refused": (JobError("not so"), 2, "not so"),
    "data": (DataError("no more"), 2, "no more"),
    "not saved": (CheckpointError("no space"), 7, "no space"),
    "bad step": (BadStep("NaN"), 4, "NaN"),
    "ranks differ": (ReplicasDiffer("5 and 6"), 9, "5 and 6"),
    "out of memory": (MemoryError("all used"), 8, "all used"),
    "stopped": (KeyboardInterrupt(), 130, ""),
}


@pytest.mark.parametrize("cause", FAILURES)
def test_without_a_launcher_the_first_rank_records_a_failure(cause, tmp_path, monkeypatch):
    error, code, reason = FAILURES[cause]
    handlers = {number: signal.getsignal(number) for number in stop_signals()}
    monkeypatch.setattr(FailingTrainer, "error", error, raising=False)
    monkeypatch.setattr(trainer_module, "Trainer", FailingTrainer)
    config = manager.load(arguments(tmp_path, tmp_path))
    try:
        if cause == "crashed":
            with pytest.raises(ValueError, match="no"):
                train_program.run(config, Ranks())
        else:
            assert train_program.run(config, Ranks()) == code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    (event,) = end_events(tmp_path)
    assert event[1:] == (cause, code, reason) and event[0] == 3
