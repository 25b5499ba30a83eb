"""The lines of a run: on the console those of the ranks that log; where they are asked for, a file for every rank."""

import logging
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

from torchtitan.core.progress_bar import set_aside
from torchtitan.process.ranks import Ranks

TIME = "%(asctime)s "


class Lines(logging.StreamHandler):
    """On a terminal, beside a progress bar and not through it."""

    lost = False

    def emit(self, record: logging.LogRecord) -> None:
        with set_aside():
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Of lines that nobody reads any more, or on a disk that is full; the run goes on without them."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.lost:
            self.lost = True
            with suppress(OSError):
                print(f"the run's lines cannot be written ({error.strerror}); it goes on without", file=sys.stderr)


COLOUR = re.compile(r"\033\[[0-9;]*m")


class Short(logging.Formatter):
    """Paths below the folder that the run was started in are said from there."""

    def format(self, record: logging.LogRecord) -> str:
        text, here = super().format(record), os.path.join(os.getcwd(), "")
        if record.getMessage().startswith("\n"):  # a line that is left blank stands before the time
            text = "\n" + text.replace("\n", "", 1)
        return text.replace(here, "") if here != os.sep else text


class Plain(logging.Formatter):
    """Without the colours of a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return COLOUR.sub("", super().format(record))


class LogFile(logging.FileHandler):
    """On a disk that is full the run goes on without it."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def set_up_logging(ranks: Ranks, timestamps: bool = False, folder: Path | None = None) -> None:
    """Plain lines on stdout from the ranks that log; warnings of those and errors of all on stderr. With a `folder`,
    everything that this rank says also goes there, with its time: what it crashed by, too."""
    logger = logging.getLogger("torchtitan")
    for handler in logger.handlers:
        handler.close()
    logger.handlers.clear()
    logger.propagate = False
    logger.setLevel(logging.INFO)
    head = (TIME if timestamps else "") + ("" if ranks.is_main else f"[rank {ranks.rank}] ")
    if ranks.logs:
        out = Lines(sys.stdout)
        out.setLevel(logging.INFO)
        out.addFilter(lambda record: record.levelno < logging.WARNING)
        out.setFormatter(Short(head + "%(message)s", "%Y-%m-%d %H:%M:%S"))
        logger.addHandler(out)
    err = Lines(sys.stderr)
    err.setLevel(logging.WARNING if ranks.logs else logging.ERROR)
    err.setFormatter(Short(head + "%(levelname)s: %(message)s", "%Y-%m-%d %H:%M:%S"))
    logger.addHandler(err)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        file = LogFile(folder / f"rank-{ranks.rank:05}.log", encoding="utf-8")
        file.setFormatter(Plain(TIME + "%(levelname)s %(message)s"))
        logger.addHandler(file)
        logger.setLevel(logging.DEBUG)
