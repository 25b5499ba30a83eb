"""Messages between launchers over a TCP connection: one JSON object per line. Nothing in it is executed."""

import json
import select
import socket
from contextlib import suppress
from typing import Any

Message = dict[str, Any]

LONGEST_MESSAGE = 1 << 27
"""Largest message in bytes. After a hang a machine sends the flight recorder's log of each of its ranks."""
LONGEST_GREETING = 1 << 12
"""Largest amount of data, in bytes, from the other end before it has proved that it belongs to the run."""
SEND_SECONDS = 30.0
SILENT_SECONDS = 30
"""The kernel closes a connection if the other end acknowledges nothing for this long."""
_TCP_OPTIONS = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 4,
    # keepalive probes stop while sent data wait for an acknowledgement, which TCP alone would await for 15 minutes
    "TCP_USER_TIMEOUT": 1000 * SILENT_SECONDS,
}


class Line:
    """Sends and receives messages over a TCP connection; none once it is closed. `longest`: bytes per message."""

    def __init__(self, connection: socket.socket, longest: int = LONGEST_MESSAGE) -> None:
        self.connection, self.longest, self.open = connection, longest, True
        self._unread = b""
        self._put_back: list[Message] = []
        connection.settimeout(SEND_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _TCP_OPTIONS.items():
            if hasattr(socket, name):  # a machine that loses power or network never closes its end
                with suppress(OSError):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: Message) -> None:
        if not self.open:
            return
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.close()

    def receive(self) -> list[Message]:
        """Return the messages that have arrived, without waiting for more."""
        put_back, self._put_back = self._put_back, []
        while self.open and select.select([self.connection], [], [], 0)[0]:
            try:
                data = self.connection.recv(min(1 << 20, self.longest + 1))
            except OSError:
                data = b""
            self._unread += data
            if not data or len(self._unread) > self.longest:
                self.close()
        if len(self._unread) > self.longest:
            self._unread = b""
        *lines, self._unread = self._unread.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):  # deep nesting is a RecursionError
            messages = [None]
        if not all(isinstance(message, dict) and isinstance(message.get("kind"), str) for message in messages):
            self.close()  # the other end is not a launcher
            return []
        return put_back + messages

    def put_back(self, messages: list[Message]) -> None:
        """Return these messages first at the next `receive`."""
        self._put_back = messages

    def close(self) -> None:
        self.open = False
        self.connection.close()
