"""The end of a process: exit codes, stop signals, the death of the parent, and kinds of failure.

After a collective has ended, a thread of gloo still has to free its tensors, and takes Python's lock to do so. If the
interpreter is shutting down by then, the process aborts (pytorch/pytorch#190489; seen in 1 of 12 short runs on busy
cores), and a finished run looks failed. So `exit_with` does everything except Python's own finalization.
"""

import atexit
import ctypes
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Literal, NoReturn

CRASHED = 1
REFUSED, NOT_LOADED, NON_FINITE, CRASH_LOOP, HUNG, NOT_SAVED, OUT_OF_MEMORY, DIFFERING = 2, 3, 4, 5, 6, 7, 8, 9
NOT_EXPORTED = 10
"""Training is complete and saved, but the export after the last step failed."""
OUT_OF_TIME = 11
"""The run has saved and stopped before job.time_limit or the end of its SLURM allocation; no signal was sent."""
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Sent by Ctrl-C, a scheduler, a closed terminal, and a scheduler's advance notice. The run saves, stops and exits with
128 + the signal's number."""
STOPPED = {OUT_OF_TIME} | {128 + number for number in STOP_SIGNALS}
"""Exit codes of a run that was asked to stop and can go on."""
EXPLAINED = {REFUSED, NOT_LOADED, NON_FINITE, NOT_SAVED, NOT_EXPORTED} | STOPPED
"""Exit codes of stops and of deterministic failures. The rank has logged the reason and is not restarted."""
REPORTED_BY_FIRST_RANK = {NOT_LOADED, NON_FINITE, NOT_SAVED}
"""Exit codes with which all ranks end together. Only the first rank of each machine logs the reason."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have this process killed when its parent, or the parent's thread that started it, ends in any way. Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(128 + signal.SIGKILL)


@contextmanager
def exiting_on_stop_signals() -> Iterator[None]:
    """Turn stop signals into SystemExit, so that blocks of `finally` end children and remove temporary files."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_signals() -> list[signal.Signals]:
    """Return the signals to handle. SIGHUP stays ignored if the process was started so (`nohup`)."""
    kept_off = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else []
    return [number for number in STOP_SIGNALS if number not in kept_off]


def exit_with(command: Callable[[], int | None]) -> NoReturn:
    """Run `command` and end the process with its exit code (0 for None).

    Before that, threads end, functions registered with atexit run and streams are flushed. An exception is shown as
    usual and gives exit code 1. The process does not wait for other ranks to join its pending operations, as the
    libraries would in their finalization.

    Call this before anything else is registered with atexit: the first function registered is the last to run.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process
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
        with suppress(OSError, ValueError):  # closed, or without a reader
            stream.flush()
    os._exit(codes[0])


# messages of gloo and torch 2.13 about a lost connection to another rank
_LOST = re.compile(
    r"gloo/transport|Application timeout caused pair closure|Connection (closed|reset) by peer|Broken pipe"
    r"|NCCL .*remote process exited"
)
_NO_MEMORY = re.compile(r"can't allocate memory|std::bad_alloc")


class ExportError(RuntimeError):
    """Training is complete, but its result could not be written for other programs.

    The message shows how to repeat the export, and the cause is the exception that the export raised.
    """


def failure_kind(error: BaseException) -> Literal["memory", "peer"] | None:
    """Classify a failure: "memory" if the device or machine has none left, "peer" if another rank is gone.

    The other rank has reported its own failure.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "memory"
    if isinstance(error, RuntimeError):
        if _NO_MEMORY.search(str(error)):
            return "memory"
        if _LOST.search(str(error)) or type(error).__name__ in ("DistBackendError", "DistNetworkError"):
            return "peer"
    return None


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an exception as `BaseException.add_note` does, which only Python 3.11 and later have and show."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), text]
