"""Launchers of several machines against whoever is on the network between them: a man in the middle, an impostor of the
first machine, another version.

Nobody who is not authenticated is obeyed, and every run goes on, or ends with a line and its exit code.
"""

import json
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import jobs
from tests.support.forked_job import Program
from tests.support.launched_ranks import nothing_is_left, started
from tests.support.machines import (
    FINISH_AFTER_RESTART,
    NO_SIGNALS,
    queue,
    run_concurrently,
    start_machines,
    wait_for_all,
    wait_until_ready,
)
from tests.support.ports import free_port
from tests.support.proxy import Proxy
from torchtitan.core.errors import JobError
from torchtitan.launcher import admission, connection, multi_node
from torchtitan.launcher.connection import Connection
from torchtitan.launcher.messages import Here, Hung, Leave, Start, Waiting, launcher_version
from torchtitan.launcher.multi_node import Coordinator, Lost, Worker
from torchtitan.launcher.nodes import Nodes

assert nothing_is_left and queue  # fixtures

UNSEALED = "sent a line that its launcher did not send, or not as the next one"


class ManInTheMiddle:
    """Passes lines on as they are until `attack` is set: it gets a line and returns what is sent on and back."""

    def __init__(self) -> None:
        self.attack: Callable[[bytes], tuple[bytes, bytes]] | None = None
        self.attacks_caller = False
        """Whether the lines of the machine that has connected are changed, or those of the other one."""
        self.seen: list[bytes] = []

    def __call__(self, line: bytes, from_caller: bool) -> tuple[bytes, bytes]:
        self.seen.append(line)
        if self.attack is None or from_caller != self.attacks_caller:
            return line, b""
        return self.attack(line)


def change_a_digit(line: bytes) -> tuple[bytes, bytes]:
    return re.sub(rb'("(?:seconds|text)": "?)1', rb"\g<1>7", line), b""


def hold_back_one() -> Callable[[bytes], tuple[bytes, bytes]]:
    kept: list[bytes] = []

    def attack(line: bytes) -> tuple[bytes, bytes]:
        kept.append(line)
        return (b"", b"") if len(kept) == 1 else (line + kept[0] if len(kept) == 2 else line, b"")

    return attack


def once(attack: Callable[[bytes], tuple[bytes, bytes]]) -> Callable[[bytes], tuple[bytes, bytes]]:
    attacked: list[bytes] = []

    def first_line(line: bytes) -> tuple[bytes, bytes]:
        attacked.append(line)
        return attack(line) if len(attacked) == 1 else (line, b"")

    return first_line


ATTACKS: dict[str, Callable[[], Callable[[bytes], tuple[bytes, bytes]]]] = {
    "modified": lambda: change_a_digit,
    "replayed": lambda: lambda line: (line + line, b""),
    "reordered": hold_back_one,
    "left out": lambda: once(lambda line: (b"", b"")),
    "injected": lambda: lambda line: (b'{"kind": "stop", "attempt": 0, "number": 15}\n' + line, b""),
    "injected with the seal of another": lambda: lambda line: (line[:64] + b'{"kind": "alive"}\n', b""),
    "cut short": lambda: lambda line: (line[:-10] + b"\n", b""),
    "joined": lambda: once(lambda line: (line[:-1], b"")),
    "without a seal": lambda: lambda line: (line[64:], b""),
    "sent back": lambda: lambda line: (line, line),
    "empty": lambda: lambda line: (b"\n" + line, b""),
}


@pytest.fixture
def middle(queue, tmp_path, monkeypatch) -> Iterator[tuple[ManInTheMiddle, Coordinator, Worker]]:
    """Two launchers in this process that are connected through a man in the middle."""
    monkeypatch.setattr(connection, "ALIVE_SECONDS", 0.1)
    man = ManInTheMiddle()
    proxy = Proxy(free_port(), free_port(), man)
    path = tmp_path / "launch.secret"
    first = Coordinator(Nodes(2, 0, "127.0.0.1", proxy.target_port), 1)
    other = Worker(Nodes(2, 1, "127.0.0.1", proxy.port), 1, path)
    outcomes = run_concurrently(lambda: first.wait_for_workers(queue, 60, path), lambda: other.join(NO_SIGNALS, 60))
    assert outcomes == [None, None]
    yield man, first, other
    first.end_run(0)
    proxy.close()


def exchange(first: Connection, other: Connection, seconds: float = 30) -> tuple[list[str], list[str]]:
    """Receive at both ends until one closes the connection; return the texts and seconds of what has arrived."""
    at_first, at_other = [], []
    deadline = time.monotonic() + seconds
    while first.is_open and other.is_open and time.monotonic() < deadline:
        select.select([first.sock, other.sock], [], [], 0.05)
        at_first += [str(int(message.seconds)) for message in first.receive()]
        if other.is_open:
            at_other += [message.text for message in other.receive()]
    return at_first, at_other


@pytest.mark.parametrize("from_caller", [True, False], ids=["to the first", "from the first"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_man_in_the_middle_is_noticed_and_not_obeyed(attack, from_caller, middle, capsys):
    man, first, other = middle
    at_first, at_other = first.connections[1], other.connection
    man.attacks_caller, man.attack = from_caller, ATTACKS[attack]()
    for number in (1, 2, 3):
        other.report_event(Hung(seconds=number)) if from_caller else at_first.send(Waiting(text=str(number)))
    received = exchange(at_first, at_other)[not from_caller]
    assert received == ["1", "2", "3"][: len(received)]  # what is before the attack, as it was sent
    assert not (at_first.is_open and at_other.is_open)
    line = capsys.readouterr().err
    assert UNSEALED in line and len(line.splitlines()) == 1 and "closed" in line


def test_a_line_of_an_earlier_connection_is_not_taken_again(middle, queue, capsys):
    man, first, other = middle
    first.order_start(None)[1].close()
    assert other.next_order(queue, print).attempt == 1
    other.report_event(Hung(seconds=1))
    select.select(first.sockets, [], [], 30)
    recorded = next(line for line in man.seen if b'"hung"' in line)
    other.connection.close()
    while not first.lost_machines:
        first.take_orders()
    back = run_concurrently(
        lambda: first.wait_for_lost(queue, 30, lambda text: None),
        lambda: other.rejoin(NO_SIGNALS, 30, lambda text: None),
    )
    assert back == [None, None] and not first.lost_machines
    man.attacks_caller, man.attack = True, lambda line: (recorded, b"")
    other.report_event(Hung(seconds=2))
    assert exchange(first.connections[1], other.connection) == ([], []) and UNSEALED in capsys.readouterr().err


def test_a_silent_connection_counts_as_dead(middle, monkeypatch, capsys):
    """Somebody on the way acknowledges everything and passes nothing on."""
    monkeypatch.setattr(connection, "DEAD_SECONDS", 0.5)
    man, first, other = middle
    man.attacks_caller, man.attack = True, lambda line: (b"", b"")
    exchange(first.connections[1], other.connection)
    assert re.search(r"machine 1 \(.*\) sent nothing for \d+ s; the connection is closed", capsys.readouterr().err)


def test_connections_without_messages_stay_open(middle, monkeypatch, capsys):
    monkeypatch.setattr(connection, "DEAD_SECONDS", 0.5)
    _, first, other = middle
    assert exchange(first.connections[1], other.connection, seconds=1.5) == ([], [])
    assert first.connections[1].is_open and other.connection.is_open and capsys.readouterr().err == ""


def test_launchers_that_were_stopped_together_stay_connected(middle, monkeypatch, capsys):
    monkeypatch.setattr(connection, "DEAD_SECONDS", 1.2)
    _, first, other = middle
    with monkeypatch.context() as stopped:
        stopped.setattr(connection, "ALIVE_SECONDS", 60)
        exchange(first.connections[1], other.connection, seconds=0.3)
        time.sleep(2)  # neither sends nor reads
    assert exchange(first.connections[1], other.connection, seconds=0.5) == ([], [])
    assert first.connections[1].is_open and other.connection.is_open and capsys.readouterr().err == ""


@pytest.mark.parametrize("order", ["stop", "collect"])
def test_a_run_goes_on_when_a_man_in_the_middle_gives_orders(order, tmp_path):
    """As on a network that fails: the launchers connect again, and all ranks restart from the last save."""
    man, outside = ManInTheMiddle(), tmp_path / "outside"
    proxy = Proxy(free_port(), free_port(), man)
    machines = start_machines(FINISH_AFTER_RESTART, tmp_path, rejoin=100, ports=(proxy.target_port, proxy.port))
    injected = {
        "stop": b'{"kind": "stop"}\n',
        "collect": json.dumps({"kind": "collect", "name": str(outside), "seconds": 1}).encode() + b"\n",
    }[order]
    to_inject = [injected]
    try:
        for process in machines:
            wait_until_ready(process)
        man.attack = lambda line: (
            (to_inject.pop() if to_inject else b"") + line,
            b"",
        )  # before the first machine's next line
        first, other = wait_for_all(machines)
    finally:
        proxy.close()
    assert (first[0], other[0]) == (0, 0), (first, other)
    assert first[1].endswith("again 1\n") and other[1].endswith("again 1\n") and not outside.exists()
    assert UNSEALED in other[2] and "restart 1 of 3" in first[2] and "Traceback" not in first[2] + other[2]


# Who is not the first machine


@pytest.mark.parametrize(
    "answer",
    [
        b'{"kind": "refuse", "code": 137}\n',
        b'{"kind": "refuse", "code": 2.0}\n',
        b'{"kind": "leave", "code": 0}\n',
        b'{"kind": "welcome", "proof": "' + b"0" * 64 + b'"}\n',
        b'{"kind": "challenge", "nonce": 3, "version": null}\n',
        b'{"kind": "challenge", "nonce": "' + b"0" * 64 + b'"}\n',
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\xff" * 10_000,
        b"",
    ],
)
def test_an_impostor_at_the_first_machines_port_is_not_obeyed(answer, queue, tmp_path, monkeypatch):
    """The machine tries on, and joins the first one once that is there."""
    monkeypatch.setattr(admission, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(multi_node, "REPORT_SECONDS", 0.1)
    port, path = free_port(), tmp_path / "launch.secret"
    other = Worker(Nodes(2, 1, "127.0.0.1", port), 1, path)
    texts: list[str] = []
    monkeypatch.setattr(multi_node, "print_error", texts.append)
    heard = threading.Event()

    def pretend_and_begin() -> int | None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        for _ in range(2):
            peer, _ = listener.accept()
            peer.sendall(answer)
            peer.close()
        listener.close()
        heard.set()
        first = Coordinator(Nodes(2, 0, "127.0.0.1", port), 1)
        outcome = first.wait_for_workers(queue, 60, path)
        first.order_start(None)[1].close()
        time.sleep(0.2)
        first.end_run(0)
        return outcome

    assert run_concurrently(pretend_and_begin, lambda: other.join(NO_SIGNALS, 60)) == [None, None]
    assert heard.is_set() and isinstance(other.next_order(NO_SIGNALS, print), Start)


def test_a_machine_that_meets_only_an_impostor_says_what_is_there(tmp_path, monkeypatch):
    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def pretend() -> None:
        listener.settimeout(0.2)
        while not ended.is_set():
            try:
                listener.accept()[0].sendall(b'{"kind": "refuse", "code": 137}\n')
            except TimeoutError:
                continue

    port = listener.getsockname()[1]
    other = Worker(Nodes(2, 1, "127.0.0.1", port), 1, tmp_path / "launch.secret")

    def join() -> None:
        try:
            other.join(NO_SIGNALS, 1)
        finally:
            ended.set()

    _, error = run_concurrently(pretend, join)
    listener.close()
    assert isinstance(error, JobError) and f"given 127.0.0.1, {port}, where no launcher answers" in str(error)
    assert "what answers is no launcher of this version of torchtitan: it sent a line" in str(error)


def test_launchers_of_two_versions_refuse_each_other_by_name(queue, tmp_path, monkeypatch):
    """Each has proved that it belongs to the run, so both believe the other's version."""

    def version() -> str:
        is_first = threading.current_thread() is threading.main_thread()
        return launcher_version() if is_first else "torchtitan 9.9, protocol 99"

    monkeypatch.setattr(admission, "launcher_version", version)
    first, path = Coordinator(Nodes(2, 0, "127.0.0.1", free_port()), 1), tmp_path / "launch.secret"
    other = Worker(Nodes(2, 1, "127.0.0.1", first.nodes.port), 1, path)
    errors = run_concurrently(lambda: first.wait_for_workers(queue, 60, path), lambda: other.join(NO_SIGNALS, 60))
    for error in errors:
        assert isinstance(error, JobError) and "and torchtitan 9.9, protocol 99 on" in str(error)
        assert f"torchtitan: given {launcher_version()} on the first machine" in str(error)
    first.end_run(2)


def test_a_refusal_is_proved_by_the_secret_of_a_run_in_the_folder(queue, tmp_path, monkeypatch):
    """A second run is refused while a first one is at work; the first one's secret stays."""
    monkeypatch.setattr(multi_node, "LATE_SECONDS", 20)
    path = tmp_path / "launch.secret"
    secret = admission.create_secret(path)
    first = Coordinator(Nodes(2, 0, "127.0.0.1", free_port()), 1)
    other = Worker(Nodes(2, 1, "127.0.0.1", first.nodes.port), 1, path)
    assert run_concurrently(lambda: first.end_run(2, path), lambda: other.join(NO_SIGNALS, 20)) == [None, None]
    assert other.next_order(queue, print) == Leave(code=2) and path.read_bytes() == secret


def test_a_refused_start_sends_no_machine_of_an_earlier_launch_away(queue, tmp_path, monkeypatch):
    """As after a first machine that died and was started again with a typo."""
    monkeypatch.setattr(multi_node, "LATE_SECONDS", 2)
    path, first = tmp_path / "launch.secret", Coordinator(Nodes(2, 0, "127.0.0.1", free_port()), 1)
    earlier = Worker(Nodes(2, 1, "127.0.0.1", first.nodes.port), 1, path)
    earlier.attempt = 1

    def come_back():
        earlier.rejoin(NO_SIGNALS, 20, lambda text: None)
        return earlier.next_order(NO_SIGNALS, print)

    _, order = run_concurrently(lambda: first.end_run(2, path), come_back)
    assert isinstance(order, Lost)


def test_a_refusal_without_a_place_for_a_secret_waits_for_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(multi_node, "LATE_SECONDS", 1000)
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "launch.secret", Path("/proc/none/launch.secret"), tmp_path / "a\0b" / "secret"):
        Coordinator(Nodes(2, 0, "127.0.0.1", free_port()), 1).end_run(2, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


# The first machine's launcher, killed and started again


def test_a_first_launcher_that_is_started_again_is_rejoined(tmp_path):
    program = "ready('train')\nwhile not (folder / 'end').exists(): time.sleep(0.05)\ntell('end', 9)"
    machines = start_machines(program, tmp_path, rejoin=100)
    for process in machines:
        wait_until_ready(process)
    machines[0].kill()
    assert "trying for up to 100 s to reach it again" in machines[1].stderr.readline()
    successor = Program(*machines[0].args, folder=jobs.ROOT)
    started.append(successor)
    for process in (successor, machines[1]):  # new ranks on both
        wait_until_ready(process)
    (tmp_path / "end").touch()
    first, other = wait_for_all([successor, machines[1]])
    assert (first[0], other[0]) == (0, 0) and first[2] == "", (first, other)
    assert re.search(r"the first machine \(127.0.0.1, port \d+\) is back after \d+ s", other[2])


def test_a_new_launcher_takes_the_place_of_one_of_an_earlier_launch(queue, tmp_path):
    """Whichever comes first, as when all machines are started again while an old launcher still looks for the first."""
    first, path = Coordinator(Nodes(3, 0, "127.0.0.1", free_port()), 1), tmp_path / "launch.secret"
    old, new, another_old, last = (
        Worker(Nodes(3, index, "127.0.0.1", first.nodes.port), 1, path) for index in (1, 1, 1, 2)
    )
    old.attempt = another_old.attempt = 3

    def join() -> list:
        assert old.join(NO_SIGNALS, 60) is None
        while 1 not in first.hosts:
            time.sleep(0.01)
        assert new.join(NO_SIGNALS, 60) is None
        sent_away = [old.next_order(NO_SIGNALS, print)]
        assert another_old.join(NO_SIGNALS, 60) is None
        sent_away.append(another_old.next_order(NO_SIGNALS, print))
        last.join(NO_SIGNALS, 60)
        return sent_away

    outcome, sent_away = run_concurrently(lambda: first.wait_for_workers(queue, 60, path), join)
    assert outcome is None and [order.text for order in sent_away] == [admission.STARTED_AGAIN] * 2
    first.order_start(None)[1].close()
    assert [machine.next_order(NO_SIGNALS, print).attempt for machine in (new, last)] == [1, 1]
    first.end_run(0)


def test_a_machine_with_another_number_of_machines_is_named(queue, tmp_path):
    """Its own number is then above what the first machine knows, and it did connect."""
    first, path = Coordinator(Nodes(2, 0, "127.0.0.1", free_port()), 1), tmp_path / "launch.secret"
    other = Worker(Nodes(8, 5, "127.0.0.1", first.nodes.port), 1, path)
    error, _ = run_concurrently(lambda: first.wait_for_workers(queue, 60, path), lambda: other.join(NO_SIGNALS, 60))
    assert str(error).startswith("NGPU, NNODES: given 1, 8 on machine 5 (")
    assert other.next_order(queue, print).code == 2
    assert Here(index=1, count=2, ranks=1, host="b").attempt == 0
    first.end_run(2)
