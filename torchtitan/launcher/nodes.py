"""Run several machines as one world: a launcher on each, and all ranks in one torch store.

Launchers and the store listen on HEAD_ADDR only. gloo and NCCL use the interface on the route to that address.
Launchers authenticate each other (admission.py, connection.py), but store, gloo and NCCL do not, so the network has to
be trusted.
"""

import socket
import sys
from dataclasses import dataclass
from ipaddress import ip_address

from torchtitan.core.errors import JobError
from torchtitan.process.ranks import ipv4_of, ipv6_rows, require_interfaces, set_default


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
    except (OSError, UnicodeError) as error:
        raise JobError(
            f"HEAD_ADDR, HEAD_PORT: given {nodes.head}, {nodes.port}, where this machine cannot listen "
            f"({describe_failure(error)}); allowed: an address of this machine, which has NODE_RANK = 0, and a free "
            "port"
        ) from None
    return listener


def describe_failure(error: OSError | UnicodeError) -> str:
    """Describe a failure to use a host's name; one that no name can be, such as "a..b", is a UnicodeError."""
    return str(error.strerror if isinstance(error, OSError) else error)


def use_head_interface(nodes: Nodes) -> None:
    """Make gloo and NCCL use the interface on this machine's route to the head, unless the user has set one."""
    name = interface_of(local_address(nodes))
    if name is not None:
        for library in ("GLOO", "NCCL"):
            set_default(f"{library}_SOCKET_IFNAME", name)
        require_interfaces()


def local_address(nodes: Nodes) -> str:
    """Return this machine's address on the route to the head. Sends nothing."""
    try:
        family, _, _, _, address = socket.getaddrinfo(nodes.head, nodes.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except (OSError, UnicodeError) as error:
        raise JobError(
            f"HEAD_ADDR: given {nodes.head!r}, to which no way is known ({describe_failure(error)}); allowed: the "
            "address of the machine with NODE_RANK = 0, as this machine reaches it"
        ) from None


def interface_of(address: str) -> str | None:
    """Return the network interface with this local address; None if it cannot be determined."""
    if sys.platform != "linux":
        return None
    if ip_address(address).version == 4:
        return next((name for _, name in socket.if_nameindex() if ipv4_of(name) == address), None)
    bare_address, _, scope = address.partition("%")
    if scope:  # a link-local address such as fe80::1%eth0 names its interface itself
        return scope
    return next((name for number, name in ipv6_rows() if number == int(ip_address(bare_address))), None)
