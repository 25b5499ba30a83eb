"""The end of a process: its exit code, that it dies with whoever started it, and how it leaves process groups.

After a collective has ended, a thread of gloo still has to free its tensors, and asks for Python's lock to do so. If
Python is being taken down by then, that aborts the process (pytorch/pytorch#190489; seen in 1 of 12 short runs on busy
cores), and a run that has finished looks failed. So everything but Python's own finalization is done.

What kind of failure an exception is, told without a traceback where a traceback would only hide it.
"""

import atexit
import ctypes
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NoReturn

CRASHED = 1
REFUSED, NOT_LOADED, NON_FINITE, CRASH_LOOP, HUNG, NOT_SAVED, OUT_OF_MEMORY, DIFFERING = 2, 3, 4, 5, 6, 7, 8, 9
NOT_EXPORTED = 10
"""Training is complete and saved, but the export after the last step failed."""
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C, a scheduler, a terminal that is closed, a scheduler's notice: each asks to stop, saved, and ends in 128 + its
number."""
STOPPED = {128 + number for number in STOP_SIGNALS}
EXPLAINED = {REFUSED, NOT_LOADED, NON_FINITE, NOT_SAVED, NOT_EXPORTED} | STOPPED
"""Exit codes of a rank that has said what there is to say, and that would come again if it was started again."""
SAID_BY_THE_FIRST = {NOT_LOADED, NON_FINITE, NOT_SAVED}
"""Those that all ranks end with, of which a machine's first alone has said why."""

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """From here on this process is killed when the process (its main thread) that started it ends, however it ends.
    Linux only; elsewhere nothing happens."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before
        os._exit(128 + signal.SIGKILL)


def stop_signals() -> list[signal.Signals]:
    """Those to be handled. One that whoever started us has turned off (`nohup`) stays off."""
    kept_off = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else []
    return [number for number in STOP_SIGNALS if number not in kept_off]


def exit_with(command: Callable[[], int | None]) -> NoReturn:
    """Run `command` and leave the process with its exit code, 0 if it has none, after its threads have ended, functions
    registered with atexit have run and streams are flushed. After an exception, which is shown as ever, the code is 1;
    the process does not wait until others have taken part in what it began, as the libraries would on their way out.

    Call it before anything else is registered with atexit: the first one registered is the last to run.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    codes: list[int] = []
    atexit.register(_leave, codes)
    try:
        codes.append(command() or 0)
    except Exception:
        sys.excepthook(*sys.exc_info())
        codes.append(1)
    sys.exit(codes[0])


def _leave(codes: list[int]) -> None:
    if not codes:
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    os._exit(codes[0])


# gloo's and torch's words, of torch 2.13, for a connection to a rank that is gone
_LOST = re.compile(r"gloo/transport|Connection (closed|reset) by peer|Broken pipe|NCCL .*remote process exited")
_NO_MEMORY = re.compile(r"can't allocate memory|std::bad_alloc")


class ExportError(RuntimeError):
    """Training is complete; only its result could not be written for other programs. The message says how to do it
    again, and the cause is the exception that the export raised."""


def kind_of(error: BaseException) -> Literal["memory", "peer"] | None:
    """memory: the device or the machine has none left; peer: another rank is gone, which has said why itself."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "memory"
    if isinstance(error, RuntimeError):
        if _NO_MEMORY.search(str(error)):
            return "memory"
        if _LOST.search(str(error)) or type(error).__name__ in ("DistBackendError", "DistNetworkError"):
            return "peer"
    return None


def add_note(error: BaseException, text: str) -> None:
    """As `BaseException.add_note`, which came with Python 3.11: there the traceback shows it."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), text]
