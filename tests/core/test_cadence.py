"""Tests of intervals given as steps, shares of the run, or epochs: exact conversion to steps, and use in a run."""

import json
from decimal import Decimal

import pytest

from tests.support import jobs, judged
from tests.support.judged import lines
from tests.support.pool import run_ranks
from tests.support.sft_jobs import sft_arguments, train_and_stop_after, write_rows
from torchtitan.config import manager
from torchtitan.config.manager import ConfigError, to_toml
from torchtitan.core.cadence import steps_of
from torchtitan.core.errors import JobError
from torchtitan.job import ResolvedJob

anywhere = judged.anywhere

TABLE = [  # interval, total steps, epochs, interval in steps
    (0, 10, None, 0),
    (7, 10, None, 7),
    (0.05, 10, None, 1),
    (0.05, 100, None, 5),
    (0.07, 100, None, 7),  # in floats 7.000000000000001, so 8
    (0.1, 30, None, 3),
    (0.001, 10, None, 1),
    (0.34, 10, None, 4),
    (0.999, 10, None, 10),
    (1e-05, 3_000_000, None, 30),
    ("epoch", 10, 1, 10),
    ("epoch", 10, 3, 4),
    ("2/epoch", 100, 2, 25),
    ("2/epoch", 7, 1, 4),
    ("100/epoch", 7, 1, 1),
]


@pytest.mark.parametrize("interval, total, epochs, steps", TABLE)
def test_steps_of_an_interval(interval, total, epochs, steps):
    assert steps_of(interval, total, epochs) == steps


def test_shares_are_exact_decimals():
    """Compare every share of up to three digits with decimal arithmetic."""
    for thousandths in range(1, 1000):
        for total in (7, 10, 100, 999, 1000):
            exact = Decimal(thousandths) / 1000 * total
            assert steps_of(thousandths / 1000, total, None) == max(1, int(exact.to_integral_value("ROUND_CEILING")))


def test_intervals_in_epochs_need_training_epochs():
    with pytest.raises(JobError, match="2/epoch.*needs training.epochs"):
        steps_of("2/epoch", 10, None)


FAULTS = [
    (["--validation.freq=0"], "validation.freq: given 0; allowed: a whole number >= 1 or a number > 0 and < 1 or "),
    (["--checkpoint.interval=1.0"], "checkpoint.interval: given 1.0; allowed: a whole number >= 1 or a number "),
    (["--metrics.log_freq=-0.5"], "metrics.log_freq: given -0.5; allowed: a whole number >= 1 or"),
    (["--validation.freq=0/epoch"], 'validation.freq: given "0/epoch"; allowed: a whole number >= 1 or'),
    (["--validation.freq=epochs"], 'validation.freq: given "epochs"; allowed: a whole number >= 1 or'),
    (["--lr_scheduler.warmup_steps=-1"], "lr_scheduler.warmup_steps: given -1; allowed: a whole number >= 0 or"),
]


@pytest.mark.parametrize(
    "arguments, message", FAULTS, ids=lambda case: " ".join(case) if isinstance(case, list) else ""
)
def test_malformed_intervals_are_refused(arguments, message):
    with pytest.raises(ConfigError) as refused:
        manager.load(arguments)
    assert message in str(refused.value)


def test_a_quoted_number_is_advised_without_quotes(tmp_path):
    (tmp_path / "job.toml").write_text('[validation]\nfreq = "5"\n[metrics]\nlog_freq = "0.5"\n')
    with pytest.raises(ConfigError) as refused:
        manager.load([f"--job.config_file={tmp_path}/job.toml"])
    assert "write 5, without quotes" in str(refused.value) and "write 0.5, without quotes" in str(refused.value)


def test_intervals_without_a_meaning_in_the_run_are_faults():
    for key in ("metrics.log_freq", "validation.freq", "checkpoint.interval", "lr_scheduler.warmup_steps"):
        (fault,) = lines(f"--{key}=2/epoch")
        assert fault == (
            f'{key}: given "2/epoch"; allowed: steps, or a share of the run such as 0.1, without training.epochs; '
            "write one of them, or training.epochs instead of training.steps"
        )
    (fault,) = lines("--checkpoint.interval=0.1", "--checkpoint.interval_type=seconds")
    assert fault == (
        "checkpoint.interval: given 0.1; allowed: a whole number with checkpoint.interval_type = "
        '"seconds"; write seconds, or interval_type = "steps"'
    )
    (fault,) = lines("--lr_scheduler.warmup_steps=0.95", "--training.steps=10")
    assert fault.startswith("lr_scheduler.warmup_steps: given 0.95; allowed: must be less than the 10 steps in all")


def test_a_share_of_warmup_counts_the_steps_of_the_schedule(tmp_path):
    for value, steps in (("0.07", 7), ("0", 0), ("12", 12)):
        job = manager.load([f"--lr_scheduler.warmup_steps={value}", "--training.steps=100"])
        assert ResolvedJob(job).schedule.learning_rate().warmup == steps
    longer = ["--lr_scheduler.warmup_steps=0.07", "--training.steps=50", "--lr_scheduler.total_steps=100"]
    assert ResolvedJob(manager.load(longer)).schedule.learning_rate().warmup == 7
    job = manager.load([*longer, "--validation.freq=0.05", "--checkpoint.interval=0.1", "--metrics.log_freq=3"])
    assert ResolvedJob(job).schedule.cadence == (3, 3, 5)
    (tmp_path / "kept.toml").write_text(to_toml(job))  # as written by the user, so that a resume converts it again
    assert "freq = 0.05\n" in to_toml(job)
    assert ResolvedJob(manager.load([f"--job.config_file={tmp_path}/kept.toml"])).schedule.cadence == (3, 3, 5)


def test_a_run_by_epochs_keeps_its_cadence_over_a_resume(tmp_path):
    """Epochs have a number of steps only after packing; a resume on other ranks computes the same one."""
    rows = write_rows(tmp_path)
    options = dict(checkpoint__enable=True, checkpoint__interval="2/epoch", validation__freq="4/epoch")
    options |= dict(metrics__log_freq=0.2, lr_scheduler__warmup_steps="epoch", checkpoint__keep_latest_k=0)
    full_run, stopped_run = (sft_arguments(tmp_path / name, rows, **options) for name in ("whole", "cut"))
    run_ranks(1, jobs.train, full_run)
    run_ranks(1, train_and_stop_after, stopped_run, 4)
    run_ranks(2, jobs.train, stopped_run)
    last, saves, validations, logs = steps_of_events(tmp_path / "whole")
    assert last > 6
    assert saves == sorted({*range(-(-last // 4), last, -(-last // 4)), last})
    assert validations == sorted({*range(-(-last // 8), last, -(-last // 8)), last})
    assert logs == sorted({1, *range(-(-last // 5), last, -(-last // 5)), last})
    for part, straight in enumerate((saves, validations, logs), 1):  # a stop saves its step, and does not validate it
        assert set(steps_of_events(tmp_path / "cut")[part]) - {4} == set(straight) - {4}


def steps_of_events(folder):
    """Return the last step, and the steps of checkpoints, validations and log lines."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    saves = sorted(int(path.name[5:]) for path in (folder / "checkpoint").glob("step-*"))
    validations = [row["step"] for row in rows if "validation_loss" in row]
    return rows[-1]["step"], saves, validations, [row["step"] for row in rows if "loss" in row]
