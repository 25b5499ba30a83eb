"""The expected duration of a run with failures, against a simulation, and what `torchtitan plan` says about it."""

import dataclasses
import json
import random

import pytest

from torchtitan.commands import plan as command
from torchtitan.core.errors import JobError
from torchtitan.planner.failures import COPIED_BANDWIDTH, WRITTEN_BANDWIDTH, Failures, slowdown

JOB = ("debug_model", "--training.global_batch_size", "16", "--gpus", "8", "--quick", "--json")
HOUR = 3600.0


def simulated(failures, gpus, segments, seed):
    """Return the duration of `segments` intervals of work and their saves, relative to the work alone."""
    chance = random.Random(seed)
    elapsed = 0.0
    work = failures.interval(gpus)
    for _ in range(segments):
        needed = work + failures.blocked(gpus)
        while (until := chance.expovariate(1 / failures.between(gpus))) < needed:
            elapsed += until
            needed = failures.restart + work + failures.blocked(gpus)
        elapsed += needed
    return elapsed / (segments * work)


@pytest.mark.parametrize("hours", [1, 5, 100])
def test_the_slowdown_is_that_of_simulated_failures(hours):
    failures = Failures(64 * hours * HOUR, 0.0, in_background=False, save_seconds=30.0, restart_seconds=300.0)
    expected = simulated(failures, 64, 40_000, seed=hours)
    assert failures.slowdown(64) - 1 == pytest.approx(expected - 1, rel=0.05)


def test_the_interval_loses_the_least_time():
    """Young's interval is the best one for rare failures; test_goodput.py has its formula."""
    failures = Failures(64 * 100 * HOUR, 0.0, in_background=False, save_seconds=30.0)
    between, best = failures.between(64), failures.interval(64)
    assert failures.slowdown(64) < min(slowdown(between, part * best, 30.0, failures.restart) for part in (0.8, 1.25))


def test_a_save_in_the_background_blocks_only_for_its_copy():
    direct = Failures(50_000 * HOUR, state=8e12, in_background=False)
    copied = dataclasses.replace(direct, in_background=True)
    assert direct.blocked(1024) == pytest.approx(8e12 / 1024 / WRITTEN_BANDWIDTH)
    assert copied.blocked(1024) == pytest.approx(8e12 / 1024 / COPIED_BANDWIDTH)
    assert copied.slowdown(1024) < direct.slowdown(1024)
    rare = dataclasses.replace(copied, gpu_seconds=1e-3 * direct.gpu_seconds)
    assert rare.interval(1024) == 8e12 / 1024 / WRITTEN_BANDWIDTH  # the one before has to be written first


def plan(capsys, *options):
    assert command.main([*JOB, *options]) == 0
    return json.loads(capsys.readouterr().out)["plans"][0]


def test_failures_lengthen_the_run_and_set_the_interval(capsys):
    failing = (
        "--mtbf-hours",
        "100",
        "--save-seconds",
        "20",
        "--restart-seconds",
        "120",
        "--tokens",
        "1e15",
        "--price",
        "2",
    )
    calm, slow = plan(capsys, *failing[6:]), plan(capsys, *failing)
    failures = Failures(100 * HOUR, 1.0, in_background=False, save_seconds=20.0, restart_seconds=120.0)
    for figure in ("hours", "gpu_hours", "price"):
        assert slow[figure] == pytest.approx(failures.slowdown(8) * calm[figure])
    assert slow["checkpoint_interval"] == round(failures.interval(8) / slow["step_seconds"])
    assert calm["checkpoint_interval"] is None
    assert command.main([*JOB[:-1], *failing]) == 0
    text = capsys.readouterr().out
    assert "failures, one every 12.5 h" in text and "a save blocks 20 s, a restart takes 2.0 min" in text
    assert f"checkpoint.interval = {slow['checkpoint_interval']} (Young and Daly)" in text


def test_a_deadline_counts_failures(capsys):
    hours = plan(capsys, "--tokens", "1e12")["hours"]
    deadline = ("--tokens", "1e12", "--deadline", f"{1.01 * hours:.3f}h")
    plan(capsys, *deadline)
    with pytest.raises(JobError, match="deadline"):
        command.main([*JOB, *deadline, "--mtbf-hours", "100"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--save-seconds", "5"], "--save-seconds: allowed with --mtbf-hours only"),
        (["--restart-seconds", "5"], "--restart-seconds: allowed with --mtbf-hours only"),
        (["--mtbf-hours", "0.1"], "8 GPUs fail every 45 s, a restart and a save take"),
        (["--mtbf-hours", "often"], "a number above 0"),
    ],
)
def test_errors_say_what_to_do(options, message):
    with pytest.raises(JobError, match=message):
        command.main([*JOB, *options])
