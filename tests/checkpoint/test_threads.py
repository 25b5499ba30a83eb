"""Work in threads: order, errors, and the number in work at a time."""

import os
import subprocess
import sys
import threading
import time

import pytest

from torchtitan.checkpoint.hashed_files import map_in_threads


@pytest.mark.parametrize(("items", "threads"), [(0, 4), (1, 4), (20, 1), (20, 3)])
def test_results_are_in_order_and_few_items_in_work(items, threads):
    lock, at_work, most = threading.Lock(), 0, 0

    def double(item: int) -> int:
        nonlocal at_work, most
        with lock:
            at_work, most = at_work + 1, max(most, at_work + 1)
        time.sleep(0.001 * (item % 3))
        with lock:
            at_work -= 1
        return 2 * item

    assert map_in_threads(double, range(items), threads) == [2 * item for item in range(items)]
    assert most <= threads


def test_a_failure_is_raised_and_ends_the_work():
    begun = []

    def fail(item: int) -> None:
        begun.append(item)
        if item >= 2:
            raise OSError(item, "failed")

    with pytest.raises(OSError, match="failed"):
        map_in_threads(fail, range(1000), 2)
    assert len(begun) < 10


@pytest.mark.parametrize("allowed", [0, 1])
def test_all_items_are_worked_on_where_no_more_threads_can_be_started(allowed, monkeypatch):
    """Python 3.12 refuses them once the main thread has ended, and a container at its limit of processes."""
    start, started = threading.Thread.start, []

    def start_some(thread: threading.Thread) -> None:
        if len(started) >= allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    assert map_in_threads(lambda item: 2 * item, range(20), 4) == [2 * item for item in range(20)]


SCRIPT = """
import threading, time
from torchtitan.checkpoint.hashed_files import map_in_threads
def save():
    time.sleep(0.3)
    print(map_in_threads(lambda item: item + 1, range(3), 2), flush=True)
threading.Thread(target=save).start()
raise SystemExit("crashed")
"""


def test_a_background_save_goes_on_after_the_main_thread_has_ended():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=os.environ)
    assert done.stdout.strip() == "[1, 2, 3]" and done.stderr.strip() == "crashed"
