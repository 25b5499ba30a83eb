"""What kind of failure an exception is, told without a traceback where a traceback would only hide it."""

import re
from typing import Literal

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
