"""Batch sizes of tasks with pairs count pairs, as in trl and Axolotl.

Jobs and checkpoints from versions that counted answers get an error with a remedy, and resume at their position.
"""

import dataclasses
import hashlib
import json

import pytest
import torch

from tests.support import jobs
from tests.support.judged import PP, lines
from tests.support.pool import RankFailed, run_ranks
from tests.support.preference_jobs import BYTES, dpo_arguments, write_pairs
from torchtitan import cli
from torchtitan.assembly.data import JobDatasets
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.checkpoint import layout
from torchtitan.config.changes import ROWS_PER_SAMPLE
from torchtitan.config.manager import load
from torchtitan.job import ResolvedJob
from torchtitan.losses.preference import Preference
from torchtitan.training import batches

KINDS = ("dpo", "ipo", "orpo")


def job(folder, **options):
    settings = dict(training__local_batch_size=3, training__global_batch_size=6, validation__local_batch_size=3)
    return load(dpo_arguments(folder, write_pairs(folder / "rows.jsonl"), **settings | options))


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_has_as_many_pairs_as_its_size_says(tmp_path, kind):
    """40 records, 8 of them held out; each record has two answers, which are two rows of a batch."""
    config = job(tmp_path, task__kind=kind, training__epochs=1)
    read = list(JobDatasets(ResolvedJob(config)).training_loader(BYTES, 0))
    assert [len(batch["tokens"]) for batch in read] == [6] * 12
    assert sum(Preference().count(batch) for batch in read) == 32
    assert jobs.with_end(config).training.steps == 6  # 32 pairs, 6 a step


@pytest.mark.parametrize("samples, pairs", [(0, 8), (5, 5), (80, 8)])
def test_validation_counts_pairs(tmp_path, samples, pairs):
    config = job(tmp_path, validation__samples=samples)
    held_out = JobDatasets(ResolvedJob(config)).held_out(BYTES, 0, ModelBuilder(ResolvedJob(config)).objective())
    assert sum(Preference().count(batch) for batch in held_out) == pairs


def test_one_pair_is_a_batch_and_a_microbatch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = ["--task.kind=dpo", "--training.local_batch_size=1"]
    assert lines(*one) == [] and lines(one[0], PP + "2", "--training.local_batch_size=3") == []
    config = load([one[0], "--training.local_batch_size=3"])
    pipeline = ModelBuilder(ResolvedJob(config)).pipeline_options()
    assert (pipeline.local_batch_size, pipeline.microbatch_size, pipeline.microbatches) == (6, 2, 3)


def test_check_and_preview_speak_of_pairs(tmp_path, capsys):
    rows = write_pairs(tmp_path / "rows.jsonl")
    argv = dpo_arguments(tmp_path / "run", rows)
    assert cli.main(["check", *argv, "--no-memory"]) == 0
    output = capsys.readouterr().out
    assert "4 pairs (8 answers) of up to 24 tokens a step, in 2 forward passes" in output
    assert "batch sizes count pairs, not answers: a job that was written when they counted answers needs half" in output
    assert cli.main(["preview", *argv, "--samples", "3"]) == 0
    assert capsys.readouterr().out.count("\nsample ") == 6
    assert cli.main(["prepare", *argv]) == 0
    assert "32 pairs (64 answers) in a pass" in capsys.readouterr().out


# Jobs and checkpoints from when they counted answers


def as_it_was(step_folder):
    """Rewrite a checkpoint as an older version saved it, which counted answers."""
    state, manifest = layout.read_state(step_folder), layout.read_manifest(step_folder)
    trainer = state["trainer"]
    assert trainer.pop(ROWS_PER_SAMPLE) == 2
    trainer["samples"] *= 2
    for section in ("training", "validation"):
        trainer["job"][section]["local_batch_size"] *= 2
    trainer["job"]["training"]["global_batch_size"] *= 2
    (step_folder / layout.STATE).write_text(text := json.dumps(state))
    entry = layout.FileEntry(len(text), hashlib.sha256(text.encode()).hexdigest())
    manifest = dataclasses.replace(manifest, files={**manifest.files, layout.STATE: entry})
    (step_folder / layout.MANIFEST).write_text(layout.manifest_text(manifest))


@pytest.fixture
def before(tmp_path):
    """A run of 4 of 8 steps, its checkpoint as of old; and the losses of an uninterrupted run."""
    rows = write_pairs(tmp_path / "rows.jsonl")
    ((steps, _),) = run_ranks(1, jobs.train, dpo_arguments(tmp_path / "whole", rows))
    half = dict(training__steps=4, lr_scheduler__total_steps=8)
    run_ranks(1, jobs.train, dpo_arguments(tmp_path / "run", rows, **half))
    as_it_was(tmp_path / "run/checkpoint/step-00000004")
    return rows, steps, tmp_path / "run"


def test_a_run_that_counted_answers_goes_on_with_half_of_the_sizes(before):
    rows, steps, folder = before
    run_ranks(1, jobs.train, dpo_arguments(folder, rows, lr_scheduler__total_steps=8))
    assert [step["loss"] for step in jobs.logged_steps(folder)] == [step["loss"] for step in steps]


def test_a_run_that_counted_answers_does_not_go_on_with_twice_as_many(before, monkeypatch):
    rows, _, folder = before
    old = dict(training__local_batch_size=4, training__global_batch_size=8, lr_scheduler__total_steps=8)
    message = (
        "batch sizes count pairs now: write training.local_batch_size = 2 and training.global_batch_size = 4; else "
        "undo the change"
    )
    with pytest.raises(RankFailed, match=message):
        run_ranks(1, jobs.train, dpo_arguments(folder, rows, **old))
    argv = [argument for argument in dpo_arguments(folder, rows, **old) if "tokenizer_path" not in argument]
    (line,) = (line for line in lines(*argv) if "global_batch_size" in line)
    assert "training.global_batch_size: given 8; allowed: 4, as in step-00000004" in line and message in line


def test_what_is_kept_says_what_it_counts(tmp_path):
    config = job(tmp_path)
    saved_job = ResolvedJob(config).stored_part()
    assert (saved_job["samples"], saved_job[ROWS_PER_SAMPLE]) == (6, 2)
    plain = dataclasses.replace(config, task=type(config.task)())
    assert ResolvedJob(plain).stored_part()[ROWS_PER_SAMPLE] == 1
    assert torch.is_tensor(batches.zero_batch(ResolvedJob(config), False)["tokens"])
