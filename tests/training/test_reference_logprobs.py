"""Tests of the reference pass of DPO: it computes only the pairs of the run, logs its progress, and resumes."""

import json
import logging
import math
import signal
from itertools import islice

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support import jobs
from tests.support.pool import RankFailed, run_ranks
from tests.support.preference_jobs import BYTES, dpo_arguments, write_pairs
from torchtitan.assembly.data import JobDatasets
from torchtitan.config.manager import load
from torchtitan.job import ResolvedJob
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.training import reference_logprobs, reporting
from torchtitan.training.reference_logprobs import FILE, digests_of

NOT_VALIDATED = dict(validation__enable=False, validation__split=0.2)
FSDP = dict(parallelism__data_parallel_shard_degree=2)


def saved_rows(folder):
    return len(load_file(folder / FILE)["values"])


def train_and_count_reference_batches(argv, failing_at=None, error=None, seconds=None):
    """Train and return the number of reference batches of this rank. `failing_at`: raise `error` at this batch."""
    count, loss_sum, save_seconds = [], ParallelModel.loss_sum, reference_logprobs.SAVE_SECONDS

    def counting_loss_sum(self, batch):
        if self.parts[0].loss.asked is not None:
            count.append(len(batch["tokens"]))
            if len(count) == failing_at:
                raise error("here")
        return loss_sum(self, batch)

    ParallelModel.loss_sum = counting_loss_sum
    reference_logprobs.SAVE_SECONDS = save_seconds if seconds is None else seconds
    try:
        jobs.train(argv)
    except (RuntimeError, KeyboardInterrupt) as failure:
        if "here" not in str(failure):
            raise
    finally:
        ParallelModel.loss_sum, reference_logprobs.SAVE_SECONDS = loss_sum, save_seconds
    return len(count)


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory):
    """Train on one rank without interruption; return the records and the losses."""
    folder = tmp_path_factory.mktemp("reference_run")
    rows = write_pairs(folder / "rows.jsonl")
    ((steps, _),) = run_ranks(1, jobs.train, dpo_arguments(folder / "run", rows))
    return rows, [step["loss"] for step in steps]


def losses(folder):
    return [step["loss"] for step in jobs.logged_steps(folder)]


@pytest.mark.parametrize("ranks, options", [(1, {}), (2, FSDP)], ids=["one rank", "FSDP 2"])
def test_only_pairs_that_the_run_reads_are_computed(reference_run, tmp_path, ranks, options):
    """Two steps read 8 of 40 pairs, and validation another 8."""
    rows, _ = reference_run
    two_steps = dict(training__steps=2, checkpoint__enable=False) | options
    run_ranks(ranks, jobs.train, dpo_arguments(tmp_path / "alone", rows, validation__enable=False, **two_steps)[:])
    assert saved_rows(tmp_path / "alone") == count_distinct_rows(dpo_arguments(tmp_path / "alone", rows), 4)
    run_ranks(ranks, jobs.train, dpo_arguments(tmp_path / "both", rows, **two_steps))
    assert saved_rows(tmp_path / "both") <= 16 + 16


def count_distinct_rows(argv, batches):
    """Count the distinct rows of a job's first batches on one rank."""
    config = load(argv)
    loader = JobDatasets(ResolvedJob(config)).training_loader(BYTES, 0)
    return len(np.unique(np.concatenate([digests_of(batch) for batch in islice(loader, batches)]), axis=0))


def test_saved_log_probabilities_are_not_computed_again(reference_run, tmp_path):
    rows, _ = reference_run
    two_epochs = dict(training__epochs=2, checkpoint__enable=False)
    assert run_ranks(1, train_and_count_reference_batches, dpo_arguments(tmp_path, rows, **two_epochs)) == [
        16 + 8
    ]  # 32 pairs, two at once, 8 one by one
    assert run_ranks(1, train_and_count_reference_batches, dpo_arguments(tmp_path, rows, **two_epochs)) == [0]


@pytest.mark.parametrize("ranks, options", [(1, {}), (2, FSDP)], ids=["one rank", "FSDP 2"])
def test_a_killed_reference_pass_continues(reference_run, tmp_path, ranks, options):
    """Fail in the reference pass; a restart, also on other ranks, computes only the missing batches."""
    rows, expected = reference_run
    argv = dpo_arguments(tmp_path, rows, **options)
    counts = run_ranks(ranks, train_and_count_reference_batches, argv, 13 if ranks == 1 else 9, RuntimeError, 0)
    saved = saved_rows(tmp_path)
    assert 0 < saved < 80 and counts == [13 if ranks == 1 else 9] * ranks
    (count,) = run_ranks(1, train_and_count_reference_batches, dpo_arguments(tmp_path, rows))
    assert count < 16 + 8 and saved_rows(tmp_path) > saved
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-5)


def test_an_interrupt_saves_the_finished_batches(reference_run, tmp_path):
    rows, expected = reference_run
    run_ranks(1, train_and_count_reference_batches, dpo_arguments(tmp_path, rows), 4, KeyboardInterrupt)
    assert saved_rows(tmp_path) == 3 * 4
    run_ranks(1, train_and_count_reference_batches, dpo_arguments(tmp_path, rows))
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-5)


def test_sigterm_during_the_reference_pass_exits_with_its_code(tmp_path):
    """Send SIGTERM to the launcher during the reference pass over 3,000 pairs; finished batches are saved."""
    rows = tmp_path / "rows.jsonl"
    pairs = ({"prompt": f"{number}? ", "chosen": "yes", "rejected": "no"} for number in range(3000))
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    options = dict(training__local_batch_size=1, training__steps=700, validation__enable=False)
    process = jobs.start(
        [argument for argument in dpo_arguments(tmp_path / "run", rows, **options) if "validation.s" not in argument]
    )
    line = ""
    while "reference  " not in line:
        line = process.stdout.readline()
        assert line, process.communicate()
    process.send_signal(signal.SIGTERM)
    code, _, errors = jobs.finish(process)
    assert code == 128 + signal.SIGTERM, errors
    assert 0 < saved_rows(tmp_path / "run") < 2 * 2800


def test_log_probabilities_of_another_model_are_not_used(reference_run, tmp_path):
    """The first start had other initial weights."""
    rows, expected = reference_run
    run_ranks(
        1,
        train_and_count_reference_batches,
        dpo_arguments(tmp_path, rows, optimizer__lr=1, debug__seed=0),
        20,
        RuntimeError,
        0,
    )
    wide = "{dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=260, multiple_of=16}"
    assert run_ranks(1, train_and_count_reference_batches, dpo_arguments(tmp_path, rows, model__overrides=wide)) == [24]
    assert losses(tmp_path)[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses(tmp_path) != expected


@pytest.mark.parametrize("kind", ["none", "lora", "qlora"])
def test_an_extended_run_uses_its_initial_model_as_the_reference(tmp_path, kind):
    """Losses equal a run's that had the final length from the start."""
    rows, adapter = write_pairs(tmp_path / "rows.jsonl"), {}
    if kind != "none":
        adapter = dict(adapter__kind=kind, adapter__rank=2)
    run_ranks(1, jobs.train, dpo_arguments(tmp_path / "long", rows, **adapter))
    short = dict(training__steps=3, lr_scheduler__total_steps=8, **adapter)
    run_ranks(1, jobs.train, dpo_arguments(tmp_path / "short", rows, **short))
    before = saved_rows(tmp_path / "short")
    run_ranks(1, jobs.train, dpo_arguments(tmp_path / "short", rows, lr_scheduler__total_steps=8, **adapter))
    assert losses(tmp_path / "short") == pytest.approx(losses(tmp_path / "long"), rel=1e-4)
    assert before < saved_rows(tmp_path / "short") == saved_rows(tmp_path / "long")


def test_an_extended_run_without_its_initial_model_is_refused(reference_run, tmp_path):
    rows, _ = reference_run
    run_ranks(1, jobs.train, dpo_arguments(tmp_path / "base", rows, training__steps=1))
    start = dict(checkpoint__initial_load_path=tmp_path / "base", lr_scheduler__total_steps=8)
    run_ranks(1, jobs.train, dpo_arguments(tmp_path / "run", rows, training__steps=2, **start))
    run_ranks(1, jobs.train, dpo_arguments(tmp_path / "run", rows, training__steps=3, **start))
    other = start | dict(checkpoint__initial_load_path=tmp_path / "elsewhere")
    (tmp_path / "elsewhere").symlink_to(tmp_path / "run")
    with pytest.raises(RankFailed, match="lacks pairs that the run will read, and the reference has changed since"):
        run_ranks(1, jobs.train, dpo_arguments(tmp_path / "run", rows, **other))


def test_the_reference_pass_logs_its_progress(reference_run, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    report = reporting.ReferenceProgress(400, 100, True)
    clock = iter([10.0, 10.0, 40.0, 41.0, 41.0])
    monkeypatch.setattr(reporting.time, "monotonic", lambda: next(clock))
    report.began_at = report.last_line_at = 0.0
    with report:
        report.show(150)
        report.show(200)
    first, second, last = (record.getMessage() for record in caplog.records)
    assert first == "reference  150 of 400 pairs, 0:50 left"
    assert second == "reference  200 of 400 pairs, 1:22 left"
    assert last == "reference  100 pairs in 0:41"


def test_the_identity_of_references_covers_the_initial_model(tmp_path):
    """Initial weights matter even with checkpoints off; options of saving and restarting do not."""
    rows = write_pairs(tmp_path / "rows.jsonl")

    def identity(**options):
        return reference_logprobs._identity(
            ResolvedJob(load(dpo_arguments(tmp_path / "run", rows, adapter__kind="lora", **options)))
        )

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    starts = [dict(checkpoint__initial_load_path=tmp_path / name, checkpoint__enable=False) for name in ("a", "b")]
    assert identity(**starts[0]) != identity(**starts[1])
    assert identity() == identity(adapter__last_save_in_peft=True) != identity(adapter__rank=4)
