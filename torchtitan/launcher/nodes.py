"""Run several machines as one world: a launcher on each, and all ranks in one torch store.

Launchers and the store listen on HEAD_ADDR only. gloo and NCCL use the interface on the route to that address.
Launchers authenticate each other (admission.py), but store, gloo and NCCL do not, so the network has to be trusted.
They send each other messages over TCP, one JSON object per line. Nothing in a message is executed.
"""

import fcntl
import json
import select
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.process.ranks import set_default

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, all with the same number of ranks, and the index of this one."""

    count: int = 1
    index: int = 0
    head: str = ""
    """The first machine's address."""
    port: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise JobError(f"NNODES: given {self.count}; allowed: 1 or more; leave it out for one machine")
        if self.count > 1 and not 0 < self.port < 1 << 16:
            raise JobError(f"HEAD_PORT: given {self.port}; allowed: 1 to 65535, on all machines the same")
        if self.index >= self.count:
            raise JobError(
                f"NODE_RANK: given {self.index}, of NNODES = {self.count} machines; allowed: 0 to {self.count - 1}, on "
                "each machine another"
            )
        if self.count > 1 and not self.head:
            raise JobError(
                f"HEAD_ADDR: not given, with NNODES = {self.count} machines; allowed: the address of the machine with "
                "NODE_RANK = 0, on the network that the machines trust; e.g. HEAD_ADDR=10.0.0.1"
            )


def listen(nodes: Nodes, port: int) -> socket.socket:
    """Return a listening socket on the first machine, bound to the head's address only; port 0 picks a free one."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(nodes.head, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        raise JobError(
            f"HEAD_ADDR, HEAD_PORT: given {nodes.head}, {nodes.port}, where this machine cannot listen "
            f"({error.strerror}); allowed: an address of this machine, which has NODE_RANK = 0, and a free port"
        ) from None
    return listener


def use_head_interface(nodes: Nodes) -> None:
    """Make gloo and NCCL use the interface on this machine's route to the head, unless the user has set one."""
    name = interface_of(local_address(nodes))
    if name is not None:
        for library in ("GLOO", "NCCL"):
            set_default(f"{library}_SOCKET_IFNAME", name)


def local_address(nodes: Nodes) -> str:
    """Return this machine's address on the route to the head. Sends nothing."""
    try:
        family, _, _, _, address = socket.getaddrinfo(nodes.head, nodes.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError as error:
        raise JobError(
            f"HEAD_ADDR: given {nodes.head!r}, to which no way is known ({error.strerror}); allowed: the address of "
            "the machine with NODE_RANK = 0, as this machine reaches it"
        ) from None


def interface_of(address: str) -> str | None:
    """Return the network interface with this local address; None if it cannot be determined."""
    if sys.platform != "linux":
        return None
    if ip_address(address).version == 6:
        return _interface_of_ipv6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _interface_of_ipv6(address: str, table: Path = Path("/proc/net/if_inet6")) -> str | None:
    """Find the interface in the kernel's table, which has a line per address: 32 hexadecimal digits, four numbers, the
    name. A link-local address such as fe80::1%eth0 names its interface itself.
    """
    bare_address, _, scope = address.partition("%")
    if scope:
        return scope
    lines = (line.split() for line in table.read_text().splitlines()) if table.exists() else ()
    return next((fields[-1] for fields in lines if int(fields[0], 16) == int(ip_address(bare_address))), None)


# Messages between launchers

Message = dict[str, Any]

MAX_MESSAGE_BYTES = 1 << 27
"""Largest message in bytes. After a hang a machine sends the flight recorder's log of each of its ranks."""
MAX_GREETING_BYTES = 1 << 12
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


class Connection:
    """Sends and receives messages over a TCP connection; none once it is closed. `longest`: bytes per message."""

    def __init__(self, connection: socket.socket, longest: int = MAX_MESSAGE_BYTES) -> None:
        self.sock, self.max_bytes, self.is_open = connection, longest, True
        self._unread = b""
        self._put_back: list[Message] = []
        connection.settimeout(SEND_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _TCP_OPTIONS.items():
            if hasattr(socket, name):  # a machine that loses power or network never closes its end
                with suppress(OSError):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: Message) -> None:
        if not self.is_open:
            return
        try:
            self.sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.close()

    def receive(self) -> list[Message]:
        """Return the messages that have arrived, without waiting for more."""
        put_back, self._put_back = self._put_back, []
        while self.is_open and select.select([self.sock], [], [], 0)[0]:
            try:
                data = self.sock.recv(min(1 << 20, self.max_bytes + 1))
            except OSError:
                data = b""
            self._unread += data
            if not data or len(self._unread) > self.max_bytes:
                self.close()
        if len(self._unread) > self.max_bytes:
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
        self.is_open = False
        self.sock.close()
