"""Functions in several processes: failures, kills, and the death of the process that started them."""

import contextlib
import multiprocessing
import os
import signal
import sys
import time

import pytest

from tests.support.launched_ranks import has_ended
from torchtitan.core.errors import JobError
from torchtitan.process import workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")


def test_a_killed_process_is_reported(monkeypatch):
    monkeypatch.setattr(workers, "processors", lambda: 2)
    with pytest.raises(workers.WorkerEnded, match="a search was ended, as where memory runs out"):
        workers.run_in_processes(os._exit, [(9,), (9,)], "a search")


def fail_first_or_touch(folder, number):
    """Fail for number 0; else wait for 0.1 s and create a file, so that some calls are running during the failure."""
    if number == 0:
        raise JobError("the first")
    time.sleep(0.1)
    (folder / str(number)).touch()


def test_no_task_starts_after_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "processors", lambda: 2)
    with pytest.raises(JobError, match="the first"):
        workers.run_in_processes(fail_first_or_touch, [(tmp_path, number) for number in range(40)], "a task")
    assert len(list(tmp_path.iterdir())) < 39


def touch_and_wait(folder):
    (folder / str(os.getpid())).touch()
    signal.pause()


def test_processes_end_when_their_parent_dies(tmp_path, monkeypatch):
    """Ctrl-C in `torchtitan check` kills the process of its estimate like this."""
    monkeypatch.setattr(workers, "processors", lambda: 2)
    parent = multiprocessing.get_context("fork").Process(
        target=workers.run_in_processes, args=(touch_and_wait, [(tmp_path,)] * 2, "a task")
    )
    parent.start()
    try:
        deadline = time.monotonic() + 60
        while len(marker_files := list(tmp_path.iterdir())) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        parent.kill()
        assert all(has_ended(int(path.name)) for path in marker_files)
    finally:
        parent.kill()
        for path in tmp_path.iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.name), signal.SIGKILL)


def fail_or_sleep(number):
    if number == 0:
        raise JobError("the first")
    time.sleep(60)


def test_a_failure_ends_tasks_that_run(monkeypatch):
    monkeypatch.setattr(workers, "processors", lambda: 2)
    begin, earlier = time.monotonic(), multiprocessing.active_children()  # the ranks of other tests
    with pytest.raises(JobError, match="the first"):
        workers.run_in_processes(fail_or_sleep, [(0,), (1,)], "a task")
    assert time.monotonic() - begin < 30
    assert set(multiprocessing.active_children()) <= set(earlier)
