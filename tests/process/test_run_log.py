"""Log lines of a run: optional times and a file per rank, short paths, and jumps of the learning rate."""

import io
import logging
import re

import pytest

from tests.support import jobs
from tests.support.pool import run_ranks
from torchtitan.lr_scheduling import LRSchedulers
from torchtitan.process.ranks import Ranks
from torchtitan.process.run_log import LogFileHandler, set_up_logging

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
logger = logging.getLogger("torchtitan").getChild("test")


@pytest.fixture(autouse=True)
def as_before():
    root = logging.getLogger("torchtitan")
    before = root.handlers[:], root.propagate, root.level
    yield
    root.handlers, root.propagate, root.level = before


def test_lines_are_plain_unless_times_are_asked_for(capsys):
    set_up_logging(Ranks())
    logger.info("hello")
    logger.warning("look out")
    printed = capsys.readouterr()
    assert printed.out == "hello\n" and printed.err == "WARNING: look out\n"
    set_up_logging(Ranks(rank=1, logs=True), timestamps=True)
    logger.info("hello")
    logger.info("\nthe end\n  of it")
    assert re.fullmatch(rf"{TIME} \[rank 1\] hello\n\n{TIME} \[rank 1\] the end\n  of it\n", capsys.readouterr().out)


def test_a_rank_that_does_not_log_has_its_file(tmp_path, capsys):
    set_up_logging(Ranks(rank=3, logs=False), folder=tmp_path / "logs")
    logger.info("\033[1mhello\033[0m")
    logger.debug("crashed")
    assert capsys.readouterr().out == ""
    first, second = (tmp_path / "logs/rank-00003.log").read_text().splitlines()
    assert re.fullmatch(rf"{TIME},\d+ INFO hello", first) and second.endswith("DEBUG crashed")


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_file_that_cannot_be_written_ends_nothing(tmp_path, capsys):
    set_up_logging(Ranks(), folder=tmp_path)
    (file,) = [handler for handler in logging.getLogger("torchtitan").handlers if isinstance(handler, LogFileHandler)]
    file.setStream(Full())
    logger.info("hello")
    printed = capsys.readouterr()
    assert printed.out == "hello\n" and printed.err == ""


def test_lines_that_nobody_takes_end_nothing_and_are_told_of_once(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout", Full())
    set_up_logging(Ranks())
    logger.info("hello")
    logger.info("hello again")
    message = "the run's lines cannot be written (No space left on device); it goes on without\n"
    assert capsys.readouterr().err == message


def test_paths_are_said_from_where_the_run_was_started(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    set_up_logging(Ranks())
    logger.info("folder %s, and %s", tmp_path / "outputs/debug", "/elsewhere/x")
    assert capsys.readouterr().out == "folder outputs/debug, and /elsewhere/x\n"


def test_a_run_that_is_asked_to_writes_a_file_for_each_rank(tmp_path):
    options = dict(
        training__steps=2, training__local_batch_size=4, metrics__log_files=True, metrics__log_timestamps=True
    )
    argv = jobs.arguments(tmp_path / "run", jobs.write_texts(tmp_path), **options)
    code, out, err = jobs.run(argv, ranks=2)
    assert code == 0, err
    assert re.search(rf"^{TIME} step 2/2  loss", out, re.MULTILINE)
    assert f"{jobs.ROOT}/" not in out
    for rank in (0, 1):
        assert "INFO step 2/2  loss" in (tmp_path / f"run/logs/rank-0000{rank}.log").read_text()


def train_and_log(argv: list[str]) -> list[str]:
    """Train and return the lines that this rank logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("torchtitan").addHandler(handler)
    try:
        jobs.train(argv)
    finally:
        logging.getLogger("torchtitan").removeHandler(handler)
    return lines


def test_a_resumed_run_says_that_its_learning_rate_jumps(tmp_path):
    texts = jobs.write_texts(tmp_path)
    options = dict(checkpoint__enable=True, lr_scheduler__warmup_steps=2)

    def run(steps: int) -> list[str]:
        (log_lines,) = run_ranks(
            1, train_and_log, jobs.arguments(tmp_path / "run", texts, training__steps=steps, **options)
        )
        return [line for line in log_lines if "jumps" in line]

    assert run(4) == [] == run(4)  # the second has nothing left to do
    (line,) = run(12)
    # from the floor, a tenth of 1e-2, to where a schedule of twelve steps is after four: 1 - 0.9 * 3 / 10
    assert line == "the learning rate jumps from 0.001, as the checkpoint's job had it, to 0.0073"


def test_a_checkpoint_of_before_has_no_rate(tmp_path):
    assert LRSchedulers([], None).rate_before is None
