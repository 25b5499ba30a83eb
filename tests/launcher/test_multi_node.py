"""Launchers of several machines act together: here two on this machine, each with one rank of a few lines."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import jobs
from tests.support.forked_job import Program
from tests.support.launched_ranks import end, has_ended, nothing_is_left, started
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
from tests.support.restarted_ranks import CRASH, read_evidence
from torchtitan.core.errors import JobError
from torchtitan.launcher import admission, multi_node, restarts
from torchtitan.launcher.admission import Greeting
from torchtitan.launcher.connection import Connection
from torchtitan.launcher.hangs import ExitReport, combine_reports
from torchtitan.launcher.messages import (
    Collect,
    Ended,
    Follow,
    Here,
    Hung,
    Leave,
    Start,
    Stop,
    Waiting,
    launcher_version,
)
from torchtitan.launcher.monitor import RankMonitor
from torchtitan.launcher.multi_node import Coordinator, Worker
from torchtitan.launcher.nodes import Nodes
from torchtitan.launcher.restarts import supervise
from torchtitan.process.exit import CRASHED, NON_FINITE, TERMINATED

assert nothing_is_left and queue  # fixtures, the first for all tests here too


def test_a_crash_on_any_machine_restarts_all_from_the_last_save(tmp_path):
    program = (
        f"tell('train', 8)\nif number == 0:\n  save(5)\n  {CRASH}\nsay(ranks.launcher.restart.cause); tell('end', 9)"
    )
    (code_0, out_0, err_0), (code_1, out_1, err_1) = wait_for_all(start_machines(program, tmp_path))
    assert (code_0, code_1) == (0, 0)
    assert out_0 == out_1 == f"rank 1 on {socket.gethostname()} was ended by SIGKILL\n" and err_1 == out_1
    assert err_0 == (
        f"restart 1 of 3 in 0.01 s: {out_0.strip()} after step 7; going on from step 5, so that 2 steps are done "
        "again\n"
    )


def test_repeated_crashes_end_the_run_on_all_machines(tmp_path):
    first, other = wait_for_all(start_machines(f"ready('train'); {CRASH}", tmp_path, budget=1))
    assert (first[0], other[0]) == (5, 5) and other[1].count("ready") == 2
    assert "crashed 2 times without saving anything in between; given up" in first[2]


@pytest.mark.parametrize("late", [0, 1])
def test_a_hang_is_explained_by_evidence_of_all_machines(late, tmp_path):
    program = (
        f"respond_to_launcher(ranks.launcher); ready('train'); "
        f"os.kill(os.getpid(), signal.SIGSTOP) if ranks.rank == {late} else wait()"
    )
    machines = start_machines(program, tmp_path, budget=0, limit=1)
    pids = [wait_until_ready(process) for process in machines]
    first, other = wait_for_all(machines)
    assert (first[0], other[0]) == (6, 6) and other[2] == ""
    assert f"rank {late} is stopped by a signal, in step 3 (train)" in first[2]
    evidence = read_evidence(tmp_path)
    assert {f"rank-{rank}.stacks.txt" for rank in range(2)} < set(evidence) and "rank 1: " in evidence["summary.txt"]
    assert all(map(has_ended, pids))


@pytest.mark.parametrize("busy", [0, 1])
def test_a_machine_that_waits_while_another_works_does_not_hang(busy, tmp_path):
    """All ranks may wait for one that exports or compiles, however long. The working rank ends after the waiting one,
    because a rank that ends would free the other from its wait."""
    program = (
        f"ready('train')\nleft = folder / 'left'\nif ranks.rank != {busy}: time.sleep(3)\n"
        "else:\n  while not left.exists(): time.sleep(0.1); tell('train', 3)\n"
        "tell('end', 9); left.touch()"
    )
    first, other = wait_for_all(start_machines(program, tmp_path, budget=0, limit=2))
    assert (first[0], other[0]) == (0, 0), first[2]


def test_a_machine_whose_ranks_have_just_ended_collects_nothing():
    """An order to collect evidence that arrives this late would report a successful run as a hang."""
    watch = RankMonitor.__new__(RankMonitor)
    watch.hang_evidence, watch.processes = None, SimpleNamespace(running={})
    watch.handle_message(Collect(name="now", seconds=5.0))
    assert watch.hang_evidence is None


def test_evidence_is_collected_once_all_working_machines_report_no_progress(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(multi_node.time, "monotonic", lambda: now[0])
    first = Coordinator()
    first.nodes = Nodes(3, 0, "127.0.0.1", 1)

    def orders(index: int) -> list[str]:
        first._handle(Hung(seconds=5.0), index)
        return [order.kind for order in first.take_orders()]

    assert [orders(1), orders(0)] == [[], []]
    now[0] += multi_node.FRESH_SECONDS + 1  # the report is stale: the others have made progress since
    assert [orders(2), orders(1)] == [[], []]
    first._record_exit(0, ExitReport(0, done=True))
    assert [orders(2), orders(1), orders(2)] == [["collect"], [], []]


@pytest.mark.parametrize("index", [0, 1])
def test_a_stop_on_one_machine_stops_all(index, tmp_path):
    machines = start_machines("ready('train'); wait_to_be_asked(); tell('end', 4); sys.exit(143)", tmp_path)
    for process in machines:
        wait_until_ready(process)
    machines[index].send_signal(signal.SIGUSR1)
    first, other = wait_for_all(machines)
    assert (first[0], other[0]) == (138, 138) and "got 0 15" in first[1] and "got 1 15" in other[1]


@pytest.mark.parametrize("index", [0, 1])
def test_a_stop_in_the_pause_ends_the_run_on_all_machines(index, tmp_path):
    machines = start_machines(f"ready('train'); {CRASH}", tmp_path, pause=100)
    assert "restart 1" in machines[0].stderr.readline()
    machines[index].send_signal(signal.SIGTERM)
    assert [code for code, _, _ in wait_for_all(machines)] == [143, 143]


@pytest.mark.parametrize("on_coordinator", [True, False])
def test_a_stop_while_exit_reports_are_gathered_ends_the_run(on_coordinator, queue, monkeypatch, tmp_path):
    """The stop comes after this machine's ranks crashed, while it is unknown whether the other's have ended."""
    monkeypatch.setattr(restarts, "FIRST_PAUSE_SECONDS", 0.01)
    first, other = connected_pair(queue, tmp_path)

    def crashed(code: int) -> ExitReport:
        os.kill(os.getpid(), signal.SIGUSR1) if on_coordinator else other.report_event(Stop(number=signal.SIGUSR1))
        threading.Timer(0.2, lambda: other.report_event(Ended(report=ExitReport(CRASHED, "b", followed=True)))).start()
        return ExitReport(code, "a")

    watches = [SimpleNamespace(wait=lambda: CRASHED, exit_report=crashed, folder=tmp_path)]
    assert supervise(lambda restart: watches.pop(), queue, lambda: 3, lambda: -1, first).code == 128 + signal.SIGUSR1
    assert [order.kind for order in receive(other, 1 + on_coordinator)] == ["follow"] + ["stop"] * on_coordinator
    first.end_run(0)


def test_a_deterministic_failure_gives_all_machines_its_exit_code(tmp_path):
    program = "ready('train'); sys.exit(3) if ranks.rank else sys.exit(1)"
    first, other = wait_for_all(start_machines(program, tmp_path, follow=100))
    assert (first[0], other[0]) == (3, 3) and "restart" not in first[2]


def test_a_machine_that_is_gone_ends_the_run(tmp_path):
    machines = start_machines("ready('train'); wait()", tmp_path)
    pids = [wait_until_ready(process) for process in machines]
    machines[1].kill()
    code, _, err = end(machines[0])
    host = socket.gethostname()
    assert err == f"machine 1 ({host}) gone; {restarts._THE_END}\n"
    assert code == 1 and all(map(has_ended, pids))


def test_without_the_first_machine_the_others_end(tmp_path):
    machines = start_machines("ready('train'); wait()", tmp_path)
    pids = [wait_until_ready(process) for process in machines]
    machines[0].kill()
    code, _, err = end(machines[1])
    assert code == 1 and err == "the first machine (127.0.0.1) is gone\n"
    assert all(map(has_ended, pids))


# Connecting


def receive(company: Coordinator | Worker, count: int = 1) -> list[dict]:
    """Receive messages until there are `count`. On a busy machine they take a moment even over loopback."""
    messages = []
    while len(messages) < count and select.select(company.sockets, [], [], 60)[0]:
        messages += company.take_orders()
    return messages


def connect_and_greet(first: Coordinator, path: Path, hello: dict) -> Connection:
    """Connect as a machine that knows the secret, send its greeting, and return the connection."""
    while not path.exists():
        time.sleep(0.01)
    line = admission.connect(Nodes(2, 1, "127.0.0.1", first.nodes.port), path, NO_SIGNALS)
    line.send(Here(**dict(index=1, host="b", ranks=2, count=2) | hello))
    return line


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        (dict(ranks=4), "NGPU, NNODES: given 4, 2 on machine 1 (b) and 2, 2 on the first"),
        (dict(count=3), "NGPU, NNODES: given 2, 3 on machine 1 (b) and 2, 2 on the first"),
        (dict(refused="optimizer.lr: ..."), "machine 1 (b) refuses the job:\noptimizer.lr: ..."),
        (dict(index=5), "NNODES: given 2, but machine 1 did not connect to 127.0.0.1"),
        (dict(kind="GET / HTTP/1.1"), "NNODES: given 2, but machine 1 did not connect to 127.0.0.1"),
    ],
    ids=str,
)
def test_a_machine_that_cannot_join_is_named(hello, message, queue, tmp_path):
    first, path = Coordinator(Nodes(2, 0, "127.0.0.1", free_port()), 2), tmp_path / "launch.secret"
    seconds = 1 if "did not connect" in message else 20
    error, line = run_concurrently(
        lambda: first.wait_for_workers(queue, seconds, path), lambda: connect_and_greet(first, path, hello)
    )
    assert isinstance(error, JobError) and str(error).startswith(message), error
    first.end_run(2)
    assert line.receive() in ([Leave(code=2)], []) and not path.exists()


def test_one_node_rank_on_two_machines_is_refused(queue, tmp_path):
    first, path = Coordinator(Nodes(3, 0, "127.0.0.1", free_port()), 2), tmp_path / "launch.secret"
    workers = [Worker(Nodes(3, 1, "127.0.0.1", first.nodes.port), 2, path) for _ in range(2)]
    meetings = [lambda other=other: other.join(NO_SIGNALS, 20) for other in workers]
    error, *outcomes = run_concurrently(lambda: first.wait_for_workers(queue, 20, path), *meetings)
    assert re.match("NODE_RANK: given 1 on both .* and .*; allowed: on each machine another", str(error))
    first.end_run(2)
    assert outcomes == [None, None] and [other.next_order(queue, print).code for other in workers] == [2, 2]


def connected_pair(queue, folder: Path, port: int = 0) -> tuple[Coordinator, Worker]:
    """The launchers of two machines, in one process. `port`: where the other looks for the first."""
    first, path = Coordinator(Nodes(2, 0, "127.0.0.1", free_port()), 1), folder / "launch.secret"
    other = Worker(Nodes(2, 1, "127.0.0.1", port or first.nodes.port), 1, path)
    assert run_concurrently(lambda: first.wait_for_workers(queue, 20, path), lambda: other.join(NO_SIGNALS, 20)) == [
        None,
        None,
    ]
    return first, other


@pytest.mark.parametrize("event", ["stop", "nothing"])
def test_machines_that_joined_are_heard_while_others_are_awaited(event, queue, tmp_path):
    """A stop is heard even if it arrives together with the greeting; so is a lost connection."""
    first, path = Coordinator(Nodes(3, 0, "127.0.0.1", free_port()), 2), tmp_path / "launch.secret"

    def join() -> None:
        line = connect_and_greet(first, path, {"count": 3})
        line.send(Stop(number=2)) if event == "stop" else line.close()

    outcome, _ = run_concurrently(lambda: first.wait_for_workers(queue, 20, path), join)
    if event == "stop":
        assert outcome == 2
    else:
        assert str(outcome) == "machine 1 (b) gone before all had come; start all machines again"
    first.end_run(2)


def test_a_first_machine_that_refuses_its_job_sends_the_others_home(queue, tmp_path, monkeypatch):
    """There is no secret then, because a refused job leaves no folder: it is there only while the others are told."""
    monkeypatch.setattr(multi_node, "LATE_SECONDS", 20)
    first = Coordinator(Nodes(2, 0, "127.0.0.1", free_port()), 1)
    other = Worker(Nodes(2, 1, "127.0.0.1", first.nodes.port), 1, tmp_path / "a" / "run" / "launch.secret")
    path = other.secret_file
    assert run_concurrently(lambda: first.end_run(2, path), lambda: other.join(NO_SIGNALS, 20)) == [None, None]
    assert not (tmp_path / "a").exists()
    assert other.next_order(queue, print).code == 2


# Strangers


def receive_message(connection: socket.socket) -> dict:
    return json.loads(connection.makefile().readline())


def is_closed(connection: socket.socket) -> bool:
    """Return True if the first machine has closed the connection."""
    connection.settimeout(30)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


STRANGE_MESSAGES = {
    "nested": b"[" * 200_000 + b"\n",
    "endless": b"x" * 200_000,
    "tls": b"\x16\x03\x01\n[1, 2]\n",
    "no text": b'{"kind": ["here"]}\n',
    "another machine": b'{"kind": "here", "index": 1, "host": "b", "ranks": 1, "count": 2}\n',
    "a proof of nothing": b'{"kind": "proof", "nonce": 3, "proof": null}\n',
    "a wrong proof": json.dumps({"kind": "proof", "nonce": "0" * 64, "proof": "\u00e9" * 64}).encode() + b"\n",
}


@pytest.mark.parametrize("sent", STRANGE_MESSAGES.values(), ids=STRANGE_MESSAGES)
def test_a_stranger_is_refused_and_machines_are_admitted(sent, queue, tmp_path):
    """Whatever it sends, a stranger is not admitted: a machine would learn the store's port."""
    first, path = Coordinator(Nodes(2, 0, "127.0.0.1", free_port()), 1), tmp_path / "launch.secret"
    other = Worker(Nodes(2, 1, "127.0.0.1", first.nodes.port), 1, path)
    stranger = socket.create_connection(("127.0.0.1", first.nodes.port))

    def join() -> tuple:
        refused = False
        try:
            stranger.sendall(sent)
        except OSError:
            refused = True
        return is_closed(stranger) or refused, other.join(NO_SIGNALS, 20)

    assert run_concurrently(lambda: first.wait_for_workers(queue, 60, path), join) == [None, (True, None)]
    assert set(first.hosts) == {0, 1} and first.hosts[1] == socket.gethostname()
    first.end_run(0)


def test_a_recorded_conversation_proves_nothing(queue, tmp_path):
    """A replayed proof of another machine is refused, and so is the coordinator's own proof sent back."""
    first, path = Coordinator(Nodes(2, 0, "127.0.0.1", free_port()), 1), tmp_path / "launch.secret"
    path.write_bytes(admission.create_secret(path))
    first._admission.key = path.read_bytes()
    nonces = []

    def greeting(first_nonce: str, other_nonce: str) -> Greeting:
        return Greeting(first_nonce, other_nonce, launcher_version(), launcher_version())

    def answer(nonce: str) -> socket.socket:
        peer = socket.create_connection(("127.0.0.1", first.nodes.port))
        first._admission.poll()
        nonces.append(receive_message(peer)["nonce"])
        proof = greeting(nonces[0], nonce).proof(path.read_bytes(), "other machine")
        message = {"kind": "proof", "nonce": nonce, "version": launcher_version(), "proof": proof}
        peer.sendall(json.dumps(message).encode() + b"\n")
        first._admission.poll()
        return peer

    genuine, replayed = answer("1" * 64), answer("1" * 64)
    assert receive_message(genuine)["kind"] == "welcome" and receive_message(replayed)["kind"] == "stranger"
    assert nonces[0] != nonces[1] and first._admission.num_strangers == 1
    # the proof contains the role, so the coordinator's own proof sent back is no proof
    said = greeting(nonces[1], "2" * 64)
    assert not said.is_proof(said.proof(path.read_bytes(), "first machine"), path.read_bytes(), "other machine")
    first.end_run(0)


def test_an_impostor_of_the_coordinator_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(multi_node, "FOLDER_SECONDS", 0.5)
    path = tmp_path / "launch.secret"
    admission.create_secret(path)
    listener = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        listener.settimeout(3)
        try:
            while True:
                peer, _ = listener.accept()
                challenge = {"kind": "challenge", "nonce": "0" * 64, "version": launcher_version()}
                peer.sendall(json.dumps(challenge).encode() + b"\n")
                peer.sendall(json.dumps({"kind": "welcome", "proof": "0" * 64}).encode() + b"\n")
        except TimeoutError:
            return

    other = Worker(Nodes(2, 1, "127.0.0.1", listener.getsockname()[1]), 1, path)
    _, error = run_concurrently(pretend, lambda: other.join(NO_SIGNALS, 20))
    assert re.match("job.dump_folder: not the folder of the first machine .127.0.0.1.: it does not know", str(error))
    assert other.connection is None


def test_strangers_are_limited_in_number_and_time(queue, tmp_path, monkeypatch):
    """A hundred silent connections keep no machine out."""
    monkeypatch.setattr(admission, "MAX_CANDIDATES", 8)
    monkeypatch.setattr(admission, "INTRODUCTION_SECONDS", 2)
    first, path = Coordinator(Nodes(3, 0, "127.0.0.1", free_port()), 1), tmp_path / "launch.secret"
    strangers = [socket.create_connection(("127.0.0.1", first.nodes.port)) for _ in range(100)]
    other = Worker(Nodes(3, 1, "127.0.0.1", first.nodes.port), 1, path)
    socket_counts = []

    def wait(seconds, also=()):
        socket_counts.append(len(also))
        return NO_SIGNALS.wait(seconds, also)

    watched = SimpleNamespace(wait=wait)
    error, outcome = run_concurrently(
        lambda: first.wait_for_workers(watched, 6, path), lambda: other.join(NO_SIGNALS, 20)
    )
    assert outcome is None and "but machine 2 did not connect" in str(error)
    assert max(socket_counts) <= 8 + 2 and socket_counts[-1] == 2  # the listener and the machine
    assert all(map(is_closed, strangers))
    first.end_run(2)


def test_the_secret_is_in_a_file_of_its_owner_alone_and_new_at_every_launch(tmp_path):
    path = tmp_path / "launch.secret"
    before = admission.create_secret(path)
    assert path.stat().st_mode & 0o777 == 0o600 and admission.read_secret(path) == before and len(before) == 64
    assert admission.create_secret(path) != before
    path.chmod(0o644)
    with pytest.raises(JobError, match="with mode 0644, so that other users may know it; allowed: 0600"):
        admission.read_secret(path)
    path.unlink()
    assert admission.read_secret(path) is None
    path.symlink_to("/dev/zero")
    assert admission.read_secret(path) is None
    assert admission.create_secret(path) and not path.is_symlink()  # the link is replaced and not followed
    path.unlink()
    os.mkfifo(path, 0o600)
    assert admission.read_secret(path) is None  # does not wait for a writer
    with pytest.raises(JobError, match=r"job.dump_folder: .* cannot be written \(No such file or directory\)"):
        admission.create_secret(tmp_path / "none" / "launch.secret")


def test_a_file_system_without_permissions_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(admission, "_OTHER_USERS", 0o777)  # as if its files were open to everybody
    with pytest.raises(JobError, match="would be open to other users .* keeps the permissions of files"):
        admission.create_secret(tmp_path / "launch.secret")
    assert not (tmp_path / "launch.secret").exists()


@pytest.mark.parametrize("content", ["nothing", "another"])
def test_a_folder_that_is_not_shared_is_reported_on_both_machines(content, queue, tmp_path, monkeypatch):
    monkeypatch.setattr(multi_node, "FOLDER_SECONDS", 0.5)
    first, path = Coordinator(Nodes(2, 0, "127.0.0.1", free_port()), 1), tmp_path / "b" / "launch.secret"
    path.parent.mkdir()
    if content == "another":
        admission.create_secret(path)
    other = Worker(Nodes(2, 1, "127.0.0.1", first.nodes.port), 1, path)
    at_first, at_other = run_concurrently(
        lambda: first.wait_for_workers(queue, 5, tmp_path / "launch.secret"), lambda: other.join(NO_SIGNALS, 60)
    )
    problem = "it does not know" if content == "another" else ""
    assert str(at_other).startswith(f"job.dump_folder: not the folder of the first machine (127.0.0.1): {problem}")
    assert "allowed: one folder that all machines share" in str(at_other)
    hint = "could not prove that they belong to this run: give a job.dump_folder that all machines share"
    assert "but machine 1 did not connect" in str(at_first) and (hint in str(at_first)) == (content == "another")
    first.end_run(2)


# Orders


def test_messages_sent_together_with_an_order_are_not_lost(queue, tmp_path):
    first, other = connected_pair(queue, tmp_path)
    stop = Stop(number=2)
    orders = [Start(attempt=1, port=5, restart=None), stop]
    for order in orders:
        first.connections[1].send(order)
    time.sleep(0.1)  # both have arrived
    assert [other.next_order(queue, print), other.take_orders(), other.take_orders()] == [orders[0], [stop], []]
    first.end_run(0)


def test_a_stop_that_crosses_a_start_stops_what_was_started(queue, tmp_path):
    first, other = connected_pair(queue, tmp_path)
    first.connections[1].send(Start(attempt=1, port=5, restart=None))
    os.kill(os.getpid(), signal.SIGTERM)
    assert other.next_order(queue, print).kind == "start"
    stop = Stop(number=signal.SIGTERM)
    assert other.take_orders() == [stop] and receive(first) == [stop]
    first.end_run(0)


def test_a_missing_coordinator_is_reported(queue, tmp_path):
    other = Worker(Nodes(2, 1, "127.0.0.1", port := free_port()), 1, tmp_path / "launch.secret")
    with pytest.raises(JobError, match=f"HEAD_ADDR, HEAD_PORT: given 127.0.0.1, {port}, where no launcher answers"):
        other.join(queue, 0.1)


# A network that is cut


def start_machines_with_proxy(folder: Path, program: str, **options) -> tuple[Proxy, list[subprocess.Popen]]:
    """Start two launchers that are connected through a proxy."""
    proxy = Proxy(free_port(), free_port())
    return proxy, start_machines(program, folder, ports=(proxy.target_port, proxy.port), **options)


@pytest.mark.parametrize("noticed_by", ["both", "the other"])
def test_a_restored_network_restarts_the_run_from_the_last_save(noticed_by, tmp_path):
    """This holds too when one machine notices the cut seconds before the first one does."""
    proxy, machines = start_machines_with_proxy(tmp_path, FINISH_AFTER_RESTART, rejoin=100)
    try:
        pids = [wait_until_ready(process) for process in machines]
        proxy.cut(only_caller_sees=noticed_by == "the other")
        assert "is gone; trying for up to 100 s to reach it again (job.rejoin_seconds)" in machines[1].stderr.readline()
        assert has_ended(pids[1])  # its ranks have ended before it looks for the first machine
        assert noticed_by == "the other" or has_ended(pids[0])
        proxy.heal()
        deadline = time.monotonic() + 60
        while noticed_by == "the other" and proxy.accepted < 4 and time.monotonic() < deadline:
            time.sleep(0.05)  # it reconnects to a launcher that has not noticed yet; its ranks still work
        assert noticed_by == "both" or not has_ended(pids[0], 0.1)
        proxy.reset_held()
        first, other = wait_for_all(machines)
    finally:
        proxy.close()
    host = socket.gethostname()
    assert (first[0], other[0]) == (0, 0), (first, other)
    waits, back, restart = first[2].splitlines()
    assert waits == f"machine 1 ({host}) gone; waiting for a new connection for up to 100 s (job.rejoin_seconds)"
    assert re.fullmatch(rf"machine 1 \({host}\) back after \d+ s", back)
    assert restart.startswith(
        f"restart 1 of 3 in 0.01 s: machine 1 ({host}) is gone after step 7; going on from step 5"
    )
    assert re.search(r"the first machine \(127.0.0.1, port \d+\) is back after \d+ s", other[2])
    assert first[1].endswith("again 1\n") and other[1].endswith("again 1\n") and all(map(has_ended, pids))


def test_a_network_that_does_not_come_back_ends_the_run_on_both_machines(tmp_path):
    proxy, machines = start_machines_with_proxy(tmp_path, FINISH_AFTER_RESTART, rejoin=2)
    try:
        pids = [wait_until_ready(process) for process in machines]
        proxy.cut()
        first, other = wait_for_all(machines)
    finally:
        proxy.close()
    assert (first[0], other[0]) == (1, 1) and all(map(has_ended, pids))
    assert first[2].splitlines()[-1] == (
        f"machine 1 ({socket.gethostname()}) gone for 2 s (job.rejoin_seconds); {restarts._THE_END}"
    )
    assert other[2].splitlines()[-1] == (
        f"the first machine (127.0.0.1) is gone for 2 s (job.rejoin_seconds); {restarts._THE_END}"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_the_network_is_cut_is_served_at_once(number, tmp_path):
    proxy, machines = start_machines_with_proxy(tmp_path, FINISH_AFTER_RESTART, rejoin=1000)
    try:
        for process in machines:
            wait_until_ready(process)
        proxy.cut()
        for process in machines:
            assert "job.rejoin_seconds" in process.stderr.readline()
            process.send_signal(number)
        assert [code for code, _, _ in wait_for_all(machines)] == [128 + number] * 2
    finally:
        proxy.close()


def test_a_launcher_that_is_started_again_joins_the_run(tmp_path):
    proxy, machines = start_machines_with_proxy(tmp_path, FINISH_AFTER_RESTART, rejoin=100)
    try:
        for process in machines:
            wait_until_ready(process)
        machines[1].kill()
        assert "gone; waiting" in machines[0].stderr.readline()
        restarted = Program(*machines[1].args, folder=jobs.ROOT)
        started.append(restarted)
        first, other = wait_for_all([machines[0], restarted])
    finally:
        proxy.close()
    assert (first[0], other[0]) == (0, 0) and other[1] == "again 1\n", (first, other)


def test_a_machine_that_knows_of_the_cut_before_the_first_takes_its_old_place(queue, tmp_path):
    """Machine 1's connection is closed on both ends; machine 2 reconnects while its old connection still seems open."""
    first, path = Coordinator(Nodes(3, 0, "127.0.0.1", free_port()), 1), tmp_path / "launch.secret"
    workers = [Worker(Nodes(3, index, "127.0.0.1", first.nodes.port), 1, path) for index in (1, 2)]
    meetings = [lambda other=other: other.join(NO_SIGNALS, 20) for other in workers]
    assert run_concurrently(lambda: first.wait_for_workers(queue, 20, path), *meetings) == [None] * 3
    first.order_start(None)[1].close()
    for other in workers:
        assert other.next_order(queue, print).attempt == 1
    old, replaced = workers[1].connection, first.connections[2]
    workers[0].connection.close()
    assert select.select(first.sockets, [], [], 60)[0] and first.take_orders() == [Follow()]
    texts = []

    def rejoin_last() -> int | None:
        """The first machine waits only until those that it knows to be lost are back, so machine 1 comes last."""
        deadline = time.monotonic() + 60
        while first.connections[2] is replaced and time.monotonic() < deadline:
            time.sleep(0.01)
        return workers[0].rejoin(NO_SIGNALS, 60, texts.append)

    back = [lambda: workers[1].rejoin(NO_SIGNALS, 60, texts.append), rejoin_last]
    assert run_concurrently(lambda: first.wait_for_lost(queue, 60, texts.append), *back) == [None] * 3
    assert first.lost_machines == [] and set(first.connections) == {1, 2} and old.is_open
    # a late message about the old start is not taken as one about the new start
    first.order_start(None)[1].close()
    workers[0].report_event(Ended(report=ExitReport(CRASHED, "of the first start")))
    assert workers[0].next_order(queue, print).attempt == 2
    workers[0].report_event(Ended(report=ExitReport(0, "of the second", done=True)))
    workers[1].connection.close()
    outcomes = first.gather_reports(ExitReport(0, done=True), queue)
    assert sorted(end.cause for end in outcomes if end.code == 0) == ["", "of the second"]
    assert [end.cause for end in outcomes if end.code] == [f"machine 2 ({socket.gethostname()}) is gone"]
    first.end_run(0)


def test_joined_machines_are_told_who_is_awaited(queue, tmp_path, monkeypatch):
    """Each message extends their patience."""
    first, other = connected_pair(queue, tmp_path)
    for text in ("waiting for machine 2", "still"):
        first.connections[1].send(Waiting(text=text))
    threading.Timer(1.5, first.connections[1].send, [Leave(code=3)]).start()
    texts = []
    first.connections[1].send(Waiting(text="1"))
    threading.Timer(0.8, first.connections[1].send, [Waiting(text="2")]).start()
    assert other.next_order(queue, texts.append, patience=1.2).code == 3
    assert texts == ["waiting for machine 2", "still", "1", "2"]
    first.end_run(0)


def test_progress_is_reported_while_a_machine_is_awaited(queue, tmp_path, monkeypatch):
    monkeypatch.setattr(multi_node, "REPORT_SECONDS", 0.4)
    first, other = connected_pair(queue, tmp_path)
    first.attempt = other.attempt = 1
    other.connection.close()
    assert select.select(first.sockets, [], [], 60)[0] and first.take_orders()
    texts, heard = [], []
    assert first.wait_for_lost(queue, 2, texts.append) is None and first.lost_machines
    assert re.fullmatch(r"waiting for machine 1 \(.*\): \d+ of 2 s", texts[1])
    assert other.rejoin(queue, 2, heard.append) is None and not other.sockets
    assert re.fullmatch(r"trying to reach the first machine \(.*\): \d+ of 2 s \(Connection refused\)", heard[1])
    first.end_run(1)


# Exit reports


@pytest.mark.parametrize(
    ("reports", "code", "cause"),
    [
        ([ExitReport(0, done=True), ExitReport(0, done=True)], 0, ""),
        ([ExitReport(1, "a"), ExitReport(137, "b", by_signal=True)], 137, "b"),
        ([ExitReport(137, "a", by_signal=True, followed=True), ExitReport(1, "b")], 1, "b"),
        ([ExitReport(CRASHED, "a"), ExitReport(NON_FINITE, "b")], NON_FINITE, "b"),
        ([ExitReport(TERMINATED, "a"), ExitReport(CRASHED, "b")], CRASHED, "b"),
        ([ExitReport(0, "a", done=True), ExitReport(CRASHED, "b")], CRASHED, "b"),
    ],
    ids=str,
)
def test_the_most_informative_exit_report_wins(reports, code, cause):
    end = combine_reports(reports, Path("unused"))
    assert (end.code, end.cause) == (code, cause)
    assert combine_reports(reports[::-1], Path("unused")).code == code


def test_a_reason_that_all_machines_have_is_of_no_rank():
    reports = [
        ExitReport(4, end_reason=reason, end_by=f"rank {rank}") for rank, reason in enumerate(("nan", "nan", "no"))
    ]
    assert combine_reports(reports[:2], Path("unused")).end_by == ""
    assert combine_reports(reports[1:], Path("unused")).end_by == "rank 1"


def test_a_silent_machine_is_not_waited_for_for_ever(queue, monkeypatch, tmp_path):
    monkeypatch.setattr(multi_node, "QUIET_SECONDS", 0.1)
    first, other = connected_pair(queue, tmp_path)
    end = combine_reports(first.gather_reports(ExitReport(0, done=True), queue), tmp_path)
    assert end.code == 1 and first.lost_machines == [f"machine 1 ({socket.gethostname()})"]
    assert receive(other)[-1] == Follow()
