"""Coordinate the launchers of several machines: the first decides, the others report to it and follow its orders.

Each of the others has one connection to the first (connection.py), on which both ends first prove that they belong to
the run (admission.py). They send each other the messages of messages.py. A machine takes part while it is connected. A
closed connection means that the machine is lost, and it may reconnect. On a single machine there are no connections.
"""

import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan.core.errors import JobError
from torchtitan.core.hub import chosen_commits
from torchtitan.launcher import admission
from torchtitan.launcher.admission import Admission, CoordinatorUnreachable, connect, refuse_connection
from torchtitan.launcher.connection import Connection
from torchtitan.launcher.hangs import ExitReport, hang_folder_name
from torchtitan.launcher.messages import (
    EVENTS,
    ORDERS,
    Collect,
    Ended,
    Event,
    Failed,
    Follow,
    Here,
    Hung,
    Leave,
    Message,
    Start,
    Stop,
    Waiting,
    clip_text,
)
from torchtitan.launcher.nodes import Nodes, listen
from torchtitan.launcher.processes import SignalQueue
from torchtitan.process.exit import CRASHED
from torchtitan.process.ranks import Restart
from torchtitan.process.run_log import print_error

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
        self._from_earlier_launch: set[int] = set()
        """Machines whose launcher has belonged to an earlier launch of the run, until the ranks start."""
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
        began = reported = time.monotonic()
        while len(self.hosts) < self.nodes.count:
            waited = time.monotonic() - began
            for number in queue.wait(max(0.0, min(seconds - waited, _POLL_SECONDS)), self.sockets):
                return number
            for newcomer in self._admission.poll():
                if fault := self._admit(*newcomer):
                    raise JobError(fault)
            for fault in self._admission.faults:
                raise JobError(fault)
            for order in self.take_orders():
                if isinstance(order, Stop):
                    return order.number
            if self._lost:
                raise JobError(f"{', '.join(self.lost_machines)} gone before all had come; start all machines again")
            if waited > seconds and len(self.hosts) < self.nodes.count:  # none has come while this launcher was stopped
                raise JobError(self._absence_message(seconds))
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                text = f"waiting for {self._missing_machines()}: {reported - began:.0f} of {seconds:.0f} s"
                self._report_waiting(print_error, text)
        self._close_admission()
        return None

    def _missing_machines(self) -> str:
        missing = sorted(set(range(self.nodes.count)) - set(self.hosts))
        return f"machine{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"

    def _absence_message(self, seconds: float) -> str:
        present = ", ".join(f"{index} ({host})" for index, host in sorted(self.hosts.items()))
        num_strangers = self._admission.num_strangers if self._admission is not None else 0
        hint = (
            f"; {num_strangers} connections could not prove that they belong to this run: give a job.dump_folder that "
            "all machines share, and install the same version of torchtitan on all"
        )
        return (
            f"NNODES: given {self.nodes.count}, but {self._missing_machines()} did not connect to "
            f"{self.nodes.head}, port {self.nodes.port}, within {seconds:.0f} s (comm.init_timeout_seconds); here: "
            f"{present}; allowed: as many machines, with the same HEAD_ADDR and HEAD_PORT and each its NODE_RANK; "
            f"start them, and let them through the firewall{hint if num_strangers else ''}"
        )

    def _admit(self, connection: Connection, introduction: Here) -> str:
        """Register an authenticated machine, replacing its earlier connection, or close this one. Return the fault to
        report: "" for a machine with a wrong number, or one whose place another launcher has taken.
        """
        index, host = introduction.index, introduction.host
        name, is_here = f"machine {index} ({host})", index in self.hosts
        is_earlier = not self.attempt and introduction.attempt > 0  # the launcher here was killed and started again
        fault = ""
        if (introduction.ranks, introduction.count) != (self.num_ranks, self.nodes.count):
            fault = (
                f"NGPU, NNODES: given {introduction.ranks}, {introduction.count} on {name} and "
                f"{self.num_ranks}, {self.nodes.count} on the first ({_HOST}); allowed: the same on all"
            )
        elif not 0 < index < self.nodes.count:
            connection.close()
            return ""
        elif is_earlier and is_here and index not in self._from_earlier_launch:
            refuse_connection(connection, admission.STARTED_AGAIN)
            return ""
        elif is_here and not self.attempt and index not in self._from_earlier_launch:
            fault = f"NODE_RANK: given {index} on both {self.hosts[index]} and {host}; allowed: on each machine another"
        if introduction.refused:
            fault = f"{name} refuses the job:\n{introduction.refused}"
        if fault and (self.attempt or is_here or not 0 < index < self.nodes.count):
            refuse_connection(connection, fault)
            return fault
        if index in self._from_earlier_launch:
            refuse_connection(self.connections[index], admission.STARTED_AGAIN)
        if index in self.connections:  # it noticed the broken connection before this machine did
            self.connections[index].close()
        connection.trust(name, EVENTS)
        self.connections[index], self.hosts[index] = connection, host
        self._lost.discard(index)
        (self._from_earlier_launch.add if is_earlier else self._from_earlier_launch.discard)(index)
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
            for number in queue.wait(max(0.0, min(seconds - waited, _POLL_SECONDS)), self.sockets):
                return number
            if self._admission is not None:
                faults = [self._admit(*newcomer) for newcomer in self._admission.poll()]
                for fault in filter(None, faults + self._admission.faults):
                    report(f"sent away again: {fault}")
                self._admission.faults.clear()
            for order in self.take_orders():
                if isinstance(order, Stop):
                    return order.number
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
        self._broadcast(Waiting(text=clip_text(text)))

    def _close_admission(self) -> None:
        if self._admission is not None:
            self._admission.close()
            self._admission = None

    # While ranks run

    def order_start(self, restart: Restart | None) -> tuple[Nodes, socket.socket | None]:
        """Start the ranks on all machines. Their store gets a new socket each time, so that no start waits for
        leftovers of the one before."""
        self._orders, self._stuck_reports, self._collected = [], {}, False
        self._from_earlier_launch.clear()
        self._exit_reports, self._ended_machines = [], set()  # drop those received between two starts
        self.attempt += 1
        if self.nodes.count == 1:
            return self.nodes, None
        listener = listen(self.nodes, 0)
        nodes = replace(self.nodes, port=listener.getsockname()[1])
        self._broadcast(Start(attempt=self.attempt, port=nodes.port, restart=restart, commits=chosen_commits()))
        return nodes, listener

    def report_event(self, event: Event) -> None:
        """Report an event on this machine that concerns all: Stop, Failed; Hung, at every poll."""
        self._handle(event, 0)

    def take_orders(self) -> list[Message]:
        """Return the orders for this machine: Stop, Follow, Collect."""
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

    def _handle(self, event: Event, index: int) -> None:
        if index and not isinstance(event, Stop) and event.attempt != self.attempt:
            return
        if isinstance(event, Stop):
            self._broadcast(event, except_index=index)
        elif isinstance(event, Failed):
            self._broadcast(Follow(), except_index=index)
        elif isinstance(event, Hung):
            self._stuck_reports[index] = time.monotonic()
            if not self._collected and self._all_stuck():
                self._collected = True
                order = Collect(name=hang_folder_name(), seconds=event.seconds)
                self._broadcast(order)
                self._orders.append(order)
        elif isinstance(event, Ended) and index not in self._ended_machines:
            self._record_exit(index, event.report)

    def _all_stuck(self) -> bool:
        """Return True if no machine makes progress. While one machine's ranks wait, another's may be exporting, or
        compiling for longer."""
        stuck = {index for index, at in self._stuck_reports.items() if time.monotonic() - at < FRESH_SECONDS}
        return stuck | self._ended_machines == set(range(self.nodes.count))

    def _record_exit(self, index: int, exit_report: ExitReport) -> None:
        self._ended_machines.add(index)
        self._exit_reports.append(exit_report)
        if not exit_report.done:
            self._broadcast(Follow(), except_index=index)

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
                self.report_event(Stop(number=number))
                self._orders.append(Stop(number=number))
            self._receive()
        self._receive()  # reports that have come while this launcher was stopped
        for index in set(range(self.nodes.count)) - self._ended_machines:
            self.connections[index].close()
        self._receive()
        reports, self._exit_reports, self._ended_machines = self._exit_reports, [], set()
        return reports

    def end_run(self, code: int, secret_file: Path | None = None) -> None:
        """Tell all other machines to exit with this code, close the connections and delete the secret file. Waits a
        moment for machines that have not connected yet, so that they learn of the end at once. `secret_file`: where
        they look for the secret, if this machine ends before it has written one.
        """
        if self._admission is not None and self._key is not None:
            self._await_late_machines(self._admission)
        elif self._admission is not None and secret_file is not None:
            with admission.secret_of_refusal(secret_file) as secret:
                self._admission.key = secret
                if secret is not None:
                    self._await_late_machines(self._admission, is_refused=True)
        self._close_admission()
        for connection in self.connections.values():
            connection.send(Leave(code=code))
            connection.close()
        if self._secret_file is not None:
            admission.remove_secret(self._secret_file)
            self._secret_file = None

    def _await_late_machines(self, entrance: Admission, is_refused: bool = False) -> None:
        """Admit machines that connect late. `is_refused`: a launcher of an earlier launch, or of a run at work in the
        folder, is kept waiting and then goes on looking for its first machine, as the next start may be right.
        """
        deadline = time.monotonic() + LATE_SECONDS
        earlier: list[Connection] = []
        while len(self.hosts) < self.nodes.count and time.monotonic() < deadline:
            select.select(self.sockets, [], [], _POLL_SECONDS)
            for connection, introduction in entrance.poll():
                if is_refused and introduction.attempt:
                    earlier.append(connection)
                else:
                    self._admit(connection, introduction)
        for connection in earlier:
            connection.close()


@dataclass(frozen=True)
class Lost:
    """Returned by `Worker.next_order` in place of an order if the first machine is lost."""

    code: int
    text: str


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
        number, failure = self._try_until(time.monotonic() + seconds, queue, seconds, print_error, refusal)
        if failure is not None:
            raise JobError(
                f"HEAD_ADDR, HEAD_PORT: given {self.nodes.head}, {self.nodes.port}, where no launcher answers "
                f"within {seconds:.0f} s ({failure}); allowed: address and port of the "
                "machine with NODE_RANK = 0, the same everywhere; start all machines together"
            )
        return number

    def rejoin(self, queue: SignalQueue, seconds: float, report: Report) -> int | None:
        """Reconnect to the first machine after this one's ranks have ended; return the number of a signal that ended
        the wait. `connection` stays closed if it was not found in time."""
        began = time.monotonic()
        report(f"{self._first} is gone; trying for up to {seconds:.0f} s to reach it again (job.rejoin_seconds)")
        number, failure = self._try_until(began + seconds, queue, seconds, report)
        if failure is None and number is None:
            report(f"{self._first} is back after {time.monotonic() - began:.0f} s")
        return number

    @property
    def _first(self) -> str:
        return f"the first machine ({self.nodes.head}, port {self.nodes.port})"

    def _try_until(
        self, deadline: float, queue: SignalQueue, seconds: float, report: Report, refusal: str = ""
    ) -> tuple[int | None, CoordinatorUnreachable | None]:
        """Try to reach the first machine until the deadline; return as `_try_to_join` does. Raises `JobError` in the
        first wait if its secret is not in this machine's folder.
        """
        reported, other_secret_since = time.monotonic(), None
        is_first_wait = not self.attempt
        while True:
            number, failure = self._try_to_join(queue, refusal)
            now = time.monotonic()
            if failure is None or now > deadline:
                return number, failure
            other_secret_since = (other_secret_since or now) if failure.has_other_secret else None
            if is_first_wait and other_secret_since and now > min(deadline, other_secret_since + FOLDER_SECONDS):
                raise JobError(
                    f"job.dump_folder: not the folder of the first machine ({self.nodes.head}): {failure}, "
                    f"{now - other_secret_since:.0f} s after that machine was reached; allowed: one folder that all "
                    "machines share, e.g. on NFS"
                )
            if now - reported > REPORT_SECONDS:
                reported = now
                waited = seconds - (deadline - now)
                report(f"trying to reach {self._first}: {waited:.0f} of {seconds:.0f} s ({failure})")
            for number in queue.wait(min(_POLL_SECONDS, deadline - now)):
                return number, None

    def _try_to_join(self, queue: SignalQueue, refusal: str = "") -> tuple[int | None, CoordinatorUnreachable | None]:
        """Try once to connect and to introduce this machine: return the number of a signal, if one came, or the reason
        why the first machine was not reached."""
        try:
            result = connect(self.nodes, self.secret_file, queue)
        except CoordinatorUnreachable as failure:
            return None, failure
        if isinstance(result, int):
            return result, None
        self.connection = result
        self.connection.trust(self._first, ORDERS)
        self.report_event(
            Here(
                index=self.nodes.index,
                count=self.nodes.count,
                host=_HOST[:255],
                ranks=self.num_ranks,
                refused=clip_text(refusal),
            )
        )
        return None, None

    def report_event(self, event: Event) -> None:
        if self.connection is not None:
            self.connection.send(replace(event, attempt=self.attempt))

    def take_orders(self) -> list[Message]:
        if self.connection is None:
            return []
        orders = self.connection.receive()
        return orders if self.connection.is_open else [*orders, Follow()]

    def next_order(self, queue: SignalQueue, report: Report, patience: float | None = None) -> Start | Leave | Lost:
        """Return the first machine's next order, or that the connection is lost. `patience`: how long that machine may
        be silent."""
        heard_at, stop_signal = time.monotonic(), 0
        while True:
            for number in queue.wait(_POLL_SECONDS, self.sockets):
                stop_signal = stop_signal or number
                self.report_event(Stop(number=number))
            orders = self.take_orders()
            for index, order in enumerate(orders):
                if isinstance(order, Start | Leave):
                    assert self.connection is not None
                    stop: list[Message] = [Stop(number=stop_signal)] if stop_signal else []  # sent before it arrived
                    self.connection.put_back(stop + orders[index + 1 :])
                    self.attempt = order.attempt if isinstance(order, Start) else self.attempt
                    return order
                if isinstance(order, Waiting):
                    heard_at = time.monotonic()
                    report(order.text)
            if not self.sockets:
                text = f"the first machine ({self.nodes.head}) is gone"
                return Lost(128 + stop_signal if stop_signal else CRASHED, text)
            if patience is not None and time.monotonic() - heard_at > patience:
                assert self.connection is not None
                self.connection.close()
                text = f"the first machine ({self.nodes.head}) has not answered for {patience:.0f} s"
                return Lost(128 + stop_signal if stop_signal else CRASHED, text)
