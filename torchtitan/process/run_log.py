"""The log of a run: on the console from the ranks that log, and optionally in one file per rank."""

import io
import logging
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

from torchtitan.core.progress_bar import hide_bars
from torchtitan.process.ranks import Ranks

TIME = "%(asctime)s "


def print_message(text: str, stream: TextIO | None = None) -> None:
    """Print a message of a launcher, and ignore a closed terminal: it must not end the run."""
    with suppress(OSError):
        print(text, file=stream or sys.stdout, flush=True)


def print_error(text: str) -> None:
    print_message(text, sys.stderr)


class ConsoleHandler(logging.StreamHandler):
    """Write log lines to a stream, above a progress bar and not into it."""

    lost = False

    def emit(self, record: logging.LogRecord) -> None:
        with hide_bars():
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Report once that lines cannot be written (no reader, full disk); the run continues without them."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.lost:
            self.lost = True
            with suppress(OSError):
                print(f"the run's lines cannot be written ({error.strerror}); it goes on without", file=sys.stderr)


COLOUR = re.compile(r"\033\[[0-9;]*m")


class RelativePathFormatter(logging.Formatter):
    """Shorten paths in the current folder to relative ones."""

    def format(self, record: logging.LogRecord) -> str:
        text, prefix = super().format(record), os.path.join(os.getcwd(), "")
        if record.getMessage().startswith("\n"):  # put a leading blank line before the time
            text = "\n" + text.replace("\n", "", 1)
        return text.replace(prefix, "") if prefix != os.sep else text


class PlainFormatter(logging.Formatter):
    """Remove terminal colours."""

    def format(self, record: logging.LogRecord) -> str:
        return COLOUR.sub("", super().format(record))


class LogFileHandler(logging.FileHandler):
    """A log file that ignores write errors, so that the run continues when the disk is full."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class RankStream(io.TextIOWrapper):
    """A stream of text that begins each line with the rank, and writes lines at once."""

    def __init__(self, stream: TextIO, rank: int) -> None:
        super().__init__(cast(Any, stream.buffer), encoding=stream.encoding, errors=stream.errors, line_buffering=True)
        self._head, self._is_inside = f"[rank {rank}] ", False

    def write(self, text: str) -> int:
        if text:
            super().write(self._head * (not self._is_inside) + text[:-1].replace("\n", f"\n{self._head}") + text[-1])
            self._is_inside = text[-1] != "\n"
        return len(text)


def begin_lines_with_rank(ranks: Ranks) -> None:
    """Let each rank of several write whole lines, and all but the first one begin theirs with their rank."""
    for name in ("stdout", "stderr") if ranks.world_size > 1 else ():
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):  # the parent process has closed it
            continue
        stream.reconfigure(line_buffering=True, write_through=False)
        if not ranks.is_main:
            setattr(sys, name, RankStream(stream, ranks.rank))


def set_up_logging(ranks: Ranks, timestamps: bool = False, folder: Path | None = None) -> None:
    """Log to stdout on the ranks that log; their warnings and the errors of all ranks go to stderr.

    With a `folder`, everything that this rank logs also goes to a file there, with times and the traceback of a crash.
    """
    logger = logging.getLogger("torchtitan")
    for handler in logger.handlers:
        handler.close()
    logger.handlers.clear()
    logger.propagate = False
    logger.setLevel(logging.INFO)
    is_named = ranks.is_main or isinstance(sys.stderr, RankStream)
    head = (TIME if timestamps else "") + ("" if is_named else f"[rank {ranks.rank}] ")
    if ranks.logs:
        out = ConsoleHandler(sys.stdout)
        out.setLevel(logging.INFO)
        out.addFilter(lambda record: record.levelno < logging.WARNING)
        out.setFormatter(RelativePathFormatter(head + "%(message)s", "%Y-%m-%d %H:%M:%S"))
        logger.addHandler(out)
    err = ConsoleHandler(sys.stderr)
    err.setLevel(logging.WARNING if ranks.logs else logging.ERROR)
    err.setFormatter(RelativePathFormatter(head + "%(levelname)s: %(message)s", "%Y-%m-%d %H:%M:%S"))
    logger.addHandler(err)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        file = LogFileHandler(folder / f"rank-{ranks.rank:05}.log", encoding="utf-8")
        file.setFormatter(PlainFormatter(TIME + "%(levelname)s %(message)s"))
        logger.addHandler(file)
        logger.setLevel(logging.DEBUG)
