"""Connect the launchers of other machines to the first one: on each connection both ends prove that they belong to the
run before any other message.

first machine -> {"kind": "challenge", "nonce"}
other machine -> {"kind": "proof", "nonce", "proof"}
first machine -> {"kind": "welcome", "proof"}, or {"kind": "stranger"} and the end
other machine -> {"kind": "here", ...}: which machine it is

Before its proof, a connection may send little, has little time, and is one of few.

The launchers of a run share a secret: a file in the run's folder that only its owner may read. A launcher that can read
the file belongs to the run. The secret is never sent. Both ends of a connection prove that they know it, each by an
HMAC over its role and a random number (nonce) of either end. A recorded exchange proves nothing on another connection.
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchtitan.core.errors import JobError
from torchtitan.launcher.nodes import MAX_GREETING_BYTES, MAX_MESSAGE_BYTES, Connection, Message, Nodes, listen
from torchtitan.launcher.processes import SignalQueue
from torchtitan.process.exit import CRASHED, REFUSED

NONCE_BYTES = 32
_HEX = re.compile(rb"[0-9a-f]{64}")
_OTHER_USERS = stat.S_IRWXG | stat.S_IRWXO
Role = Literal["first machine", "other machine"]


def create_secret(path: Path) -> bytes:
    """Write a new secret and return it. The caller holds the run's folder, so an existing file is left over from an
    earlier launch. Raises `JobError` if the file cannot be written or cannot be hidden from other users.
    """
    secret = secrets.token_hex(32).encode()
    try:
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


def new_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def make_proof(secret: bytes, role: Role, first_nonce: str, other_nonce: str) -> str:
    """Return the text that the machine with this role sends to prove that it knows the secret."""
    text = f"torchtitan launcher\0{role}\0{first_nonce}\0{other_nonce}"
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def is_proof(value: object, secret: bytes, role: Role, first_nonce: str, other_nonce: str) -> bool:
    """Return True if `value` proves that its sender knows the secret. Takes equally long for every wrong value."""
    expected = make_proof(secret, role, first_nonce, other_nonce)
    return isinstance(value, str) and hmac.compare_digest(value.encode(errors="replace"), expected.encode())


def is_nonce(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


MAX_CANDIDATES = 64
"""Connections that have not introduced themselves; one more closes the oldest. An introduction takes milliseconds."""
INTRODUCTION_SECONDS = 10.0
"""Time for a connection to introduce itself."""
CONNECT_SECONDS, ANSWER_SECONDS = 5.0, 30.0
"""Timeouts of another machine: to connect, and for the first machine's answer, which may still be loading its job."""
_POLL_SECONDS = 0.05


@dataclass
class _Candidate:
    connection: Connection
    nonce: str
    deadline: float
    is_proved: bool = False


STARTED_AGAIN = "the run was started again on the first machine; this launcher is of the earlier start and leaves"


def refuse_connection(connection: Connection, text: str) -> None:
    connection.send({"kind": "leave", "code": REFUSED, "text": text})
    connection.close()


class Admission:
    """The first machine's listening socket, and the connections that have not introduced themselves yet."""

    def __init__(self, nodes: Nodes, key: bytes | None = None) -> None:
        self.listener = listen(nodes, nodes.port)
        self.key = key
        """The secret. Until it is known, connections are accepted and not answered."""
        self.candidates: list[_Candidate] = []
        self.num_strangers = 0
        """Connections that could not prove that they belong to the run."""

    @property
    def sockets(self) -> list[socket.socket]:
        return [
            self.listener,
            *(candidate.connection.sock for candidate in self.candidates if candidate.connection.is_open),
        ]

    def poll(self) -> list[tuple[Connection, Message]]:
        """Return the connections that have introduced themselves since the last call, with their "here"."""
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
            if not select.select([self.listener], [], [], 0)[0]:
                return
            try:
                connection = Connection(self.listener.accept()[0], MAX_GREETING_BYTES)
            except OSError:  # the peer has disconnected again
                continue
            candidate = _Candidate(connection, new_nonce(), time.monotonic() + INTRODUCTION_SECONDS)
            if self.key is not None:
                connection.send({"kind": "challenge", "nonce": candidate.nonce})
            self.candidates.append(candidate)
            while len(self.candidates) > MAX_CANDIDATES:
                self.candidates.pop(0).connection.close()

    def _receive_introduction(self, candidate: _Candidate) -> Message | None:
        """Return the candidate's "here" message if it has proved that it belongs to the run."""
        messages = candidate.connection.receive()
        if messages and not candidate.is_proved:
            if not self._check_proof(candidate, messages.pop(0)):
                self.num_strangers += 1
                candidate.connection.send({"kind": "stranger"})
                candidate.connection.close()
                return None
            candidate.is_proved, candidate.connection.max_bytes = True, MAX_MESSAGE_BYTES
        if not messages:
            return None
        candidate.connection.put_back(messages[1:])
        if messages[0]["kind"] == "here":
            return messages[0]
        candidate.connection.close()
        return None

    def _check_proof(self, candidate: _Candidate, message: Message) -> bool:
        nonce, proof = str(message.get("nonce")), str(message.get("proof"))
        if self.key is None or message["kind"] != "proof" or not is_nonce(nonce):
            return False
        if not is_proof(proof, self.key, "other machine", candidate.nonce, nonce):
            return False
        candidate.connection.send(
            {"kind": "welcome", "proof": make_proof(self.key, "first machine", candidate.nonce, nonce)}
        )
        return True

    def refuse_all(self, code: int) -> int:
        """Tell all waiting machines that there is no run, and which exit code to use. Return how many there were."""
        self._accept()
        for candidate in self.candidates:
            candidate.connection.send({"kind": "refuse", "code": code})
            candidate.connection.close()
        count = len(self.candidates)
        self.candidates.clear()
        return count

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


def connect(nodes: Nodes, secret_file: Path, queue: SignalQueue, may_refuse: bool) -> Connection | int:
    """Reach the first machine and prove that this one belongs to the run; return the connection, or the number of a
    signal that ended the wait. Raises `CoordinatorUnreachable`.

    `may_refuse`: accept an order to end the run without a proof, because a first machine that refuses its job has not
    written a secret yet. Its order is then the next message.
    """
    sock = _open(nodes, queue)
    if isinstance(sock, int):
        return sock
    connection = Connection(sock, MAX_GREETING_BYTES)
    try:
        number = _authenticate(connection, secret_file, queue, may_refuse)
    except BaseException:
        connection.close()
        raise
    if number is not None:
        connection.close()
        return number
    connection.max_bytes = MAX_MESSAGE_BYTES
    return connection


def _open(nodes: Nodes, queue: SignalQueue) -> socket.socket | int:
    """Return a connection to the first machine.

    Signals are checked while it connects, which takes seconds if nothing responds.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(nodes.head, nodes.port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind)
    except OSError as error:
        raise CoordinatorUnreachable(error.strerror or str(error)) from None
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


def _authenticate(connection: Connection, secret_file: Path, queue: SignalQueue, may_refuse: bool) -> int | None:
    """Do the other machine's part of the authentication; return the number of a signal that interrupted it."""
    key, first_nonce, nonce = None, "", new_nonce()
    deadline = time.monotonic() + ANSWER_SECONDS
    while connection.is_open and time.monotonic() < deadline:
        for number in queue.wait(_POLL_SECONDS, [connection.sock]):
            return number
        messages = connection.receive()
        for index, message in enumerate(messages):
            kind = message["kind"]
            if kind == "challenge" and key is None and is_nonce(message.get("nonce")):
                key, first_nonce = read_secret(secret_file), message["nonce"]
                if key is None:
                    raise CoordinatorUnreachable(f"{secret_file} is not there on this machine", foreign=True)
                answer = make_proof(key, "other machine", first_nonce, nonce)
                connection.send({"kind": "proof", "nonce": nonce, "proof": answer})
            elif kind == "welcome" and key is not None:
                if not is_proof(message.get("proof"), key, "first machine", first_nonce, nonce):
                    raise CoordinatorUnreachable(f"it does not know {secret_file} of this machine", foreign=True)
                connection.put_back(messages[index + 1 :])
                return None
            elif kind == "stranger":
                raise CoordinatorUnreachable(f"it does not know {secret_file} of this machine", foreign=True)
            elif kind == "refuse" and may_refuse:
                code = message.get("code")
                connection.put_back([{"kind": "leave", "code": code if code in range(1, 256) else CRASHED}])
                return None
    raise CoordinatorUnreachable("it does not answer" if connection.is_open else "the connection was closed")
