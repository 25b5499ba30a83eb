"""The network interface over which ranks communicate. Needs no torch.

gloo opens one in every rank, also in a run on one machine and in one of a single rank. Without an address of it gloo's
error reads like that of a lost connection.
"""

import os
import socket
import struct
import sys
from pathlib import Path

from torchtitan.core.errors import JobError
from torchtitan.process.ranks import set_default

LOOPBACK = "lo"
_SIOCGIFADDR = 0x8915


def require_interfaces() -> None:
    """Raise `JobError` if an interface that gloo will use has no address: those of GLOO_SOCKET_IFNAME, or loopback."""
    if sys.platform != "linux":
        return
    value = os.environ.get("GLOO_SOCKET_IFNAME", "")
    names = (value or LOOPBACK).split(",")
    usable = [name for _, name in socket.if_nameindex() if ipv4_of(name) or any(ipv6_rows(name))]
    for name in names:
        if name in usable:
            continue
        if not value:
            raise JobError(
                f"network: the loopback interface ({name}) has no address, and ranks communicate over it; allowed: a "
                f"machine or container where it is up (ip link set {name} up), or GLOO_SOCKET_IFNAME for another one"
            )
        raise JobError(
            f"GLOO_SOCKET_IFNAME: given {name!r}, which is no interface with an address here; allowed: "
            f"{', '.join(usable) or 'none, as no interface has one'}; or leave it out"
        )


def use_loopback() -> None:
    """Make gloo and NCCL communicate over loopback, unless the user has named an interface: one machine needs no
    network."""
    if sys.platform == "linux":
        for library in ("GLOO", "NCCL"):
            set_default(f"{library}_SOCKET_IFNAME", LOOPBACK)


def ipv4_of(name: str) -> str | None:
    """Return the IPv4 address of an interface; None if it has none."""
    import fcntl  # missing on Windows

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def ipv6_rows(name: str | None = None, table: Path = Path("/proc/net/if_inet6")) -> list[tuple[int, str]]:
    """Return the IPv6 addresses, as numbers, and their interfaces, all or those of one interface: from the kernel's
    table, which has a line per address: 32 hexadecimal digits, four numbers, the name.
    """
    lines = (line.split() for line in table.read_text().splitlines()) if table.exists() else ()
    return [(int(fields[0], 16), fields[-1]) for fields in lines if name in (None, fields[-1])]
