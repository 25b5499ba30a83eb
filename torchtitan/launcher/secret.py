"""The secret that the launchers of a run share: a file in the run's folder that only its owner may read.

A launcher that can read the file belongs to the run. The secret is never sent. Both ends of a connection prove that
they know it, each by an HMAC over its role and a random number (nonce) of either end. A recorded exchange proves
nothing on another connection.
"""

import hashlib
import hmac
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Literal

from torchtitan.core.errors import JobError

NONCE_BYTES = 32
_HEX = re.compile(rb"[0-9a-f]{64}")
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
Role = Literal["first machine", "other machine"]


def create(path: Path) -> bytes:
    """Write a new secret and return it. The caller holds the run's folder, so an existing file is left over from an
    earlier launch. Raises `JobError` if the file cannot be written or cannot be hidden from other users.
    """
    secret = secrets.token_hex(32).encode()
    try:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
            if not mode & _OTHERS:
                os.write(descriptor, secret)
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise JobError(
            f"job.dump_folder: {path}, the secret that machines know each other by, cannot be written "
            f"({error.strerror}); allowed: a folder that this user may write to, with space on its disk"
        ) from None
    if mode & _OTHERS:
        remove(path)
        raise JobError(
            f"job.dump_folder: {path}, the secret that machines know each other by, would be open to other users "
            f"(mode {mode:04o}, not 0600); allowed: a folder on a file system that keeps the permissions of files"
        )
    return secret


def read(path: Path) -> bytes | None:
    """Return the secret of the first machine; None if there is none (yet).

    Raises `JobError` if this user may not read it, or others may.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except PermissionError:
        raise JobError(
            f"{path}: the first machine's secret, which this user may not read; allowed: the same user on all machines"
        ) from None
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        if status.st_mode & _OTHERS:
            raise JobError(
                f"{path}: the first machine's secret, with mode {stat.S_IMODE(status.st_mode):04o}, so that other "
                "users may know it; allowed: 0600, on a file system that keeps the permissions of files"
            )
        content = os.read(descriptor, 65)
    except OSError:  # a stale handle of a file that has just been replaced
        return None
    finally:
        os.close(descriptor)
    return content if _HEX.fullmatch(content) else None


def remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def new_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def proof(secret: bytes, role: Role, first_nonce: str, other_nonce: str) -> str:
    """Return the text that the machine with this role sends to prove that it knows the secret."""
    text = f"torchtitan launcher\0{role}\0{first_nonce}\0{other_nonce}"
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def is_proof(value: object, secret: bytes, role: Role, first_nonce: str, other_nonce: str) -> bool:
    """Return True if `value` proves that its sender knows the secret. Takes equally long for every wrong value."""
    expected = proof(secret, role, first_nonce, other_nonce)
    return isinstance(value, str) and hmac.compare_digest(value.encode(errors="replace"), expected.encode())


def is_nonce(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None
