"""Connect the launchers of other machines to the first one: on each connection both ends prove that they belong to the
run before any other message.

first machine -> Challenge: a random number (nonce) and its version
other machine -> Proof, with its own nonce and version
first machine -> Welcome, with its proof; or Stranger and the end
other machine -> Here: which machine it is. From here on all lines are sealed (connection.py).

Before its proof, a connection may send little, has little time, and is one of few. Nothing that it says is obeyed.

The launchers of a run share a secret: a file in the run's folder that only its owner may read. A launcher that can read
the file belongs to the run. The secret is never sent. Both ends of a connection prove that they know it, each by an
HMAC over its role and what both have said. A recorded exchange proves nothing on another connection.
"""

import errno
import hashlib
import hmac
import os
import re
import secrets
import select
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchtitan.core.errors import JobError
from torchtitan.launcher.connection import Connection
from torchtitan.launcher.messages import (
    GREETING_TO_FIRST,
    GREETING_TO_OTHER,
    INTRODUCTION,
    ORDERS,
    Challenge,
    Here,
    Leave,
    Proof,
    Stranger,
    Welcome,
    launcher_version,
)
from torchtitan.launcher.nodes import Nodes, describe_failure, listen
from torchtitan.launcher.processes import SignalQueue
from torchtitan.process.exit import REFUSED
from torchtitan.process.run_log import print_error

NONCE_BYTES = 32
_HEX = re.compile(rb"[0-9a-f]{64}")
_OTHER_USERS = stat.S_IRWXG | stat.S_IRWXO
Role = Literal["first machine", "other machine"]


def create_secret(path: Path, replace: bool = True) -> bytes:
    """Write a new secret and return it. With `replace`, the caller holds the run's folder, so an existing file is left
    over from an earlier launch. Raises `JobError` if the file cannot be written or cannot be hidden from other users.
    """
    secret = secrets.token_hex(32).encode()
    try:
        if replace:
            path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
            if not mode & _OTHER_USERS:
                os.write(descriptor, secret)
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise JobError(
            f"job.dump_folder: {path}, the secret that machines know each other by, cannot be written "
            f"({error.strerror}); allowed: a folder that this user may write to, with space on its disk"
        ) from None
    if mode & _OTHER_USERS:
        remove_secret(path)
        raise JobError(
            f"job.dump_folder: {path}, the secret that machines know each other by, would be open to other users "
            f"(mode {mode:04o}, not 0600); allowed: a folder on a file system that keeps the permissions of files"
        )
    return secret


def read_secret(path: Path) -> bytes | None:
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
        if status.st_mode & _OTHER_USERS:
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


def remove_secret(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


@contextmanager
def secret_of_refusal(path: Path) -> Iterator[bytes | None]:
    """Yield a secret by which a first machine that refuses its job proves this to the others: that of a run at work in
    the folder, or a new one, which is removed again with the folders that were made for it. None if there is no way.
    """
    secret, new_folders = None, []
    is_new = False
    try:
        secret = read_secret(path)
        if secret is None:
            new_folders = [folder for folder in path.parents if not folder.exists()]
            path.parent.mkdir(parents=True, exist_ok=True)
            secret, is_new = create_secret(path, replace=False), True
    except (JobError, OSError, ValueError):  # the folder itself may be what is wrong with the job
        pass
    try:
        yield secret
    finally:
        with suppress(JobError, OSError):
            if is_new and read_secret(path) == secret:
                path.unlink()
            for folder in new_folders:
                folder.rmdir()


def new_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


@dataclass(frozen=True)
class Greeting:
    """The values that both ends have sent before their proofs."""

    first_nonce: str
    other_nonce: str
    first_version: str
    other_version: str

    def proof(self, secret: bytes, role: Role) -> str:
        """Return the text that the machine with this role sends to prove that it knows the secret."""
        return self._digest(secret, f"launcher\0{role}").hex()

    def is_proof(self, value: str, secret: bytes, role: Role) -> bool:
        """Return True if the sender of `value` knows the secret. Takes equally long for every wrong value."""
        return hmac.compare_digest(value.encode(errors="replace"), self.proof(secret, role).encode())

    def line_key(self, secret: bytes, role: Role) -> bytes:
        """Return the key of the seals of all lines that the machine with this role sends on this connection."""
        return self._digest(secret, f"lines\0{role}")

    def _digest(self, secret: bytes, purpose: str) -> bytes:
        parts = (purpose, self.first_nonce, self.other_nonce, self.first_version, self.other_version)
        return hmac.new(secret, "\0".join(("torchtitan", *parts)).encode(), hashlib.sha256).digest()

    def version_fault(self, machine: str) -> str:
        """Return the fault if the two launchers are of different versions, or ""."""
        if self.first_version == self.other_version:
            return ""
        return (
            f"torchtitan: given {self.first_version} on the first machine and {self.other_version} on {machine}; "
            "allowed: the same version on all machines"
        )


MAX_CANDIDATES = 64
"""Connections that have not introduced themselves; one more closes the oldest. An introduction takes milliseconds."""
INTRODUCTION_SECONDS = 10.0
"""Time for a connection to introduce itself."""
CONNECT_SECONDS, ANSWER_SECONDS = 5.0, 30.0
"""Timeouts of another machine: to connect, and for the first machine's answer, which may still be loading its job."""
_POLL_SECONDS = 0.05


MAX_REPORTED_STRANGERS = 10
"""A scan of all ports must not fill the log."""


@dataclass
class _Candidate:
    connection: Connection
    nonce: str
    deadline: float
    is_proved: bool = False


STARTED_AGAIN = "the run was started again on the first machine; this launcher is of the earlier start and leaves"


def refuse_connection(connection: Connection, text: str) -> None:
    connection.send(Leave(code=REFUSED, text=text))
    connection.close()


class Admission:
    """The first machine's listening socket, and the connections that have not introduced themselves yet."""

    def __init__(self, nodes: Nodes, key: bytes | None = None) -> None:
        self.listener = listen(nodes, nodes.port)
        self.key = key
        """The secret. Until it is known, no connection is accepted."""
        self.candidates: list[_Candidate] = []
        self.num_strangers = 0
        """Connections that could not prove that they belong to the run."""
        self.faults: list[str] = []
        """Why machines of the run were sent away."""

    @property
    def sockets(self) -> list[socket.socket]:
        return [
            self.listener,
            *(candidate.connection.sock for candidate in self.candidates if candidate.connection.is_open),
        ]

    def poll(self) -> list[tuple[Connection, Here]]:
        """Return the connections that have introduced themselves since the last call, and how."""
        self._accept()
        newcomers = []
        for candidate in list(self.candidates):
            message = self._receive_introduction(candidate)
            if message is not None:
                newcomers.append((candidate.connection, message))
            elif candidate.connection.is_open and time.monotonic() > candidate.deadline:
                candidate.connection.close()
            if message is not None or not candidate.connection.is_open:
                self.candidates.remove(candidate)
        return newcomers

    def _accept(self) -> None:
        for _ in range(MAX_CANDIDATES):
            if self.key is None or not select.select([self.listener], [], [], 0)[0]:
                return
            try:
                connection = Connection(self.listener.accept()[0], GREETING_TO_FIRST, self._count_stranger)
            except OSError:  # the peer has disconnected again
                continue
            candidate = _Candidate(connection, new_nonce(), time.monotonic() + INTRODUCTION_SECONDS)
            connection.send(Challenge(nonce=candidate.nonce, version=launcher_version()))
            self.candidates.append(candidate)
            while len(self.candidates) > MAX_CANDIDATES:
                self.candidates.pop(0).connection.close()

    def _count_stranger(self, text: str) -> None:
        self.num_strangers += 1
        if self.num_strangers <= MAX_REPORTED_STRANGERS:
            more = "; no more of these are reported" if self.num_strangers == MAX_REPORTED_STRANGERS else ""
            print_error(text + more)

    def _receive_introduction(self, candidate: _Candidate) -> Here | None:
        """Return the candidate's introduction if it has proved that it belongs to the run."""
        if not candidate.is_proved:
            for message in candidate.connection.receive(1):
                self._check_proof(candidate, message)
        if candidate.is_proved:
            for message in candidate.connection.receive(1):
                return message
        return None

    def _check_proof(self, candidate: _Candidate, proof: Proof) -> None:
        assert self.key is not None
        connection = candidate.connection
        greeting = Greeting(candidate.nonce, proof.nonce, launcher_version(), proof.version)
        if not greeting.is_proof(proof.proof, self.key, "other machine"):
            self._count_stranger(f"{connection.name} does not know this run's secret; the connection is closed")
            connection.send(Stranger())
            connection.close()
            return
        connection.send(Welcome(proof=greeting.proof(self.key, "first machine")))
        if fault := greeting.version_fault(connection.name.rstrip(",")):
            self.faults.append(fault)
            connection.close()
            return
        sending_key, receiving_key = (greeting.line_key(self.key, role) for role in ("first machine", "other machine"))
        connection.seal(sending_key, receiving_key, INTRODUCTION)
        candidate.is_proved = True

    def close(self) -> None:
        for candidate in self.candidates:
            candidate.connection.close()
        self.candidates.clear()
        self.listener.close()


class CoordinatorUnreachable(Exception):
    """The first machine was not reached; the message says why. `foreign` is True if it was reached, but its secret is
    not in this machine's folder.
    """

    def __init__(self, text: str, foreign: bool = False) -> None:
        super().__init__(text)
        self.has_other_secret = foreign


def connect(nodes: Nodes, secret_file: Path, queue: SignalQueue) -> Connection | int:
    """Reach the first machine and prove that this one belongs to the run; return the connection, or the number of a
    signal that ended the wait. Raises `CoordinatorUnreachable`, and `JobError` if the two launchers cannot work
    together.
    """
    sock = _open(nodes, queue)
    if isinstance(sock, int):
        return sock
    connection = Connection(sock, GREETING_TO_OTHER, lambda text: None)
    try:
        number = _authenticate(connection, secret_file, queue)
    except BaseException:
        connection.close()
        raise
    if number is not None:
        connection.close()
        return number
    return connection


def _open(nodes: Nodes, queue: SignalQueue) -> socket.socket | int:
    """Return a connection to the first machine.

    Signals are checked while it connects, which takes seconds if nothing responds.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(nodes.head, nodes.port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind)
    except (OSError, UnicodeError) as error:
        raise CoordinatorUnreachable(describe_failure(error)) from None
    sock.setblocking(False)
    code, deadline = sock.connect_ex(address), time.monotonic() + CONNECT_SECONDS
    while code == errno.EINPROGRESS:
        for number in queue.wait(_POLL_SECONDS):
            sock.close()
            return number
        if select.select([], [sock], [], 0)[1]:
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        elif time.monotonic() > deadline:
            code = errno.ETIMEDOUT
    if code:
        sock.close()
        raise CoordinatorUnreachable(os.strerror(code))
    return sock


def _authenticate(connection: Connection, secret_file: Path, queue: SignalQueue) -> int | None:
    """Do the other machine's part of the authentication; return the number of a signal that interrupted it."""
    key, greeting = b"", None
    deadline = time.monotonic() + ANSWER_SECONDS
    stranger = CoordinatorUnreachable(f"it does not know {secret_file} of this machine", foreign=True)
    while connection.is_open and time.monotonic() < deadline:
        for number in queue.wait(_POLL_SECONDS, [connection.sock]):
            return number
        for message in connection.receive(1):
            if isinstance(message, Challenge) and greeting is None:
                key = read_secret(secret_file) or b""
                if not key:
                    raise CoordinatorUnreachable(f"{secret_file} is not there on this machine", foreign=True)
                greeting = Greeting(message.nonce, new_nonce(), message.version, launcher_version())
                proof = greeting.proof(key, "other machine")
                connection.send(Proof(nonce=greeting.other_nonce, version=greeting.other_version, proof=proof))
            elif isinstance(message, Welcome) and greeting is not None:
                if not greeting.is_proof(message.proof, key, "first machine"):
                    raise stranger
                if fault := greeting.version_fault("this one"):
                    raise JobError(fault)
                roles: tuple[Role, Role] = ("other machine", "first machine")
                sending_key, receiving_key = (greeting.line_key(key, role) for role in roles)
                connection.seal(sending_key, receiving_key, ORDERS)
                return None
            else:
                raise stranger
    if connection.problem:
        raise CoordinatorUnreachable(
            f"what answers is no launcher of this version of torchtitan: it sent {connection.problem}"
        )
    raise CoordinatorUnreachable("it does not answer" if connection.is_open else "the connection was closed")
