"""Jobs that classify texts."""

import json

from tests.support import jobs

SIZES = "{dim=64, n_layers=2, n_heads=4, ffn_dim=128, vocab_size=2048, max_seq_len=64, n_classes=2}"
DEEPER = SIZES.replace("n_layers=2", "n_layers=4")


def job_arguments(folder, model, **options):
    settings = dict(model__name=model, model__overrides=SIZES, model__tokenizer_path="debug", task__kind="seq_cls")
    settings |= dict(training__dataset="sentiment", training__seq_len=64, training__local_batch_size=96)
    settings |= dict(training__global_batch_size=96, validation__enable=True, validation__samples=0)
    settings |= dict(validation__dataset="sentiment_validation", validation__local_batch_size=96)
    settings |= dict(training__steps=110, validation__freq=110, optimizer__lr=3e-3, lr_scheduler__warmup_steps=10)
    return [
        argument
        for argument in jobs.arguments(folder, "", **settings | options)
        if not argument.endswith("dataset_path=")
    ]


def validations(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "validation_loss" in row]


ROBERTA = ("--model.name=roberta", "--training.seq_len=64", "--task.kind=seq_cls", "--training.dataset=sentiment")
TWO_CLASSES = "--model.overrides={n_classes = 2}"
