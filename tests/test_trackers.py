"""A tracker that raises, blocks or cannot be reached costs the run nothing but its own records."""

import threading

import pytest

from tests.support import jobs
from tests.support.pool import run_ranks
from torchtitan.metrics import PatientTracker, patience

QUICK = (0.001,)


class Service:
    """Fails as often as it is told, blocks until it is let go."""

    def __init__(self, failures: int = 0, blocks: bool = False):
        self.failures, self.logged, self.closed = failures, [], False
        self.free = threading.Event()
        self.busy = threading.Event()
        if not blocks:
            self.free.set()

    def log(self, values, step):
        self.busy.set()
        assert self.free.wait(30)
        if self.failures:
            self.failures -= 1
            raise OSError(5, "planted")
        self.logged.append(step)

    def close(self):
        self.closed = True


def test_a_tracker_that_works_gets_every_record_in_order():
    service = Service()
    tracker = PatientTracker("it", lambda: service)
    for step in range(50):
        tracker.log({}, step)
    tracker.close()
    assert service.logged == list(range(50)) and service.closed and tracker.dropped == 0


def test_one_that_raises_is_tried_again_and_loses_nothing(caplog):
    service = Service(failures=3)
    tracker = PatientTracker("it", lambda: service, pauses=QUICK)
    for step in range(5):
        tracker.log({}, step)
    tracker._waiting.put(None)
    tracker._thread.join(30)
    assert service.logged == list(range(5)) and service.closed
    assert "it fails (OSError: [Errno 5] planted): the run goes on" in caplog.text
    assert "it works again after 3 tries" in caplog.text
    assert caplog.text.count("planted") == 1


def test_one_that_cannot_be_opened_is_tried_again():
    tries, service = [], Service()

    def open_it():
        tries.append(1)
        if len(tries) < 4:
            raise ConnectionError("nobody there")
        return service

    tracker = PatientTracker("it", open_it, pauses=QUICK)
    tracker.log({}, 1)
    tracker._waiting.put(None)
    tracker._thread.join(30)
    assert service.logged == [1] and len(tries) == 4


def test_one_that_always_fails_ends_with_the_run_and_says_what_it_lacks(caplog):
    tracker = PatientTracker("it", lambda: Service(failures=10**9), pauses=(60.0,))
    for step in range(3):
        tracker.log({}, step)
    tracker.close()
    assert not tracker._thread.is_alive()
    assert "it lacks 3 records; metrics.jsonl has them all" in caplog.text


def test_one_that_blocks_holds_up_neither_the_run_nor_its_end(caplog, monkeypatch):
    monkeypatch.setattr(patience, "LONGEST_QUEUE", 4)
    service = Service(blocks=True)
    tracker = PatientTracker("it", lambda: service, close_seconds=0.01)
    tracker.log({}, 0)
    assert service.busy.wait(30)
    for step in range(1, 10):
        tracker.log({}, step)  # returns at once
    assert tracker.dropped == 5
    tracker.close()
    assert "does not keep up" in caplog.text and "is left behind" in caplog.text
    service.free.set()
    tracker._thread.join(30)
    assert service.logged == [0, 1, 2, 3, 4]


def test_the_control_a_bare_tracker_ends_the_run():
    with pytest.raises(OSError, match="planted"):
        Service(failures=1).log({}, 1)


def test_a_run_whose_tensorboard_cannot_write_is_the_run_without(tmp_path):
    texts = jobs.write_texts(tmp_path / "texts")
    plain, digest = run_ranks(1, jobs.train, jobs.arguments(tmp_path / "plain", texts, training__steps=3))[0]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tb").write_text("a file where its folder has to be")
    options = dict(training__steps=3, metrics__enable_tensorboard=True)
    rows, same = run_ranks(1, jobs.train, jobs.arguments(tmp_path / "run", texts, **options))[0]
    assert [row["loss"] for row in rows] == [row["loss"] for row in plain]
    assert same == digest
