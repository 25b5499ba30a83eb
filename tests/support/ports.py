"""Ports that nobody listens on."""

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """Return a free port below Linux's range of ephemeral ports, so no other connection gets it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)  # parallel test workers get different ones
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
