"""Lines between launchers: their length, their depth, and an end that is silent."""

import socket

from torchtitan.launcher.connection import Connection
from torchtitan.launcher.messages import (
    EVENTS,
    Hung,
    Inbox,
)


def test_a_line_that_never_ends_closes_its_connection():
    local, remote = socket.socketpair()
    lines: list[str] = []
    line = Connection(local, Inbox((Hung,), 1000), lines.append)
    remote.sendall(b"x" * 2000)
    assert line.receive() == [] and not line.is_open
    assert lines == ["a connection sent a line of more than 1000 bytes; the connection is closed"]


def test_a_deeply_nested_message_ends_its_connection_and_nothing_else():
    local, remote = socket.socketpair(socket.AF_UNIX)
    line = Connection(local, EVENTS)
    remote.sendall(b"[" * 100_000 + b"\n")
    assert line.receive() == [] and not line.is_open


def test_a_connection_whose_other_end_is_silent_is_closed_by_the_kernel():
    """TCP_USER_TIMEOUT covers unacknowledged data, for which keepalive alone does not end the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        line = Connection(socket.create_connection(listener.getsockname()), EVENTS)
        options = (socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE)
        assert [line.sock.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [30_000, 10]
        line.close()
