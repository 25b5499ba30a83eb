"""A launcher that was stopped itself (SIGSTOP, docker pause) gives its ranks the time that it has missed."""

import os
import signal
import time

import pytest

from tests.support.launched_ranks import end, nothing_is_left, ready
from tests.support.restarted_ranks import supervise
from torchtitan.launcher import hangs
from torchtitan.launcher.hangs import AwakeClock

assert nothing_is_left  # a fixture

STEPS = "ready('train')\nfor step in range(30): tell('train', step); time.sleep(0.1)\ntell('end', 30)"


def test_ranks_that_were_stopped_together_with_their_launcher_do_not_hang(tmp_path):
    launcher = supervise(STEPS, tmp_path, budget=0, limit=2)
    pids = [launcher.pid, *ready(launcher).values()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4)
    for (
        pid
    ) in pids:  # the launcher goes on first, and would find that no rank has reported anything for twice the limit
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.3)
    code, _, err = end(launcher)
    assert (code, err) == (0, "")


def test_a_rank_that_stays_stopped_hangs_after_its_time(tmp_path):
    launcher = supervise("respond_to_launcher(ranks.launcher); " + STEPS + "\nwait()", tmp_path, budget=0, limit=2)
    pids = [launcher.pid, *ready(launcher).values()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(launcher.pid, signal.SIGCONT)
    began = time.monotonic()
    code, _, err = end(launcher)
    assert code == hangs.HUNG and "ranks 0, 1 are stopped by a signal" in err and time.monotonic() - began > 1


@pytest.fixture
def now(monkeypatch) -> list[float]:
    times = [100.0]
    monkeypatch.setattr(hangs.time, "monotonic", lambda: times[0])
    return times


def test_the_clock_leaves_out_the_time_in_which_it_was_stopped(now):
    clock = AwakeClock()
    for seconds in (0.5, 0.5, 60.0, 0.5):
        now[0] += seconds
        clock.tick()
    assert clock.seconds(100.0, now[0]) == 2.0  # of the stop, half a second counts
    assert clock.seconds(130.0, now[0]) == 0.5 and clock.seconds(161.0, now[0]) == 0.5
    assert clock.seconds(90.0, 101.0) == 11.0


def test_time_passes_where_the_launcher_seldom_runs(now):
    """A machine too busy to poll must not hide a hang for ever."""
    clock = AwakeClock()
    for _ in range(3000):
        now[0] += 5.0
        clock.tick()
    assert clock.seconds(100.0, now[0]) >= 1000
