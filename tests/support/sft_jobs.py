"""Jobs for supervised fine-tuning on a few records."""

import json
from pathlib import Path

import numpy as np

from tests.support import jobs
from torchtitan.config import manager
from torchtitan.process.ranks import read_ranks
from torchtitan.training.trainer import Trainer


def write_rows(folder: Path, count: int = 60) -> Path:
    """Write records of uneven length in Alpaca's format."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(count):
        text = "".join(map(chr, rng.integers(97, 123, rng.integers(1, 20))))
        row = {"instruction": f"repeat {text}", "output": f"{text} {text}"}
        rows.append(row | ({"input": "twice"} if i % 3 == 0 else {}))
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sft_arguments(folder: Path, rows: Path, **options: object) -> list[str]:
    """Return the options of a job with packed records that validates on a fifth of them."""
    settings = dict(
        task__kind="sft", training__seq_len=384, training__local_batch_size=2, training__global_batch_size=4
    )
    settings |= dict(training__epochs=2, data__packing_window=16, data__too_long="drop", data__max_empty_ratio=0.0)
    settings |= dict(validation__enable=True, validation__split=0.2, validation__samples=0, validation__freq=3)
    settings |= dict(validation__local_batch_size=2)
    return jobs.arguments(folder, rows, **settings | options)


def validation_losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["validation_loss"] for row in rows if "validation_loss" in row]


def train_and_stop_after(argv: list[str], step: int) -> None:
    """Train, and request a stop at `step` as a signal would: it takes effect in the next step or its validation."""
    trainer = Trainer(manager.load(argv), read_ranks())
    log = trainer.training_step.log

    def log_and_stop(*args, **kwargs):
        log(*args, **kwargs)
        trainer.stops.requested |= trainer.current_step == step

    trainer.training_step.log = log_and_stop
    assert not trainer.train()
    trainer.metrics.close()
