"""A connection between two launchers: one JSON object per line, and after the greeting each line has a seal.

A seal is an HMAC over the line and the number of lines before it, with a key of this connection and this direction. So
a line that a man in the middle has changed, added, left out, repeated, moved, sent back or taken from another
connection has no valid seal. It closes the connection, as any malformed line does, with a line that says so; then both
launchers do what they do when the network fails. Both also send a line every few seconds: what is held back or left out
is noticed soon, and an end that is silent for long counts as gone.
"""

import hashlib
import hmac
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torchtitan.launcher.hangs import AwakeClock
from torchtitan.launcher.messages import Alive, Inbox, MalformedLine, Message, dump_message
from torchtitan.process.run_log import print_error

SEND_SECONDS = 30.0
SILENT_SECONDS = 30
"""The kernel closes a connection if the other end acknowledges nothing for this long."""
ALIVE_SECONDS = 5.0
"""A launcher that has sent nothing for this long sends that it is alive."""
DEAD_SECONDS = 360.0
"""A launcher that sends nothing for this long is taken for gone, although its machine acknowledges what it is sent: it
is stopped, or something on the way keeps its lines. Ranks that cannot be killed yet may keep a launcher for minutes.
"""
_SEAL_CHARACTERS = 64
_TCP_OPTIONS = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 4,
    # keepalive probes stop while sent data wait for an acknowledgement, which TCP alone would await for 15 minutes
    "TCP_USER_TIMEOUT": 1000 * SILENT_SECONDS,
}


class Seal:
    """Computes the seals of the lines of one direction, in their order."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def next(self, content: bytes) -> bytes:
        self._count += 1
        return hmac.new(self._key, self._count.to_bytes(8, "big") + content, hashlib.sha256).hexdigest().encode()


class Connection:
    """Sends and receives messages over a TCP connection; none once it is closed.

    `inbox`: the messages that the other end may send. `report` gets a line about whatever is wrong with them.
    """

    def __init__(self, sock: socket.socket, inbox: Inbox, report: Callable[[str], None] = print_error) -> None:
        self.sock, self.inbox, self.is_open = sock, inbox, True
        self.name = _peer_name(sock)
        """The other end, in messages."""
        self.problem = ""
        """What was wrong with its messages, if it was closed for that."""
        self._report = report
        self._unread = bytearray()
        self._searched = 0
        """Number of unread bytes that have no end of a line."""
        self._put_back: list[Any] = []
        self._seals: tuple[Seal, Seal] | None = None
        """Of what is sent and of what is received."""
        self._sent_at = self._heard_at = time.monotonic()
        self._clock = AwakeClock()
        """Time in which this launcher was stopped is no silence of the other one, which was perhaps stopped with it."""
        sock.settimeout(SEND_SECONDS)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _TCP_OPTIONS.items():
            if hasattr(socket, name):  # a machine that loses power or network never closes its end
                with suppress(OSError):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def seal(self, sending_key: bytes, receiving_key: bytes, inbox: Inbox) -> None:
        """Seal all lines from now on, in both directions, and expect the messages of `inbox`."""
        self._seals, self.inbox = (Seal(sending_key), Seal(receiving_key)), inbox

    def trust(self, name: str, inbox: Inbox) -> None:
        """Name the other end, which has proved what it is, and expect the messages of `inbox`."""
        self.name, self.inbox, self._report = name, inbox, print_error

    def send(self, message: Message) -> None:
        if not self.is_open:
            return
        content = dump_message(message)
        line = content if self._seals is None else self._seals[0].next(content) + content
        try:
            self.sock.sendall(line + b"\n")
            self._sent_at = time.monotonic()
        except OSError:
            self.close()

    def receive(self, limit: int | None = None) -> list[Any]:
        """Return the messages that have arrived, without waiting for more. Lines beyond `limit` are left for the next
        call, which may expect other ones.
        """
        messages, self._put_back = self._put_back, []
        self._clock.tick()
        self._read()
        while (limit is None or len(messages) < limit) and (line := self._next_line()) is not None:
            message = self._open(line)
            if message is not None and not isinstance(message, Alive):
                messages.append(message)
        self._stay_alive()
        return messages

    @property
    def _longest(self) -> int:
        """Return the number of bytes of the longest line that the other end may send."""
        return self.inbox.max_bytes + (_SEAL_CHARACTERS if self._seals is not None else 0)

    def _read(self) -> None:
        while self.is_open and len(self._unread) <= self._longest:
            if not select.select([self.sock], [], [], 0)[0]:
                return
            try:
                data = self.sock.recv(min(1 << 20, self._longest + 1))
            except OSError:
                data = b""
            self._unread += data
            if not data:
                self.close()

    def _next_line(self) -> bytes | None:
        end = self._unread.find(b"\n", self._searched)
        self._searched = len(self._unread) if end < 0 else 0
        if (end if end >= 0 else len(self._unread)) > self._longest:
            self._refuse(f"a line of more than {self.inbox.max_bytes} bytes")
            return None
        if end < 0:
            return None
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        return line

    def _open(self, line: bytes) -> Any | None:
        """Return the message in a line; None, and close the connection, if it is none that the other end may send."""
        if self._seals is not None:
            seal, line = line[:_SEAL_CHARACTERS], line[_SEAL_CHARACTERS:]
            if not hmac.compare_digest(seal, self._seals[1].next(line)):
                self._refuse(
                    "a line that its launcher did not send, or not as the next one; is the network between the "
                    "machines theirs alone?"
                )
                return None
        try:
            message = self.inbox.parse(line)
        except MalformedLine as error:
            self._refuse(f"a line that is none of a launcher's ({error})")
            return None
        self._heard_at = time.monotonic()
        return message

    def _stay_alive(self) -> None:
        if self._seals is None or not self.is_open:
            return
        now = time.monotonic()
        if now - self._sent_at > ALIVE_SECONDS:
            self.send(Alive())
        if (silence := self._clock.seconds(self._heard_at, now)) > DEAD_SECONDS:
            self._refuse(f"nothing for {silence:.0f} s")

    def _refuse(self, text: str) -> None:
        self.problem = text
        self._report(f"{self.name} sent {text}; the connection is closed")
        self._unread.clear()
        self._searched = 0
        self.close()

    def put_back(self, messages: list[Any]) -> None:
        """Return these messages first at the next `receive`."""
        self._put_back = messages + self._put_back

    def close(self) -> None:
        self.is_open = False
        self.sock.close()


def _peer_name(sock: socket.socket) -> str:
    try:
        host, port, *_ = sock.getpeername()
    except (OSError, ValueError):  # it has gone again, or is a socket of this machine
        return "a connection"
    return f"{host}, port {port},"
