"""A TCP proxy on loopback that simulates a network between two launchers, which a test can cut and repair, or a man in
the middle who changes their lines.
"""

import select
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

RESET_ON_CLOSE = struct.pack("ii", 1, 0)
MOST_CONNECTIONS = 200


class Proxy:
    """Forward connections from `port` to `target_port`, both on 127.0.0.1, while the network is whole.

    `change`: gets each line, with its end, and whether the caller sent it; returns what to send on, and what to send
    back.
    """

    def __init__(
        self, port: int, target_port: int, change: Callable[[bytes, bool], tuple[bytes, bytes]] | None = None
    ) -> None:
        self.port, self.target_port, self.change = port, target_port, change
        self._parts: dict[socket.socket, bytes] = {}
        """Lines that have not ended yet, by their sender."""
        self.accepted = 0
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._held: list[socket.socket] = []
        """Ends of cut connections that have not been told."""
        self._closed = threading.Event()
        self._listener: socket.socket | None = None
        self.heal()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def heal(self) -> None:
        """Accept new connections again; the reset ones stay closed."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen()
        with self._lock:
            self._listener = listener

    def cut(self, only_caller_sees: bool = False) -> None:
        """Reset all connections and accept no more. `only_caller_sees`: the other end notices at `reset_held`."""
        with self._lock:
            if self._listener is not None:
                self._listener.close()
                self._listener = None
            for caller, target in self._pairs:
                _reset(caller)
                if only_caller_sees:
                    self._held.append(target)
                else:
                    _reset(target)
            self._pairs.clear()

    def reset_held(self) -> None:
        """Reset the ends that `only_caller_sees` left open."""
        with self._lock:
            for end in self._held:
                _reset(end)
            self._held.clear()

    def close(self) -> None:
        self._closed.set()
        self.cut()
        self.reset_held()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._closed.wait(0.005) and self.accepted < MOST_CONNECTIONS:
            with self._lock, suppress(OSError, ValueError):
                if self._listener is not None and select.select([self._listener], [], [], 0)[0]:
                    self._accept(self._listener)
                for pair in list(self._pairs):
                    if not all([self._forward(*pair, True), self._forward(*pair[::-1], False)]):
                        self._pairs.remove(pair)
                        for end in pair:
                            _reset(end)

    def _accept(self, listener: socket.socket) -> None:
        caller, _ = listener.accept()
        self.accepted += 1
        try:
            self._pairs.append((caller, socket.create_connection(("127.0.0.1", self.target_port), timeout=5)))
        except OSError:
            _reset(caller)

    def _forward(self, source: socket.socket, sink: socket.socket, from_caller: bool) -> bool:
        """Pass on the data that have arrived; False at the end of the connection."""
        try:
            while select.select([source], [], [], 0)[0]:
                data = source.recv(1 << 16)
                if not data:
                    return False
                if self.change is None:
                    sink.sendall(data)
                    continue
                *lines, self._parts[source] = (self._parts.get(source, b"") + data).split(b"\n")
                for line in lines:
                    forwarded, returned = self.change(line + b"\n", from_caller)
                    sink.sendall(forwarded)
                    source.sendall(returned)
        except OSError:
            return False
        return True


def _reset(end: socket.socket) -> None:
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        end.close()
