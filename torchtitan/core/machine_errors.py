"""Errors of the machine: its disks, network, memory and limits. They say nothing of the content of a file.

An `OSError` tells either what is at a path (nothing, a folder) or that the machine could not do its work. The second
kind is retried, and then raised as a `MachineError`. It is no `OSError`, `ValueError` or `JobError`, so code that
judges the content of a file by those cannot take it for damage. A rank that ends with one is restarted.
"""

import errno
import logging
import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)

RETRY_PAUSES = (1.0, 4.0)
"""Seconds before each retry of an operation that the machine could not do."""
_OF_THE_PATH = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.ENODEV),
    *(errno.EEXIST, errno.ENOTEMPTY, errno.EINVAL, errno.ESPIPE, errno.EBADF, errno.EPIPE, errno.EOPNOTSUPP),
}
"""Errors that tell what is at a path, or that a call does not fit it."""
RIGHTS = {errno.EACCES, errno.EPERM, errno.EROFS}
"""Errors of permissions: nothing is known of the content, and a retry does not help."""
_ADVICE = {
    errno.EIO: "its disk or the way to it fails (see dmesg); mend or replace it, or copy the file from elsewhere",
    errno.EMFILE: "this process has too many open files; raise the limit (ulimit -n)",
    errno.ENFILE: "the machine has too many open files; raise fs.file-max or end other programs",
    errno.ENOMEM: "the machine has no memory left; end other programs or give the job more",
    errno.EACCES: "let this user read it (chmod, chown, or how the folder is mounted)",
    errno.EPERM: "let this user read it (chmod, chown, or how the folder is mounted)",
    errno.ESTALE: "its network file system has lost it; mount it again",
}


class MachineError(Exception):
    """The machine cannot read or write a file now. The message names the file, the error and the remedy.

    `on_all_ranks`: raised on all ranks together, for a failure of some of them.
    """

    def __init__(self, message: str, on_all_ranks: bool = False) -> None:
        super().__init__(message)
        self.on_all_ranks = on_all_ranks


def is_of_the_machine(error: BaseException, with_rights: bool = True) -> bool:
    """Return True for an error that tells nothing of what is at a path. Missing permissions count `with_rights`.

    Libraries raise an `OSError` without a number for damaged content.
    """
    if isinstance(error, MachineError):
        return True
    if not isinstance(error, OSError) or error.errno is None:
        return False
    return error.errno not in _OF_THE_PATH and (with_rights or error.errno not in RIGHTS)


def error_text(error: OSError, path: str | os.PathLike[str] | None = None) -> str:
    """Return the system's text for an error. If a disk is full, it tells bytes from inodes."""
    text = error.strerror or str(error)
    if error.errno == errno.ENOSPC and is_out_of_inodes(path or error.filename or "."):
        return f"{text}: not of bytes, which are free, but of inodes; delete files, such as many small ones (df -i)"
    return text


def is_out_of_inodes(path: str | os.PathLike[str]) -> bool:
    """Return True if the file system of a path, or of the nearest folder above it, has bytes but no inodes left."""
    path = os.path.abspath(path)
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    try:
        status = os.statvfs(path)
    except OSError:
        return False
    return status.f_files > 0 and status.f_favail == 0 and status.f_bavail > 0


def raise_if_of_the_machine(
    error: BaseException, path: str | os.PathLike[str], with_rights: bool = True, verb: str = "read"
) -> None:
    """Raise a `MachineError` for an error that says nothing of the content of a file; else do nothing."""
    if isinstance(error, MachineError):
        raise error
    if is_of_the_machine(error, with_rights):
        assert isinstance(error, OSError)
        advice = _ADVICE.get(error.errno or 0, "mend that and start again")
        text = error_text(error, path)
        raise MachineError(f"{os.fspath(path)}: the machine cannot {verb} it now ({text}); {advice}") from error


def retried(action: Callable[[], T], path: str | os.PathLike[str], with_rights: bool = True) -> T:
    """Return the action's result. Errors of the machine are retried, and then raised as a `MachineError`."""
    for pause in RETRY_PAUSES:
        try:
            return action()
        except OSError as error:
            if not is_of_the_machine(error, with_rights):
                raise
            if error.errno in RIGHTS:
                break
            logger.warning("%s cannot be read (%s): again in %g s", os.fspath(path), error_text(error, path), pause)
            time.sleep(pause)
    try:
        return action()
    except OSError as error:
        raise_if_of_the_machine(error, path, with_rights)
        raise
