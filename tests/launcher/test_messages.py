"""Messages between launchers are read whole or refused: whatever a line holds, no launcher raises, waits for ever or
writes a file outside its run's folder.
"""

import json
import os
import socket
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from tests.support.mutations import mutations_of
from torchtitan.launcher import hangs, messages, multi_node
from torchtitan.launcher.connection import Connection
from torchtitan.launcher.hangs import Collective, CollectiveLog, Evidence, ExitReport, RankState, combine_reports
from torchtitan.launcher.messages import (
    EVENTS,
    GREETING_TO_FIRST,
    GREETING_TO_OTHER,
    INTRODUCTION,
    ORDERS,
    Alive,
    Challenge,
    Collect,
    Ended,
    Failed,
    Follow,
    Here,
    Hung,
    Inbox,
    Leave,
    MalformedLine,
    Message,
    Proof,
    Start,
    Stop,
    Stranger,
    Waiting,
    Welcome,
    dump_message,
)
from torchtitan.launcher.monitor import RankMonitor
from torchtitan.launcher.multi_node import Coordinator, Worker
from torchtitan.launcher.nodes import Nodes
from torchtitan.metrics.run_end import RunEnd, read_end
from torchtitan.process.exit import HUNG
from torchtitan.process.heartbeat import Activity, ProgressTable, SharedFile
from torchtitan.process.ranks import Restart

LOG = CollectiveLog([Collective(False, ("0", "default"), [[4]], 3, "gloo:all_reduce")], {"0": "[0, 1]"})
EVIDENCE = Evidence(3.0, "20260101-000000", "", {1: RankState(Activity("train", 3, 1.5), "S", LOG)})
EXAMPLES: dict[Inbox, list[Message]] = {
    GREETING_TO_FIRST: [Proof(nonce="0" * 64, version="1", proof="1" * 64)],
    GREETING_TO_OTHER: [Challenge(nonce="0" * 64, version="1"), Welcome(proof="1" * 64), Stranger()],
    INTRODUCTION: [Here(index=1, count=2, ranks=1, host="b"), Alive()],
    EVENTS: [
        *(Stop(number=15), Failed(attempt=1), Hung(attempt=1, seconds=5.0), Alive()),
        *(
            Ended(attempt=1, report=ExitReport(0, done=True)),
            Ended(attempt=1, report=ExitReport(HUNG, evidence=EVIDENCE)),
        ),
    ],
    ORDERS: [
        Start(attempt=1, port=5, restart=None, commits={"hf://owner/name": "0" * 40}),
        *(Start(attempt=1, port=5, restart=None), Start(attempt=2, port=5, restart=Restart(1, "a", 0, 7, 1.0))),
        *(Stop(number=2), Follow(), Collect(name="20260101-000000", seconds=5.0), Waiting(text="a")),
        *(Leave(code=137, text="a"), Alive()),
    ],
}
PAIRS = [(inbox, message) for inbox, examples in EXAMPLES.items() for message in examples]
NO_SIGNALS = SimpleNamespace(wait=lambda seconds, also=(): [])


def test_every_kind_has_an_example_and_survives_the_way():
    for inbox, examples in EXAMPLES.items():
        assert {type(message) for message in examples} == set(inbox.kinds)
        for message in examples:
            assert inbox.parse(dump_message(message)) == message
            assert get_args(type(message).__annotations__["kind"]) == (message.kind,)
    with pytest.raises(MalformedLine, match="does not match any of the expected tags"):
        ORDERS.parse(dump_message(Failed()))


def test_the_protocol_has_a_new_number_when_its_messages_change():
    """Otherwise two versions would refuse each other's lines as malformed instead of by name."""
    layout = {kind.__name__: [field.name for field in fields(kind)] for inbox in EXAMPLES for kind in inbox.kinds}
    assert (messages.PROTOCOL, len(layout), sum(map(len, layout.values()))) == (3, 15, 43), layout


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"null",
        b"[1, 2]",
        b'"stop"',
        b"{}",
        b'{"kind": 1}',
        b'{"kind": ["stop"]}',
        b"\xff\xfe",
    ]
    + [b'{"kind": "stop"}', b'{"kind": "stop", "number": 2.0}', b'{"kind": "stop", "number": 9}', b"\x00" * 100]
    + [b'{"kind": "\x1b[2J", "number": 2}', b'{"kind": "stop", "number": ' + b"9" * 10_000 + b"}"],
)
def test_what_is_no_message_is_refused_in_one_plain_line(line):
    with pytest.raises(MalformedLine) as failure:
        EVENTS.parse(line)
    assert str(failure.value).isprintable() and len(str(failure.value)) < 1000


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/b", "..", ".", "", "a\n", "-", "x" * 65, "a\\b", "a.b", "a\0"])
def test_a_folder_of_evidence_has_a_plain_name(name):
    with pytest.raises(MalformedLine):
        ORDERS.parse(dump_message(Collect(name=name, seconds=1.0)))


class SealedPair:
    """A launcher's connection, and the other end of it, which sends what it likes."""

    def __init__(self, inbox: Inbox) -> None:
        local, remote = socket.socketpair()
        self.lines: list[str] = []
        self.local, self.remote = Connection(local, inbox, self.lines.append), Connection(remote, inbox)
        self.local.seal(b"a", b"b", inbox)
        self.remote.seal(b"b", b"a", inbox)

    def send(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.remote.sock.sendall(self.remote._seals[0].next(content) + content + b"\n")

    def close(self) -> None:
        self.local.close()
        self.remote.close()


def mutated(inbox: Inbox, draws: int):
    for number, message in enumerate(EXAMPLES[inbox]):
        values = mutations_of(json.loads(dump_message(message)), number, draws)
        yield from (value for value in values if len(json.dumps(value)) < 100_000)  # a socket's buffer takes no more


@pytest.mark.parametrize(("inbox", "message"), PAIRS, ids=lambda value: getattr(value, "kind", ""))
def test_a_mutated_message_is_read_whole_or_closes_its_connection(inbox, message, is_full_run):
    for value in mutations_of(json.loads(dump_message(message)), 0, 300 if is_full_run else 30):
        line = json.dumps(value).encode()
        try:
            received = inbox.parse(line)
        except MalformedLine as error:
            assert str(error).isprintable()
            continue
        assert asdict(received).keys() >= value.keys()  # nothing of it goes nowhere


def test_no_mutated_event_ends_the_first_machine(tmp_path, is_full_run, monkeypatch):
    monkeypatch.setattr(multi_node, "QUIET_SECONDS", 0.0)
    counts = dict(handled=0, closed=0)
    for value in mutated(EVENTS, 300 if is_full_run else 20):
        first, pair = Coordinator(), SealedPair(EVENTS)
        first.nodes = Nodes(2, 0, "127.0.0.1", 1)
        first.attempt, first.hosts[1], first.connections[1] = 1, "b", pair.local
        pair.send(value)
        orders = first.take_orders()
        assert all(isinstance(order, Message) for order in orders)
        counts["handled" if pair.local.is_open else "closed"] += 1
        assert pair.local.is_open or "sent a line" in pair.lines[0]
        reports = first.gather_reports(ExitReport(HUNG, evidence=EVIDENCE), NO_SIGNALS)
        combined = combine_reports(reports, tmp_path / "hangs")
        assert 0 <= combined.code <= 255
        pair.close()
    assert counts["handled"] > 20 and counts["closed"] > 200
    assert list(tmp_path.iterdir()) == []  # no folder for the summary was made


class OneRank:
    """The part of `Processes` that evidence is collected from."""

    first_rank, running = 1, {0: None}

    def __init__(self, request: int) -> None:
        empty = SimpleNamespace(read=lambda: "")
        self.rank_files = [SimpleNamespace(request_writer=request, stacks=empty, collectives=empty)]
        self.progress = {0: Activity("train", 3, 1.5)}

    def signal(self, number: int) -> None:
        pass

    def state(self, rank: int) -> str:
        return "S"


def test_no_mutated_order_ends_another_machine_or_writes_elsewhere(tmp_path, is_full_run, monkeypatch):
    monkeypatch.setattr(hangs, "ANSWER_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)
    reader, writer = os.pipe()
    counts = dict(handled=0, closed=0)
    for value in mutated(ORDERS, 300 if is_full_run else 20):
        worker, pair = Worker(Nodes(2, 1, "127.0.0.1", 1), 1, tmp_path / "secret"), SealedPair(ORDERS)
        worker.connection = pair.local
        pair.send(value)
        monitor = RankMonitor.__new__(RankMonitor)
        monitor.folder, monitor.hang_evidence, monitor.followed_at = tmp_path / "run" / "hangs", None, None
        monitor.processes = OneRank(writer)
        monitor.request_stop = lambda number, from_peer: None
        monitor.processes.exits, monitor.requests = [], SimpleNamespace(count=0)
        order = worker.next_order(NO_SIGNALS, lambda text: None, 0.0)
        assert order.kind in ("start", "leave") if isinstance(order, Message) else order.code
        for message in worker.take_orders():
            monitor.handle_message(message)
        pair.close()
        another = SealedPair(ORDERS)  # the same line while ranks run
        worker.connection = another.local
        another.send(value)
        for message in worker.take_orders():
            monitor.handle_message(message)
        counts["handled" if another.local.is_open else "closed"] += 1
        another.close()
    os.close(reader)
    os.close(writer)
    assert counts["handled"] > 10 and counts["closed"] > 100
    written = {path.relative_to(tmp_path).parts[:2] for path in tmp_path.rglob("*") if path.is_file()}
    assert written <= {("run", "hangs")} and not Path("/tmp/outside").exists()


def test_no_thread_of_a_rank_answers_while_its_stacks_are_written(tmp_path, monkeypatch):
    """The handler reads the frames of all threads, and one that runs meanwhile spoils them."""
    monkeypatch.setattr(hangs, "ANSWER_SECONDS", 0.0)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    processes, signals = OneRank(writer), []

    def signal(number: int) -> None:
        signals.append(number)
        with pytest.raises(BlockingIOError):  # nothing is requested yet
            os.read(reader, 1)

    processes.signal = signal
    hangs.collect_evidence(processes, tmp_path, "hang", 1.0)
    assert signals == [hangs.STACKS] and os.read(reader, 9) == b"?"
    os.close(reader)
    os.close(writer)


def test_a_log_of_collectives_in_another_form_is_an_empty_one():
    for text in (
        "",
        "null",
        "[]",
        '{"entries": 1}',
        '{"entries": [1]}',
        '{"entries": [{}]}',
        '{"pg_config": [1]}',
        "[" * 9999,
    ):
        assert hangs._parse_log(text) == CollectiveLog()


def test_the_end_that_a_rank_passes_on_is_read_strictly():
    assert read_end('{"code": 3, "reason": "a"}') == RunEnd(3, reason="a")
    assert len(read_end(json.dumps({"code": 3, "reason": "x" * 3_000_000})).reason) < 10_000  # else no machine takes it
    for text in ("", "[]", "null", "[" * 9999, '{"code": "3"}', '{"code": 3, "reason": 1}', '{"reason": "a"}'):
        assert read_end(text) is None


def test_memory_that_a_rank_has_damaged_is_read_as_its_start():
    table = ProgressTable(file := SharedFile("test"), 1)
    for row in (b"\xff" * 24, bytes([200]) + bytes(23), bytes(8) + b"\xff" * 8 + bytes(8), bytes(16) + b"\xff" * 8):
        os.pwrite(file.descriptor, row, 0)
        assert table[0] == Activity("start", 0, 0.0)
    file.close()
