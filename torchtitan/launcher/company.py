"""The launchers of several machines as one: the first decides, the others tell it how they fare and do as it says.

They speak over a connection each, a line of JSON a message, of which nothing is executed. Who is connected is at work:
a connection that ends is a machine that is gone. On one machine the first has nobody to speak to.
"""

import json
import select
import socket
import time
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from torchtitan.errors import JobError
from torchtitan.launcher.ends import End, read_end
from torchtitan.launcher.hangs import folder_name
from torchtitan.launcher.nodes import Nodes, listen
from torchtitan.launcher.stops import SignalQueue
from torchtitan.leaving import CRASHED, REFUSED, TERMINATED
from torchtitan.ranks import Restart

Message = dict[str, Any]

LONGEST_MESSAGE = 1 << 27
"""Bytes: of a hang, a machine tells what each rank's flight recorder has kept."""
SEND_SECONDS = 30.0
LATE_SECONDS = 5.0
"""For how long the first machine waits for others only to tell them that nothing was started."""
QUIET_SECONDS = 360.0
"""Longest that machines wait for each other at the end of a start: longer than any waits for its own ranks."""
FRESH_SECONDS = 10.0
"""How long a machine's word that none of its ranks gets on holds. It is given anew at every look, of some seconds."""
_LOOK_SECONDS = 0.5
_HOST = socket.gethostname()


class Line:
    """Messages over a connection. What comes after its end is nothing."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.open = connection, True
        self._unread = b""
        self._put_back: list[Message] = []
        connection.settimeout(SEND_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):  # a machine that loses its power says no farewell
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
        """What has come, without waiting for more."""
        before, self._put_back = self._put_back, []
        while self.open and select.select([self.connection], [], [], 0)[0]:
            try:
                got = self.connection.recv(1 << 20)
            except OSError:
                got = b""
            self._unread += got
            if not got or len(self._unread) > LONGEST_MESSAGE:
                self.close()
        *lines, self._unread = self._unread.split(b"\n")
        try:
            found = [json.loads(line) for line in lines]
        except ValueError:
            found = [None]
        if not all(isinstance(message, dict) and isinstance(message.get("kind"), str) for message in found):
            self.close()  # whoever this is speaks another language
            return []
        return before + found

    def put_back(self, messages: list[Message]) -> None:
        """What has come too early comes again, before all else."""
        self._put_back = messages

    def close(self) -> None:
        self.open = False
        self.connection.close()


class First:
    """On the first machine, and on the only one."""

    def __init__(self, nodes: Nodes | None = None, num_ranks: int = 1) -> None:
        self.nodes, self.num_ranks = nodes or Nodes(), num_ranks
        self.lines: dict[int, Line] = {}
        self.hosts = {0: _HOST}
        self._listener = listen(self.nodes, self.nodes.port) if self.nodes.count > 1 else None
        self._strangers: list[Line] = []
        self._orders: list[Message] = []
        """What this machine has been told, by itself or by others, and has not looked at."""
        self._ends: list[End] = []
        self._ended: set[int] = set()
        self._lost: set[int] = set()
        self._standing: dict[int, float] = {}
        """Machine -> when it last said that none of its ranks gets on."""
        self._collected = False

    @property
    def sockets(self) -> list[socket.socket]:
        mine = [self._listener] if self._listener is not None else []
        lines = [*self.lines.values(), *self._strangers]
        return mine + [line.connection for line in lines if line.open]

    @property
    def gone(self) -> list[str]:
        """Machines whose launcher has ended before its time."""
        return [f"machine {index} ({self.hosts[index]})" for index in sorted(self._lost)]

    # All machines come together

    def meet(self, queue: SignalQueue, seconds: float) -> int | None:
        """Wait for all launchers; the number of a signal, here or there, that ended the wait. Raises `JobError` if some
        do not come, cannot take part or are gone again."""
        until = time.monotonic() + seconds
        while len(self.hosts) < self.nodes.count:
            left = until - time.monotonic()
            if left <= 0:
                missing = sorted(set(range(self.nodes.count)) - set(self.hosts))
                here = ", ".join(f"{index} ({host})" for index, host in sorted(self.hosts.items()))
                raise JobError(
                    f"NNODES: given {self.nodes.count}, of which {', '.join(map(str, missing))} did not come within "
                    f"{seconds:.0f} s to {self.nodes.head}, port {self.nodes.port} (comm.init_timeout_seconds); here: "
                    f"{here}; allowed: as many, with the same HEAD_ADDR and HEAD_PORT and each its NODE_RANK; start "
                    "them, and let them through the firewall"
                )
            for number in queue.wait(min(left, _LOOK_SECONDS), self.sockets):
                return number
            self._greet()
            for message in self.look():
                if message["kind"] == "stop":
                    return message["number"]
            if self._lost:
                raise JobError(f"{', '.join(self.gone)} gone before all had come; start all machines again")
        self._close_door()
        return None

    def _greet(self) -> None:
        if self._listener is not None and select.select([self._listener], [], [], 0)[0]:
            with suppress(OSError):
                self._strangers.append(Line(self._listener.accept()[0]))
        for line in list(self._strangers):
            if messages := line.receive():
                line.put_back(messages[1:])
                self._strangers.remove(line)
                self._admit(line, messages[0])
            if not line.open and line in self._strangers:
                self._strangers.remove(line)

    def _admit(self, line: Line, message: Message) -> None:
        index, host, ranks = message.get("index"), message.get("host"), message.get("ranks")
        if message["kind"] != "here" or not isinstance(index, int) or not 0 < index < self.nodes.count:
            line.close()
            return
        if index in self.hosts:
            told = f"NODE_RANK: given {index} on both {self.hosts[index]} and {host}; allowed: on each machine another"
            line.send({"kind": "leave", "code": REFUSED, "text": told})
            raise JobError(told)
        self.lines[index], self.hosts[index] = line, str(host)
        if message.get("refused"):
            raise JobError(f"machine {index} ({host}) refuses the job:\n{message['refused']}")
        if (ranks, message.get("count")) != (self.num_ranks, self.nodes.count):
            raise JobError(
                f"NGPU, NNODES: given {ranks}, {message.get('count')} on machine {index} ({host}) and "
                f"{self.num_ranks}, {self.nodes.count} on the first ({_HOST}); allowed: the same on all"
            )

    def _close_door(self) -> None:
        for line in self._strangers:
            line.close()
        self._strangers.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # While ranks are at work

    def begin(self, restart: Restart | None) -> tuple[Nodes, socket.socket | None]:
        """All machines start their ranks. The store by which these find each other has a socket of its own each time,
        so that none waits for what is left of the one before."""
        self._orders, self._standing, self._collected = [], {}, False
        if self.nodes.count == 1:
            return self.nodes, None
        listener = listen(self.nodes, 0)
        nodes = replace(self.nodes, port=listener.getsockname()[1])
        self._to_all({"kind": "start", "port": nodes.port, "restart": asdict(restart) if restart else None})
        return nodes, listener

    def tell(self, kind: str, **more: Any) -> None:
        """What happened on this machine and concerns all: stop (number), failed; hung (seconds), at every look."""
        self._heed({"kind": kind, **more}, 0)

    def look(self) -> list[Message]:
        """What this machine is to do: stop (number), follow, collect (name, seconds)."""
        self._listen()
        orders, self._orders = self._orders, []
        return orders

    def _listen(self) -> None:
        for index, line in self.lines.items():
            for message in line.receive():
                self._heed(message, index)
            if not line.open and index not in self._lost:
                self._lost.add(index)
                cause = f"machine {index} ({self.hosts[index]}) is gone"
                if index not in self._ended:
                    self._end_of(index, End(CRASHED, cause, index * self.num_ranks, by_signal=True))

    def _heed(self, message: Message, index: int) -> None:
        kind = message["kind"]
        if kind == "stop":
            self._to_all(message, but=index)
        elif kind == "failed":
            self._to_all({"kind": "follow"}, but=index)
        elif kind == "hung":
            self._standing[index] = time.monotonic()
            if not self._collected and self._all_stand():
                self._collected = True
                order = {"kind": "collect", "name": folder_name(), "seconds": message["seconds"]}
                self._to_all(order)
                self._orders.append(order)
        elif kind == "end" and index not in self._ended:
            self._end_of(index, read_end({name: message[name] for name in message if name != "kind"}))

    def _all_stand(self) -> bool:
        """Whether no machine gets on. Where the ranks of one wait, those of another may be at work: exporting, or
        compiling for longer than it takes others."""
        fresh = {index for index, at in self._standing.items() if time.monotonic() - at < FRESH_SECONDS}
        return fresh | self._ended == set(range(self.nodes.count))

    def _end_of(self, index: int, end: End) -> None:
        self._ended.add(index)
        self._ends.append(end)
        if not end.done:
            self._to_all({"kind": "follow"}, but=index)

    def _to_all(self, message: Message, but: int | None = None) -> None:
        for index, line in self.lines.items():
            if index != but:
                line.send(message)
        if but not in (0, None):  # it came from another machine, so it is news here
            self._orders.append(message)

    def gather(self, own: End, queue: SignalQueue) -> list[End]:
        """How this start ended on all machines, in the order in which they told it. A stop that is heard on the way is
        for who looks next."""
        self._listen()
        self._end_of(0, own)
        until = time.monotonic() + QUIET_SECONDS
        while len(self._ended) < self.nodes.count and time.monotonic() < until:
            for number in queue.wait(_LOOK_SECONDS, self.sockets):
                self.tell("stop", number=number)
                self._orders.append({"kind": "stop", "number": number})
            self._listen()
        for index in set(range(self.nodes.count)) - self._ended:
            self.lines[index].close()
        self._listen()
        ends, self._ends, self._ended = self._ends, [], set()
        return ends

    def dismiss(self, code: int) -> None:
        """The run is over, on all machines with the same exit code. Those that have not come yet are waited for a
        moment, so that they need not wait for long."""
        until = time.monotonic() + LATE_SECONDS
        while self._listener is not None and len(self.hosts) < self.nodes.count and time.monotonic() < until:
            select.select(self.sockets, [], [], _LOOK_SECONDS)
            with suppress(JobError):
                self._greet()
        self._close_door()
        for line in self.lines.values():
            line.send({"kind": "leave", "code": code})
            line.close()


class Other:
    """On every other machine."""

    def __init__(self, nodes: Nodes, num_ranks: int) -> None:
        self.nodes, self.num_ranks = nodes, num_ranks
        self.line: Line | None = None

    @property
    def sockets(self) -> list[socket.socket]:
        return [self.line.connection] if self.line is not None and self.line.open else []

    def meet(self, queue: SignalQueue, seconds: float, refused: str = "") -> int | None:
        """Find the first machine, which may be started later; the number of a signal that ended the wait. `refused` is
        what this machine has against the job. Raises `JobError` if nobody is there."""
        until = time.monotonic() + seconds
        while self.line is None:
            try:
                self.line = Line(socket.create_connection((self.nodes.head, self.nodes.port), timeout=5))
            except OSError as error:
                if time.monotonic() > until:
                    raise JobError(
                        f"HEAD_ADDR, HEAD_PORT: given {self.nodes.head}, {self.nodes.port}, where no launcher answers "
                        f"within {seconds:.0f} s ({error.strerror or error}); allowed: those of the machine with "
                        "NODE_RANK = 0, alike everywhere; start all machines together"
                    ) from None
                for number in queue.wait(_LOOK_SECONDS):
                    return number
        self.tell(
            "here", index=self.nodes.index, count=self.nodes.count, host=_HOST, ranks=self.num_ranks, refused=refused
        )
        return None

    def tell(self, kind: str, **more: Any) -> None:
        if self.line is not None:
            self.line.send({"kind": kind, **more})

    def look(self) -> list[Message]:
        if self.line is None:
            return []
        orders = self.line.receive()
        return orders if self.line.open else [*orders, {"kind": "follow"}]

    def next_order(self, queue: SignalQueue, patience: float | None = None) -> Message:
        """The first machine's word on what comes now: start (port, restart) or leave (code)."""
        began, asked = time.monotonic(), 0
        while True:
            for number in queue.wait(_LOOK_SECONDS, self.sockets):
                asked = asked or number
                self.tell("stop", number=number)
            orders = self.look()
            for place, order in enumerate(orders):
                if order["kind"] in ("start", "leave"):
                    assert self.line is not None
                    crossed = [{"kind": "stop", "number": asked}] if asked else []  # a start that it has met on its way
                    self.line.put_back(crossed + orders[place + 1 :])
                    return order
            if not self.sockets:
                text = f"the first machine ({self.nodes.head}) is gone"
                return {"kind": "leave", "code": 128 + asked if asked else CRASHED, "text": text}
            if patience is not None and time.monotonic() - began > patience:
                text = f"the first machine ({self.nodes.head}) has not answered for {patience:.0f} s"
                return {"kind": "leave", "code": TERMINATED if asked else CRASHED, "text": text}
