"""The reference of pairs is asked of those alone that a run reads, says how far it is, and keeps what it has done."""

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
from tests.test_preferences import BYTES, dpo_arguments, write_pairs
from torchtitan.build import data, parts
from torchtitan.config.manager import load
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.training import reference_logprobs, reporting
from torchtitan.training.reference_logprobs import FILE, digests_of

NOT_VALIDATED = dict(validation__enable=False, validation__split=0.2)
FSDP = dict(parallelism__data_parallel_shard_degree=2)


def rows_of(folder):
    return len(load_file(folder / FILE)["values"])


def asked_for(argv, failing_at=None, error=None, seconds=None):
    """Train; how many batches the reference was asked on this rank. `failing_at`: the batch before which it fails."""
    count, loss_sum, saving = [], ParallelModel.loss_sum, reference_logprobs.SAVE_SECONDS

    def counted(self, batch):
        if self.parts[0].loss.asked is not None:
            count.append(len(batch["tokens"]))
            if len(count) == failing_at:
                raise error("here")
        return loss_sum(self, batch)

    ParallelModel.loss_sum = counted
    reference_logprobs.SAVE_SECONDS = saving if seconds is None else seconds
    try:
        jobs.train(argv)
    except (RuntimeError, KeyboardInterrupt) as failure:
        if "here" not in str(failure):
            raise
    finally:
        ParallelModel.loss_sum, reference_logprobs.SAVE_SECONDS = loss_sum, saving
    return len(count)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    rows = write_pairs(folder / "rows.jsonl")
    ((steps, _),) = run_ranks(1, jobs.train, dpo_arguments(folder / "run", rows))
    return rows, [step["loss"] for step in steps]


def losses(folder):
    return [step["loss"] for step in jobs.logged_steps(folder)]


@pytest.mark.parametrize("ranks, options", [(1, {}), (2, FSDP)], ids=["one rank", "FSDP 2"])
def test_only_pairs_that_the_steps_read_are_computed(whole, tmp_path, ranks, options):
    """Of 40 pairs 2 steps read 8, and validation another 8."""
    rows, _ = whole
    two = dict(training__steps=2, checkpoint__enable=False) | options
    run_ranks(ranks, jobs.train, dpo_arguments(tmp_path / "alone", rows, validation__enable=False, **two)[:])
    assert rows_of(tmp_path / "alone") == read_by(dpo_arguments(tmp_path / "alone", rows), 4)
    run_ranks(ranks, jobs.train, dpo_arguments(tmp_path / "both", rows, **two))
    assert rows_of(tmp_path / "both") <= 16 + 16


def read_by(argv, batches):
    """Different rows of the first batches of a job, on one rank."""
    config = load(argv)
    loader = data.training_loader(config, BYTES, 0, parts.dims(config, 1))
    return len(np.unique(np.concatenate([digests_of(batch) for batch in islice(loader, batches)]), axis=0))


def test_what_has_been_computed_is_not_computed_again(whole, tmp_path):
    rows, _ = whole
    two = dict(training__epochs=2, checkpoint__enable=False)
    assert run_ranks(1, asked_for, dpo_arguments(tmp_path, rows, **two)) == [
        16 + 8
    ]  # 32 pairs, two at once, 8 one by one
    assert run_ranks(1, asked_for, dpo_arguments(tmp_path, rows, **two)) == [0]


@pytest.mark.parametrize("ranks, options", [(1, {}), (2, FSDP)], ids=["one rank", "FSDP 2"])
def test_a_killed_start_goes_on_where_it_was(whole, tmp_path, ranks, options):
    """Of the batches of 16 pairs all are kept, on any number of ranks."""
    rows, expected = whole
    argv = dpo_arguments(tmp_path, rows, **options)
    asked = run_ranks(ranks, asked_for, argv, 13 if ranks == 1 else 9, RuntimeError, 0)
    done = rows_of(tmp_path)
    assert 0 < done < 80 and asked == [13 if ranks == 1 else 9] * ranks
    (rest,) = run_ranks(1, asked_for, dpo_arguments(tmp_path, rows))
    assert rest < 16 + 8 and rows_of(tmp_path) > done
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-5)


def test_a_stop_keeps_all_that_was_done(whole, tmp_path):
    rows, expected = whole
    run_ranks(1, asked_for, dpo_arguments(tmp_path, rows), 4, KeyboardInterrupt)
    assert rows_of(tmp_path) == 3 * 4
    run_ranks(1, asked_for, dpo_arguments(tmp_path, rows))
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-5)


def test_a_signal_ends_it_with_its_own_code(tmp_path):
    """As the user sends it, to the launcher: what is computed is kept, long before all 3,000 pairs are."""
    rows = tmp_path / "rows.jsonl"
    pairs = ({"prompt": f"{number}? ", "chosen": "yes", "rejected": "no"} for number in range(3000))
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    one = dict(training__local_batch_size=1, training__steps=700, validation__enable=False)
    process = jobs.start([word for word in dpo_arguments(tmp_path / "run", rows, **one) if "validation.s" not in word])
    line = ""
    while "reference  " not in line:
        line = process.stdout.readline()
        assert line, process.communicate()
    process.send_signal(signal.SIGTERM)
    code, _, errors = jobs.finish(process)
    assert code == 128 + signal.SIGTERM, errors
    assert 0 < rows_of(tmp_path / "run") < 2 * 2800


def test_what_another_model_said_is_not_taken(whole, tmp_path):
    """The first start had other initial weights."""
    rows, expected = whole
    run_ranks(1, asked_for, dpo_arguments(tmp_path, rows, optimizer__lr=1, debug__seed=0), 20, RuntimeError, 0)
    wide = "{dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=260, multiple_of=16}"
    assert run_ranks(1, asked_for, dpo_arguments(tmp_path, rows, model__overrides=wide)) == [24]
    assert losses(tmp_path)[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses(tmp_path) != expected


@pytest.mark.parametrize("kind", ["none", "lora", "qlora"])
def test_a_longer_run_asks_the_model_that_it_began_from(tmp_path, kind):
    """As if it had been as long from the start."""
    rows, adapter = write_pairs(tmp_path / "rows.jsonl"), {}
    if kind != "none":
        adapter = dict(adapter__kind=kind, adapter__rank=2)
    run_ranks(1, jobs.train, dpo_arguments(tmp_path / "long", rows, **adapter))
    short = dict(training__steps=3, lr_scheduler__total_steps=8, **adapter)
    run_ranks(1, jobs.train, dpo_arguments(tmp_path / "short", rows, **short))
    before = rows_of(tmp_path / "short")
    run_ranks(1, jobs.train, dpo_arguments(tmp_path / "short", rows, lr_scheduler__total_steps=8, **adapter))
    assert losses(tmp_path / "short") == pytest.approx(losses(tmp_path / "long"), rel=1e-4)
    assert before < rows_of(tmp_path / "short") == rows_of(tmp_path / "long")


def test_a_longer_run_is_refused_where_its_first_model_is_gone(whole, tmp_path):
    rows, _ = whole
    run_ranks(1, jobs.train, dpo_arguments(tmp_path / "base", rows, training__steps=1))
    start = dict(checkpoint__initial_load_path=tmp_path / "base", lr_scheduler__total_steps=8)
    run_ranks(1, jobs.train, dpo_arguments(tmp_path / "run", rows, training__steps=2, **start))
    run_ranks(1, jobs.train, dpo_arguments(tmp_path / "run", rows, training__steps=3, **start))
    other = start | dict(checkpoint__initial_load_path=tmp_path / "elsewhere")
    (tmp_path / "elsewhere").symlink_to(tmp_path / "run")
    with pytest.raises(RankFailed, match="lacks pairs that the run will read, and the reference has changed since"):
        run_ranks(1, jobs.train, dpo_arguments(tmp_path / "run", rows, **other))


def test_it_says_how_far_it_is(whole, tmp_path, caplog, monkeypatch):
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


def test_values_belong_to_the_model_before_the_first_step(tmp_path):
    """Weights count also where nothing is saved; options that change only what is saved or restarted do not."""
    rows = write_pairs(tmp_path / "rows.jsonl")

    def identity(**options):
        return reference_logprobs._identity(
            load(dpo_arguments(tmp_path / "run", rows, adapter__kind="lora", **options))
        )

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    starts = [dict(checkpoint__initial_load_path=tmp_path / name, checkpoint__enable=False) for name in ("a", "b")]
    assert identity(**starts[0]) != identity(**starts[1])
    assert identity() == identity(adapter__last_save_in_peft=True) != identity(adapter__rank=4)
