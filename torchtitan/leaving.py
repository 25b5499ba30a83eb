"""The end of a process that was in process groups.

After a collective has ended, a thread of gloo still has to free its tensors, and asks for Python's lock to do so. If
Python is being taken down by then, that aborts the process (pytorch/pytorch#190489; seen in 1 of 12 short runs on busy
cores), and a run that has finished looks failed. So everything but Python's own finalization is done.
"""

import atexit
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


def exit_with(command: Callable[[], int | None]) -> NoReturn:
    """Run `command` and leave the process with its exit code, 0 if it has none, after its threads have ended, functions
    registered with atexit have run and streams are flushed. An exception ends the process as ever.

    Call it before anything else is registered with atexit: the first one registered is the last to run.
    """
    codes: list[int] = []
    atexit.register(_leave, codes)
    codes.append(command() or 0)
    sys.exit(codes[0])


def _leave(codes: list[int]) -> None:
    if not codes:
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    os._exit(codes[0])
