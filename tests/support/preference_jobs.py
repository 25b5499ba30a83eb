"""Jobs on preference pairs."""

import json

import numpy as np

from tests.support import jobs
from torchtitan.datasets.tokenizer import build_tokenizer

BYTES = build_tokenizer("bytes")


def write_pairs(path):
    """Write pairs that prefer "yes" to "no" for every random question."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(40):
        question = "".join(map(chr, rng.integers(97, 123, rng.integers(1, 9))))
        rows.append({"prompt": f"{question}? ", "chosen": "yes" * int(rng.integers(1, 3)), "rejected": "no"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def dpo_arguments(folder, rows, **options):
    """Return the arguments of a small DPO job on a file of pairs."""
    settings = dict(task__kind="dpo", training__seq_len=24, training__local_batch_size=2, training__global_batch_size=4)
    settings |= dict(training__steps=8)
    settings |= dict(validation__enable=True, validation__split=0.2, validation__samples=0, validation__freq=4)
    settings |= dict(validation__local_batch_size=1, optimizer__lr=3e-3, checkpoint__enable=True)
    return jobs.arguments(folder, rows, **settings | options)


def validation_losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["validation_loss"] for row in rows if "validation_loss" in row]
