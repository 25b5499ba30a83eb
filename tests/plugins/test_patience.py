"""Work that a user's file defines ends within a time limit."""

import re
import signal
import threading
import time

import pytest

from torchtitan.plugins.eval_tasks.evaluate_tasks import TimeLimitExceeded, time_limit, without_time_limit


def endless():
    re.search("(a+)+b", "a" * 60)


def test_a_pattern_that_does_not_end_is_ended():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeLimitExceeded, match="no end after 0.05 s"), time_limit(0.05):
        endless()
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_what_ends_in_its_time_is_left_alone():
    with time_limit(30):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_other_time_does_not_count():
    with pytest.raises(TimeLimitExceeded), time_limit(0.2):
        with without_time_limit():
            time.sleep(0.3)
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.2
        endless()
    with without_time_limit():  # without a bound around it
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_another_thread_has_no_bound_and_goes_on():
    done = []

    def in_another_thread():
        with time_limit(0.001), without_time_limit():
            time.sleep(0.02)
            done.append(True)

    thread = threading.Thread(target=in_another_thread)
    thread.start()
    thread.join()
    assert done
