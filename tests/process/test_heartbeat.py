"""Progress inside long steps is logged; short steps log nothing more."""

import io
import logging
import time

import pytest
import torch

from tests.support import jobs
from tests.support.pool import run_ranks
from torchtitan.config import manager
from torchtitan.process.heartbeat import Progress
from torchtitan.process.ranks import read_ranks
from torchtitan.training import reporting
from torchtitan.training.reporting import StepProgress
from torchtitan.training.step import FORWARD_BACKWARD, StepData
from torchtitan.training.trainer import Trainer

BATCH = {"tokens": torch.zeros(2, 100, dtype=torch.int64)}


class Run:
    """A simulated run of 10 steps of 4 passes on 3 data-parallel ranks, after step 2; each pass takes 20 seconds."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.progress, self.step, self.tokens = Progress(), 2, 4800
        self.shown = StepProgress(True, self.progress, 3, lambda: (self.step, 10, self.tokens), lambda: self.now)

    def passes(self):
        """Yield the passes, each after its 20 seconds."""
        self.progress.enter("train", self.step + 1)
        self.shown.start(StepData([BATCH] * 4, 1, 1.0, 2400, 0.0, None))
        for _ in range(4):
            yield
            self.now += 20
            self.shown.end(FORWARD_BACKWARD)


@pytest.fixture
def run(monkeypatch):
    return Run(monkeypatch)


def test_a_line_every_thirty_seconds_has_pass_tokens_and_time_left(run, caplog):
    caplog.set_level(logging.INFO)
    logging.getLogger("torchtitan").addHandler(run.shown._listener)
    try:
        for _ in run.passes():
            run.shown.refresh(on_terminal=False)
    finally:
        logging.getLogger("torchtitan").removeHandler(run.shown._listener)
    # after 40 s, 2 of 32 passes are done: 30 are left, of 20 s each. The next line comes 30 s later, at the earliest.
    assert caplog.messages == ["step 3/10: pass 3 of 4, 0:40 so far, 6,000 tokens, about 10:00 left"]
    run.progress.enter("save", 3)
    run.step, run.tokens, run.now = 3, 7200, run.now + 30
    run.shown.refresh(on_terminal=False)
    assert caplog.messages[1] == "saving step 3/10, 0:30 so far, 7,200 tokens, about 12:50 left"  # 28 passes of 27.5 s


def test_another_log_line_delays_the_progress_line(run, caplog):
    caplog.set_level(logging.INFO)
    logging.getLogger("torchtitan").addHandler(run.shown._listener)
    try:
        for _ in run.passes():
            run.shown.refresh(on_terminal=False)
            logging.getLogger("torchtitan.training.trainer").info("a line")
    finally:
        logging.getLogger("torchtitan").removeHandler(run.shown._listener)
    assert set(caplog.messages) == {"a line"}


def test_a_terminal_shows_an_updating_bar(run, monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", screen)
    for _ in run.passes():
        run.shown.refresh(on_terminal=True)
    output = screen.getvalue()
    assert "step 3/10: pass 2 of 4, 0:20 so far, 5,400 tokens" in output and "pass 4 of 4" in output
    assert "\n" not in output and output.count("\r") >= 3
    run.shown.last_line_at = run.now
    run.shown.refresh(on_terminal=True)  # a line has come: the bar goes
    assert screen.getvalue().rsplit("\r", 1)[1].strip() == ""


def lines_of(argv, seconds):
    """Run a job with passes of `seconds` each, and return its log lines."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("torchtitan")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    before = reporting.LINE_SECONDS, reporting.LOOK_SECONDS
    reporting.LINE_SECONDS, reporting.LOOK_SECONDS = 0.2, 0.05
    try:
        trainer = Trainer(manager.load(argv), read_ranks())
        forward = trainer.model.forward_backward

        def slow(*args, **kwargs):
            time.sleep(seconds)
            return forward(*args, **kwargs)

        trainer.model.forward_backward = slow
        trainer.train()
        trainer.metrics.close()
    finally:
        reporting.LINE_SECONDS, reporting.LOOK_SECONDS = before
        logger.removeHandler(handler)
    return lines


def test_a_run_of_long_steps_logs_its_progress(tmp_path):
    texts = jobs.write_texts(tmp_path / "texts")
    options = dict(training__steps=2, training__local_batch_size=4, metrics__log_freq=5)
    (lines,) = run_ranks(1, lines_of, jobs.arguments(tmp_path / "run", texts, **options), 0.5)
    assert any(line.startswith("step 1/2, which may compile: pass 2 of 2, ") for line in lines)
    assert any(line.startswith("step 2/2: pass 1 of 2, ") and line.endswith(" left") for line in lines)


def test_a_run_of_short_steps_logs_no_progress(tmp_path):
    texts = jobs.write_texts(tmp_path / "texts")
    code, out, err = jobs.run(jobs.arguments(tmp_path / "run", texts, training__steps=4))
    assert code == 0 and "so far" not in out + err
