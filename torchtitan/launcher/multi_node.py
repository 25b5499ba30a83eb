"""Coordinate the launchers of several machines: the first decides, the others report to it and follow its orders.

Each of the others has one connection to the first (nodes.py), on which both ends first prove that they belong to
the run (admission.py). A machine takes part while it is connected. A closed connection means that the machine is lost,
and it may reconnect. On a single machine there are no connections."""

import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.launcher import admission
from torchtitan.launcher.admission import Admission, CoordinatorUnreachable, connect, refuse_connection
from torchtitan.launcher.hangs import ExitReport, hang_folder_name, read_report
from torchtitan.launcher.nodes import Connection, Message, Nodes, listen
from torchtitan.launcher.processes import SignalQueue
from torchtitan.process.exit import CRASHED
from torchtitan.process.ranks import Restart

LATE_SECONDS = 5.0
"""Time that the first machine waits for others only to inform them that nothing was started."""
QUIET_SECONDS = 360.0
"""Longest wait of machines for each other at the end of a start: longer than any machine waits for its own ranks."""
FRESH_SECONDS = 10.0
"""Validity of a machine's report that its ranks are stuck. It is repeated at every poll, every few seconds."""
FOLDER_SECONDS = 75.0
"""Time until another machine sees the secret: NFS clients cache a folder's entries for up to 60 s."""
REPORT_SECONDS = 30.0
"""Interval between messages about machines that are waited for."""
_POLL_SECONDS = 0.5
_HOST = socket.gethostname()
Report = Callable[[str], None]


class Coordinator:
    """The coordinator, on the first machine or the only one."""

    def __init__(self, nodes: Nodes | None = None, num_ranks: int = 1) -> None:
        self.nodes, self.num_ranks = nodes or Nodes(), num_ranks
        self.connections: dict[int, Connection] = {}
        self.hosts = {0: _HOST}
        self.attempt = 0
        """Number of the newest start of the ranks. Messages about an older one are ignored."""
        self._admission = Admission(self.nodes) if self.nodes.count > 1 else None
        self._secret_file: Path | None = None
        self._key: bytes | None = None
        self._orders: list[Message] = []
        """Orders for this machine, from itself or others, that it has not processed."""
        self._exit_reports: list[ExitReport] = []
        self._ended_machines: set[int] = set()
        self._lost: set[int] = set()
        self._stuck_reports: dict[int, float] = {}
        """Machine -> when it last reported that its ranks are stuck."""
        self._collected = False

    @property
    def sockets(self) -> list[socket.socket]:
        sockets = self._admission.sockets if self._admission is not None else []
        return sockets + [connection.sock for connection in self.connections.values() if connection.is_open]

    @property
    def lost_machines(self) -> list[str]:
        """Machines with a launcher that is not reachable any more."""
        return [f"machine {index} ({self.hosts[index]})" for index in sorted(self._lost)]

    # Connecting all machines

    def wait_for_workers(self, queue: SignalQueue, seconds: float, secret_file: Path) -> int | None:
        """Wait for the other machines' launchers; return the signal, caught on any machine, that ended the wait. Write
        `secret_file` first. Raises JobError if a launcher does not connect, cannot take part or disconnects."""
        if self._admission is None:
            return None
        self._key = self._admission.key = admission.create_secret(secret_file)
        self._secret_file = secret_file
        deadline = time.monotonic() + seconds
        while len(self.hosts) < self.nodes.count:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise JobError(self._absence_message(seconds))
            for number in queue.wait(min(remaining, _POLL_SECONDS), self.sockets):
                return number
            for connection, message in self._admission.poll():
                if fault := self._admit(connection, message):
                    raise JobError(fault)
            for message in self.take_orders():
                if message["kind"] == "stop":
                    return message["number"]
            if self._lost:
                raise JobError(f"{', '.join(self.lost_machines)} gone before all had come; start all machines again")
        self._close_admission()
        return None

    def _absence_message(self, seconds: float) -> str:
        missing = sorted(set(range(self.nodes.count)) - set(self.hosts))
        present = ", ".join(f"{index} ({host})" for index, host in sorted(self.hosts.items()))
        num_strangers = self._admission.num_strangers if self._admission is not None else 0
        hint = (
            f"; {num_strangers} connections could not prove that they belong to this run: give a job.dump_folder that "
            "all machines share"
        )
        return (
            f"NNODES: given {self.nodes.count}, but {', '.join(map(str, missing))} did not connect to "
            f"{self.nodes.head}, port {self.nodes.port}, within {seconds:.0f} s (comm.init_timeout_seconds); here: "
            f"{present}; allowed: as many machines, with the same HEAD_ADDR and HEAD_PORT and each its NODE_RANK; "
            f"start them, and let them through the firewall{hint if num_strangers else ''}"
        )

    def _admit(self, connection: Connection, message: Message) -> str:
        """Register an authenticated machine, replacing its earlier connection, or close this one. Return the fault to
        report: "" for a machine of an earlier launch or with a wrong number."""
        index, host, ranks = message.get("index"), str(message.get("host")), message.get("ranks")
        if not isinstance(index, int) or not 0 < index < self.nodes.count:
            connection.close()
            return ""
        if not self.attempt and message.get("attempt"):  # no rank runs yet: it is of an earlier launch
            refuse_connection(connection, admission.STARTED_AGAIN)
            return ""
        fault = ""
        if index in self.hosts and not self.attempt:
            fault = f"NODE_RANK: given {index} on both {self.hosts[index]} and {host}; allowed: on each machine another"
        elif (ranks, message.get("count")) != (self.num_ranks, self.nodes.count):
            fault = (
                f"NGPU, NNODES: given {ranks}, {message.get('count')} on machine {index} ({host}) and "
                f"{self.num_ranks}, {self.nodes.count} on the first ({_HOST}); allowed: the same on all"
            )
        if message.get("refused"):
            fault = f"machine {index} ({host}) refuses the job:\n{message['refused']}"
        if fault and (self.attempt or index in self.hosts):
            refuse_connection(connection, fault)
            return fault
        if index in self.connections:  # it noticed the broken connection before this machine did
            self.connections[index].close()
        self.connections[index], self.hosts[index] = connection, host
        self._lost.discard(index)
        return fault

    def wait_for_lost(self, queue: SignalQueue, seconds: float, report: Report) -> int | None:
        """Wait for lost machines to reconnect. All ranks have ended by then, on every machine. Return the number of a
        signal that ended the wait. Machines that did not come in time stay in `lost_machines`."""
        began = reported = time.monotonic()
        names, limit = ", ".join(self.lost_machines), f"{seconds:.0f} s (job.rejoin_seconds)"
        self._report_waiting(report, f"{names} gone; waiting for a new connection for up to {limit}")
        while self._lost and (waited := time.monotonic() - began) < seconds:
            if self._admission is None:
                with suppress(JobError):  # the port may be in use for a moment
                    self._admission = Admission(self.nodes, self._key)
            for number in queue.wait(min(seconds - waited, _POLL_SECONDS), self.sockets):
                return number
            for connection, message in self._admission.poll() if self._admission is not None else ():
                if fault := self._admit(connection, message):
                    report(f"sent away again: {fault}")
            for message in self.take_orders():
                if message["kind"] == "stop":
                    return message["number"]
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                text = f"waiting for {', '.join(self.lost_machines)}: {reported - began:.0f} of {seconds:.0f} s"
                self._report_waiting(report, text)
        self._close_admission()
        if not self._lost:
            report(f"{names} back after {time.monotonic() - began:.0f} s")
        return None

    def _report_waiting(self, report: Report, text: str) -> None:
        report(text)
        self._broadcast({"kind": "waiting", "text": text})

    def _close_admission(self) -> None:
        if self._admission is not None:
            self._admission.close()
            self._admission = None

    # While ranks run

    def order_start(self, restart: Restart | None) -> tuple[Nodes, socket.socket | None]:
        """Start the ranks on all machines. Their store gets a new socket each time, so that no start waits for
        leftovers of the one before."""
        self._orders, self._stuck_reports, self._collected = [], {}, False
        self._exit_reports, self._ended_machines = [], set()  # drop those received between two starts
        self.attempt += 1
        if self.nodes.count == 1:
            return self.nodes, None
        listener = listen(self.nodes, 0)
        nodes = replace(self.nodes, port=listener.getsockname()[1])
        fields = asdict(restart) if restart else None
        self._broadcast({"kind": "start", "attempt": self.attempt, "port": nodes.port, "restart": fields})
        return nodes, listener

    def report_event(self, kind: str, **fields: Any) -> None:
        """Report an event on this machine that concerns all: stop (number), failed; hung (seconds), at every poll."""
        self._handle({"kind": kind, **fields}, 0)

    def take_orders(self) -> list[Message]:
        """Return the orders for this machine: stop (number), follow, collect (name, seconds)."""
        self._receive()
        orders, self._orders = self._orders, []
        return orders

    def _receive(self) -> None:
        for index, connection in self.connections.items():
            for message in connection.receive():
                self._handle(message, index)
            if not connection.is_open and index not in self._lost:
                self._lost.add(index)
                cause = f"machine {index} ({self.hosts[index]}) is gone"
                if index not in self._ended_machines:
                    self._record_exit(index, ExitReport(CRASHED, cause, index * self.num_ranks, by_signal=True))

    def _handle(self, message: Message, index: int) -> None:
        kind = message["kind"]
        if index and kind in ("failed", "hung", "end") and message.get("attempt") != self.attempt:
            return
        if kind == "stop":
            self._broadcast(message, except_index=index)
        elif kind == "failed":
            self._broadcast({"kind": "follow"}, except_index=index)
        elif kind == "hung":
            self._stuck_reports[index] = time.monotonic()
            if not self._collected and self._all_stuck():
                self._collected = True
                order = {"kind": "collect", "name": hang_folder_name(), "seconds": message["seconds"]}
                self._broadcast(order)
                self._orders.append(order)
        elif kind == "end" and index not in self._ended_machines:
            self._record_exit(
                index, read_report({name: message[name] for name in message if name not in ("kind", "attempt")})
            )

    def _all_stuck(self) -> bool:
        """Return True if no machine makes progress. While one machine's ranks wait, another's may be exporting, or
        compiling for longer."""
        stuck = {index for index, at in self._stuck_reports.items() if time.monotonic() - at < FRESH_SECONDS}
        return stuck | self._ended_machines == set(range(self.nodes.count))

    def _record_exit(self, index: int, exit_report: ExitReport) -> None:
        self._ended_machines.add(index)
        self._exit_reports.append(exit_report)
        if not exit_report.done:
            self._broadcast({"kind": "follow"}, except_index=index)

    def _broadcast(self, message: Message, except_index: int | None = None) -> None:
        for index, connection in self.connections.items():
            if index != except_index:
                connection.send(message)
        if except_index not in (0, None):  # from another machine, so this one must act on it too
            self._orders.append(message)

    def gather_reports(self, local_report: ExitReport, queue: SignalQueue) -> list[ExitReport]:
        """Return how this start ended on all machines, in the order of their reports. A stop signal received meanwhile
        stays in the queue for the next `take_orders`."""
        self._receive()
        self._record_exit(0, local_report)
        deadline = time.monotonic() + QUIET_SECONDS
        while len(self._ended_machines) < self.nodes.count and time.monotonic() < deadline:
            for number in queue.wait(_POLL_SECONDS, self.sockets):
                self.report_event("stop", number=number)
                self._orders.append({"kind": "stop", "number": number})
            self._receive()
        for index in set(range(self.nodes.count)) - self._ended_machines:
            self.connections[index].close()
        self._receive()
        reports, self._exit_reports, self._ended_machines = self._exit_reports, [], set()
        return reports

    def end_run(self, code: int) -> None:
        """Tell all other machines to exit with this code, close the connections and delete the secret file. Waits a
        moment for machines that have not connected yet, so that they learn of the end at once."""
        deadline, turned_away = time.monotonic() + LATE_SECONDS, 0
        while self._admission is not None and time.monotonic() < deadline:
            if len(self.hosts) + turned_away >= self.nodes.count:
                break
            select.select(self.sockets, [], [], _POLL_SECONDS)
            if self._key is None:
                turned_away += self._admission.refuse_all(code)
            else:
                for connection, message in self._admission.poll():
                    self._admit(connection, message)
        self._close_admission()
        for connection in self.connections.values():
            connection.send({"kind": "leave", "code": code})
            connection.close()
        if self._secret_file is not None:
            admission.remove_secret(self._secret_file)
            self._secret_file = None


class Worker:
    """A follower, on every machine except the first."""

    def __init__(self, nodes: Nodes, num_ranks: int, secret_file: Path) -> None:
        self.nodes, self.num_ranks, self.secret_file = nodes, num_ranks, secret_file
        self.connection: Connection | None = None
        self.attempt = 0
        """Number of the newest start of the ranks that the first machine has ordered."""

    @property
    def sockets(self) -> list[socket.socket]:
        return [self.connection.sock] if self.connection is not None and self.connection.is_open else []

    def join(self, queue: SignalQueue, seconds: float, refusal: str = "") -> int | None:
        """Connect to the first machine, which may start later; return the number of a signal that ended the wait.
        `refusal`: why this machine refuses the job, or "". Raises `JobError` if the first machine is not found."""
        deadline, other_secret_since = time.monotonic() + seconds, None
        while True:
            number, failure = self._try_to_join(queue, refusal)
            if failure is None:
                return number
            now = time.monotonic()
            other_secret_since = (other_secret_since or now) if failure.has_other_secret else None
            if other_secret_since is not None and now > min(deadline, other_secret_since + FOLDER_SECONDS):
                raise JobError(
                    f"job.dump_folder: not the folder of the first machine ({self.nodes.head}): {failure}, "
                    f"{now - other_secret_since:.0f} s after that machine was reached; allowed: one folder that all "
                    "machines share, e.g. on NFS"
                )
            if now > deadline:
                raise JobError(
                    f"HEAD_ADDR, HEAD_PORT: given {self.nodes.head}, {self.nodes.port}, where no launcher answers "
                    f"within {seconds:.0f} s ({failure}); allowed: address and port of the "
                    "machine with NODE_RANK = 0, the same everywhere; start all machines together"
                )
            for number in queue.wait(_POLL_SECONDS):
                return number

    def rejoin(self, queue: SignalQueue, seconds: float, report: Report) -> int | None:
        """Reconnect to the first machine after this one's ranks have ended; return the number of a signal that ended
        the wait. `connection` stays closed if it was not found in time."""
        began = reported = time.monotonic()
        first = f"the first machine ({self.nodes.head}, port {self.nodes.port})"
        report(f"{first} is gone; trying for up to {seconds:.0f} s to reach it again (job.rejoin_seconds)")
        while (waited := time.monotonic() - began) < seconds:
            number, failure = self._try_to_join(queue)
            if failure is None:
                if number is None:
                    report(f"{first} is back after {time.monotonic() - began:.0f} s")
                return number
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                report(f"trying to reach {first}: {reported - began:.0f} of {seconds:.0f} s ({failure})")
            for number in queue.wait(min(_POLL_SECONDS, seconds - waited)):
                return number
        return None

    def _try_to_join(self, queue: SignalQueue, refusal: str = "") -> tuple[int | None, CoordinatorUnreachable | None]:
        """Try once to connect and to introduce this machine: return the number of a signal, if one came, or the reason
        why the first machine was not reached."""
        try:
            result = connect(self.nodes, self.secret_file, queue, may_refuse=not self.attempt)
        except CoordinatorUnreachable as failure:
            return None, failure
        if isinstance(result, int):
            return result, None
        self.connection = result
        self.report_event(
            "here", index=self.nodes.index, count=self.nodes.count, host=_HOST, ranks=self.num_ranks, refused=refusal
        )
        return None, None

    def report_event(self, kind: str, **fields: Any) -> None:
        if self.connection is not None:
            self.connection.send({"kind": kind, "attempt": self.attempt, **fields})

    def take_orders(self) -> list[Message]:
        if self.connection is None:
            return []
        orders = self.connection.receive()
        return orders if self.connection.is_open else [*orders, {"kind": "follow"}]

    def next_order(self, queue: SignalQueue, report: Report, patience: float | None = None) -> Message:
        """Return the first machine's next order: start (attempt, port, restart) or leave (code); or lost (code, text)
        if the connection is lost. `patience`: how long that machine may be silent."""
        heard_at, stop_signal = time.monotonic(), 0
        while True:
            for number in queue.wait(_POLL_SECONDS, self.sockets):
                stop_signal = stop_signal or number
                self.report_event("stop", number=number)
            orders = self.take_orders()
            for index, order in enumerate(orders):
                if order["kind"] in ("start", "leave"):
                    assert self.connection is not None
                    stop = [{"kind": "stop", "number": stop_signal}] if stop_signal else []  # sent before it arrived
                    self.connection.put_back(stop + orders[index + 1 :])
                    self.attempt = order.get("attempt", self.attempt)
                    return order
                if order["kind"] == "waiting":
                    heard_at = time.monotonic()
                    report(order["text"])
            if not self.sockets:
                text = f"the first machine ({self.nodes.head}) is gone"
                return {"kind": "lost", "code": 128 + stop_signal if stop_signal else CRASHED, "text": text}
            if patience is not None and time.monotonic() - heard_at > patience:
                assert self.connection is not None
                self.connection.close()
                text = f"the first machine ({self.nodes.head}) has not answered for {patience:.0f} s"
                return {"kind": "lost", "code": 128 + stop_signal if stop_signal else CRASHED, "text": text}
