"""Jobs of supervised fine-tuning: the same curve under every plan, and on from the middle of a window."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support import jobs
from tests.support.pool import run_ranks
from torchtitan.config import manager
from torchtitan.ranks import read_ranks
from torchtitan.trainer import Trainer


def write_rows(folder: Path, count: int = 60) -> Path:
    """Alpaca's form, of uneven length."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(count):
        word = "".join(map(chr, rng.integers(97, 123, rng.integers(1, 20))))
        row = {"instruction": f"repeat {word}", "output": f"{word} {word}"}
        rows.append(row | ({"input": "twice"} if i % 3 == 0 else {}))
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(folder: Path, rows: Path, **options: object) -> list[str]:
    """A job of whole records, with a validation on a fifth of them."""
    settings = dict(
        task__kind="sft", training__seq_len=384, training__local_batch_size=2, training__global_batch_size=4
    )
    settings |= dict(training__epochs=2, data__packing_window=16, data__too_long="drop", data__max_empty_ratio=0.0)
    settings |= dict(validation__enable=True, validation__split=0.2, validation__samples=0, validation__freq=3)
    settings |= dict(validation__local_batch_size=2)
    return jobs.arguments(folder, rows, **settings | options)


def measured(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["validation_loss"] for row in rows if "validation_loss" in row]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """(rows, curve and measures of one rank)."""
    folder = tmp_path_factory.mktemp("sft")
    rows = write_rows(folder)
    ((steps, _),) = run_ranks(1, jobs.train, words(folder / "one", rows))
    return rows, [step["loss"] for step in steps], measured(folder / "one")


PLANS = {
    "FSDP 2": dict(parallelism__data_parallel_shard_degree=2),
    "TP 2": dict(parallelism__tensor_parallel_degree=2),
    "PP 2": dict(parallelism__pipeline_parallel_degree=2),
}


@pytest.mark.parametrize("plan", PLANS)
def test_the_curve_is_that_of_one_rank(alone, plan, tmp_path):
    rows, losses, measures = alone
    steps, _ = run_ranks(2, jobs.train, words(tmp_path, rows, **PLANS[plan]))[0]
    assert len(losses) == steps[-1]["step"] > 6  # the exact number of two passes
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=2e-4)  # 1e-5 each, through Adam's division
    assert measured(tmp_path) == pytest.approx(measures, rel=2e-4) and len(measures) >= 3


def test_on_from_the_middle_of_a_window_on_two_ranks(alone, tmp_path):
    rows, losses, _ = alone
    saving = dict(checkpoint__enable=True, checkpoint__interval=100)
    first = words(tmp_path, rows, **saving)
    run_ranks(1, stopped_after, first, 4)
    steps, _ = run_ranks(2, jobs.train, first)[0]
    assert [step["step"] for step in steps] == list(range(1, len(losses) + 1))
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=2e-4)


def stopped_after(argv: list[str], step: int) -> None:
    """Asked to stop as by a signal, which is done in the next step, or in its validation."""
    trainer = Trainer(manager.load(argv), read_ranks())
    log = trainer.log

    def log_and_stop(*args, **kwargs):
        log(*args, **kwargs)
        trainer.stop_requested |= trainer.step == step

    trainer.log = log_and_stop
    assert not trainer.train()
    trainer.close()
