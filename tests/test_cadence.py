"""How often a run does something: the integers that shares and epochs mean, by exact arithmetic, and in a run."""

import json
from decimal import Decimal

import pytest

from tests.support import jobs, judged
from tests.support.judged import lines
from tests.support.pool import run_ranks
from tests.test_sft import sft_arguments, train_and_stop_after, write_rows
from torchtitan.build.parts import cadence, lr_schedule
from torchtitan.config import manager
from torchtitan.config.manager import ConfigError, to_toml
from torchtitan.core.cadence import steps_of
from torchtitan.core.errors import JobError

anywhere = judged.anywhere

TABLE = [  # said, steps in all, epochs, steps between two
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


@pytest.mark.parametrize("said, total, epochs, steps", TABLE)
def test_what_is_said_in_steps(said, total, epochs, steps):
    assert steps_of(said, total, epochs) == steps


def test_a_share_is_the_decimal_number_that_is_written():
    """Of every share of two or three digits, against the arithmetic of decimals."""
    for thousandths in range(1, 1000):
        for total in (7, 10, 100, 999, 1000):
            exact = Decimal(thousandths) / 1000 * total
            assert steps_of(thousandths / 1000, total, None) == max(1, int(exact.to_integral_value("ROUND_CEILING")))


def test_epochs_need_their_number():
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


@pytest.mark.parametrize("given, told", FAULTS, ids=lambda case: " ".join(case) if isinstance(case, list) else "")
def test_what_says_nothing(given, told):
    with pytest.raises(ConfigError) as refused:
        manager.load(given)
    assert told in str(refused.value)


def test_a_number_between_quotes_is_told_from_words(tmp_path):
    (tmp_path / "job.toml").write_text('[validation]\nfreq = "5"\n[metrics]\nlog_freq = "0.5"\n')
    with pytest.raises(ConfigError) as refused:
        manager.load([f"--job.config_file={tmp_path}/job.toml"])
    assert "write 5, without quotes" in str(refused.value) and "write 0.5, without quotes" in str(refused.value)


def test_what_the_run_gives_no_meaning():
    for key in ("metrics.log_freq", "validation.freq", "checkpoint.interval", "lr_scheduler.warmup_steps"):
        (told,) = lines(f"--{key}=2/epoch")
        assert told == (
            f'{key}: given "2/epoch"; allowed: steps, or a share of the run such as 0.1, without training.epochs; '
            "write one of them, or training.epochs instead of training.steps"
        )
    (told,) = lines("--checkpoint.interval=0.1", "--checkpoint.interval_type=seconds")
    assert told == (
        "checkpoint.interval: given 0.1; allowed: a whole number with checkpoint.interval_type = "
        '"seconds"; write seconds, or interval_type = "steps"'
    )
    (told,) = lines("--lr_scheduler.warmup_steps=0.95", "--training.steps=10")
    assert told.startswith("lr_scheduler.warmup_steps: given 0.95; allowed: must be less than the 10 steps in all")


def test_a_share_of_warmup_is_of_the_schedule(tmp_path):
    for given, steps in (("0.07", 7), ("0", 0), ("12", 12)):
        job = manager.load([f"--lr_scheduler.warmup_steps={given}", "--training.steps=100"])
        assert lr_schedule(job).warmup == steps
    longer = ["--lr_scheduler.warmup_steps=0.07", "--training.steps=50", "--lr_scheduler.total_steps=100"]
    assert lr_schedule(manager.load(longer)).warmup == 7
    job = manager.load([*longer, "--validation.freq=0.05", "--checkpoint.interval=0.1", "--metrics.log_freq=3"])
    assert cadence(job) == (3, 3, 5)
    (tmp_path / "kept.toml").write_text(to_toml(job))  # as it was said, so that a resume says it again
    assert "freq = 0.05\n" in to_toml(job)
    assert cadence(manager.load([f"--job.config_file={tmp_path}/kept.toml"])) == (3, 3, 5)


def test_a_run_by_epochs_keeps_its_cadence_over_a_stop(tmp_path):
    """The steps are known only when the records are packed; a resume finds the same ones, on other ranks too."""
    rows = write_rows(tmp_path)
    often = dict(checkpoint__enable=True, checkpoint__interval="2/epoch", validation__freq="4/epoch")
    often |= dict(metrics__log_freq=0.2, lr_scheduler__warmup_steps="epoch", checkpoint__keep_latest_k=0)
    whole, cut = (sft_arguments(tmp_path / name, rows, **often) for name in ("whole", "cut"))
    run_ranks(1, jobs.train, whole)
    run_ranks(1, train_and_stop_after, cut, 4)
    run_ranks(2, jobs.train, cut)
    last, saves, tests, logs = seen(tmp_path / "whole")
    assert last > 6
    assert saves == sorted({*range(-(-last // 4), last, -(-last // 4)), last})
    assert tests == sorted({*range(-(-last // 8), last, -(-last // 8)), last})
    assert logs == sorted({1, *range(-(-last // 5), last, -(-last // 5)), last})
    for part, straight in enumerate((saves, tests, logs), 1):  # a stop saves its step, and does not validate it
        assert set(seen(tmp_path / "cut")[part]) - {4} == set(straight) - {4}


def seen(folder):
    """The last step; the steps of checkpoints, validations and lines."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    saves = sorted(int(path.name[5:]) for path in (folder / "checkpoint").glob("step-*"))
    tests = [row["step"] for row in rows if "validation_loss" in row]
    return rows[-1]["step"], saves, tests, [row["step"] for row in rows if "loss" in row]
