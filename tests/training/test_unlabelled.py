"""Data without a token to train on, and steps without one, under every task."""

import json
import random

import pytest
import torch

from tests.support.jobs import SHALLOW, arguments, logged_steps, run, train, write_texts
from tests.support.masked_lm_jobs import job_arguments as masked_arguments
from tests.support.pool import run_ranks
from torchtitan.config import manager
from torchtitan.guards import NothingToLearn
from torchtitan.metrics.json_lines import read_records
from torchtitan.process.ranks import read_ranks
from torchtitan.training.trainer import Trainer


def write_segments(path, labels, characters=40):
    """Write a record of one segment for each label."""
    rows = [{"text": [{"text": chr(97 + i % 26) * characters, "label": label}]} for i, label in enumerate(labels)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def segments_job(folder, records, **options):
    shared = dict(model__overrides=SHALLOW, training__shuffle=False)
    return arguments(folder, records, **shared | dict(training__steps=4) | options)


def train_and_describe(argv: list[str]) -> tuple[str, int, list[float], list[float]]:
    """Train a job; return the error that ended it, its step, and a sum of each weight before and after."""
    torch._dynamo.reset()
    trainer = None
    try:
        trainer = Trainer(manager.load(argv), read_ranks())
        before = [float(p.detach().double().sum()) for _, p in trainer.model.named_parameters()]
        trainer.train()
        error = ""
    except NothingToLearn as caught:
        error = str(caught)
    if trainer is None:
        return error, -1, [], []
    after = [float(p.detach().double().sum()) for _, p in trainer.model.named_parameters()]
    trainer.report()
    return error, trainer.current_step, before, after


def test_a_run_without_a_trained_token_is_refused_with_the_remedy(tmp_path):
    records = write_segments(tmp_path / "records.jsonl", [False] * 40)
    code, out, err = run(
        segments_job(tmp_path / "run", records, checkpoint__enable=True, training__local_batch_size=4), ranks=2
    )
    assert code == 2 and err.count("has a token to train on") == 1 and "torchtitan preview" in err, (out, err)
    assert not list((tmp_path / "run/checkpoint").glob("step-*"))


CASES = {
    "segments": {},
    "tensor parallel": dict(parallelism__tensor_parallel_degree=2),
    "pipeline": dict(
        parallelism__pipeline_parallel_degree=2,
        training__local_batch_size=8,
        model__overrides=SHALLOW.replace("n_layers=1", "n_layers=2"),
    ),
    "steps in backward": dict(optimizer__early_step_in_backward=True, training__max_norm=0.0),
    "one-token documents": dict(training__document_mask=True),
}


@pytest.mark.parametrize("name", CASES)
def test_no_plan_trains_on_nothing_or_decays_the_weights(tmp_path, name):
    records = write_segments(tmp_path / "records.jsonl", [False] * 40)
    if name == "one-token documents":
        records.write_text('{"text": [5]}\n' * 1000)
    options = dict(training__local_batch_size=4, optimizer__weight_decay=0.5) | CASES[name]
    argv = segments_job(tmp_path / "run", records, **options)
    for error, step, before, after in run_ranks(2, train_and_describe, argv):
        assert "none of the last 4 steps, up to step 4, has a token to train on" in error
        assert step == 3 and before == after


def test_masked_words_without_a_mask_are_refused_in_training_and_validation(tmp_path):
    texts, shared = write_texts(tmp_path), dict(task__mask_share=1e-9, training__steps=2)
    argv = masked_arguments(tmp_path / "run", texts, **shared)
    ((error, step, *_),) = run_ranks(1, train_and_describe, argv)
    assert step == -1 and "no token to validate with" in error and "task.mask_share" in error
    ((error, step, before, after),) = run_ranks(
        1, train_and_describe, masked_arguments(tmp_path / "run", texts, **shared, validation__enable=False)
    )
    assert step == 1 and "none of the last 2 steps" in error and before == after


@pytest.mark.parametrize("in_backward", [False, True])
def test_an_empty_step_among_full_ones_changes_no_weight_and_is_counted(tmp_path, in_backward):
    """Of three steps the middle one is empty: two rows of 32 tokens in a batch."""
    labels = [True, False, True]
    records = write_segments(tmp_path / "records.jsonl", labels, characters=63)  # and the end token: two rows
    options = dict(training__local_batch_size=2, training__global_batch_size=2, training__steps=2)
    options |= dict(optimizer__weight_decay=0.5, optimizer__early_step_in_backward=in_backward)
    options |= dict(training__max_norm=0.0) if in_backward else {}
    results = []
    for steps in (1, 2):
        argv = segments_job(tmp_path / f"run{steps}", records, **options | dict(training__steps=steps))
        results += run_ranks(1, train_and_describe, [*argv, "--lr_scheduler.decay_type=constant"])
    assert [(error, step) for error, step, *_ in results] == [("", 1), ("", 2)]
    assert results[0][3] == results[1][3] != results[0][2]
    rows = read_records(tmp_path / "run2/metrics.jsonl")
    assert [row["step"] for row in logged_steps(tmp_path / "run2")] == [1]
    assert [(row["step"], row["cause"]) for row in rows if row.get("event") == "skip"] == [
        (2, "it has no token to train on")
    ]


def test_runs_with_empty_steps_end_with_the_weights_of_runs_without_them(tmp_path, is_full_run):
    """The oracle is the same run on data that lack the empty steps, at one rate."""
    generator = random.Random(0)
    options = dict(training__local_batch_size=2, training__global_batch_size=2, lr_scheduler__decay_type="constant")
    options |= dict(lr_scheduler__warmup_steps=0, optimizer__weight_decay=0.3, training__document_mask=True)
    for draw in range(8 if is_full_run else 2):
        labels = [True, *(generator.random() < 0.6 for _ in range(5))]
        folder = tmp_path / str(draw)
        folder.mkdir()
        hashes = []
        for name, kept in (("all", labels), ("full", [label for label in labels if label])):
            # a record of 64 tokens is a step; under a mask none depends on the record after it
            rows = [{"text": [{"text": "ab" * 31, "label": label}]} for label in kept]
            records = folder / f"{name}.jsonl"
            records.write_text("".join(json.dumps(row) + "\n" for row in rows))
            argv = segments_job(folder / name, records, **options, training__steps=len(kept))
            ((steps, state),) = run_ranks(1, train, argv)
            assert [row["step"] for row in steps] == [number for number, label in enumerate(kept, 1) if label]
            hashes.append(state)
        assert hashes[0] == hashes[1], labels


def test_ten_empty_steps_in_a_row_end_a_run_after_it_is_saved(tmp_path):
    records = write_segments(tmp_path / "records.jsonl", [True, *[False] * 20], characters=63)
    options = dict(training__local_batch_size=2, training__global_batch_size=2, training__steps=40)
    argv = segments_job(tmp_path / "run", records, **options, checkpoint__enable=True)
    ((error, step, *_),) = run_ranks(1, train_and_describe, argv)
    assert "none of the last 10 steps, up to step 11," in error and step == 10
    assert [path.name for path in (tmp_path / "run/checkpoint").glob("step-*")] == ["step-00000010"]


@pytest.mark.parametrize("learns", [True, False])
def test_rows_that_read_long_documents_may_reach_their_labels_late(tmp_path, learns):
    """A document of 1,300 tokens is read in 41 steps, and only its last tokens are an answer."""
    records = tmp_path / "records.jsonl"
    parts = [{"text": "ab" * 645, "label": False}, {"text": "answer", "label": learns}]
    records.write_text((json.dumps({"text": parts}) + "\n") * 3)
    options = dict(task__kind="documents", training__local_batch_size=2, training__global_batch_size=2)
    argv = segments_job(tmp_path / "run", records, **options, training__steps=60)
    ((error, step, *_),) = run_ranks(1, train_and_describe, argv)
    if learns:
        assert (error, step) == ("", 60)
    else:
        assert step < 59 and "has a token to train on" in error


@pytest.mark.parametrize("ranks", [1, 2])
def test_validation_data_without_a_label_are_refused_at_the_start(tmp_path, ranks):
    texts = write_texts(tmp_path)
    records = write_segments(tmp_path / "records.jsonl", [False] * 40)
    options = dict(model__overrides=SHALLOW, training__local_batch_size=8 // ranks, training__steps=2)
    options |= dict(validation__enable=True, validation__dataset="text", validation__dataset_path=records)
    options |= dict(validation__samples=16, validation__freq=1)
    for error, step, *_ in run_ranks(ranks, train_and_describe, arguments(tmp_path / "run", texts, **options)):
        assert step == -1 and error.startswith("the validation data have no token to validate with: ")
