"""Ends of a run: after its last step, beyond it, and with nothing left to train."""

import pytest
import torch
import torch.distributed as dist

from tests.support.jobs import SHALLOW, arguments, run, write_texts
from tests.support.pool import run_ranks
from tests.test_preferences import write_pairs
from torchtitan.config import manager
from torchtitan.process.ranks import read_ranks
from torchtitan.training.trainer import Trainer

SAVING = dict(model__overrides=SHALLOW, checkpoint__enable=True, checkpoint__interval=100)


def train_to_end(argv: list[str]) -> tuple[bool, int, list[int]]:
    """Train a job; return whether it is done, its last step, and the steps that were made."""
    torch._dynamo.reset()
    trainer = Trainer(manager.load(argv), read_ranks())
    first, done = trainer.step, trainer.train()
    trainer.report()
    dist.barrier()
    return done, trainer.step, list(range(first + 1, trainer.step + 1))


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
