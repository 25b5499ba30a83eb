"""The launchers of several machines decide together: two on this machine, with a rank each of a few lines."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from tests.support import jobs
from tests.test_launcher import RANK, end, gone, nothing_is_left, started
from tests.test_nodes import free_port
from tests.test_restarts import ATTEMPT, CRASH, in_the_folder
from torchtitan.errors import JobError
from torchtitan.launcher import company, restarts
from torchtitan.launcher.company import First, Line, Other
from torchtitan.launcher.ends import End, read_end, together
from torchtitan.launcher.hangs import Evidence
from torchtitan.launcher.nodes import Nodes
from torchtitan.launcher.restarts import supervise
from torchtitan.launcher.stops import SignalQueue
from torchtitan.launcher.watching import Watch
from torchtitan.leaving import CRASHED, HUNG, NON_FINITE, TERMINATED

assert nothing_is_left  # a fixture, for all tests here too

MACHINE = """
import os, sys
from dataclasses import replace
from pathlib import Path
from torchtitan.launcher import hangs, restarts, watching
from torchtitan.launcher.company import First, Other
from torchtitan.launcher.hangs import Limits
from torchtitan.launcher.nodes import Nodes
from torchtitan.launcher.processes import Processes
from torchtitan.launcher.restarts import follow, supervise
from torchtitan.launcher.stops import SignalQueue
from torchtitan.launcher.watching import Watch
watching.FOLLOW_SECONDS, watching.LOOK_SECONDS = {follow}, 0.2
restarts.FIRST_PAUSE_SECONDS, hangs.ANSWER_SECONDS = {pause}, 0.5
program, folder, index, port = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
queue, nodes = SignalQueue(), Nodes(2, index, "127.0.0.1", port)
company = Other(nodes, 1) if index else First(nodes, 1)
assert company.meet(queue, 100) is None
def watched(restart, port, listener=None):
    ranks = Processes([sys.executable, "-c", program], 1, restart, replace(nodes, port=port), listener)
    return Watch(ranks, queue, Limits(100, {limit}), folder / "hangs", company)
def newest():
    return int((folder / "saved").read_text()) if (folder / "saved").exists() else -1
def start(restart):
    nodes, listener = company.begin(restart)
    return watched(restart, nodes.port, listener)
if index:
    sys.exit(follow(lambda port, restart: watched(restart, port), queue, company))
code = supervise(start, queue, {budget}, newest, company)
company.dismiss(code)
sys.exit(code)
"""


def machines(
    program: str, folder, budget: int = 3, pause: float = 0.01, follow: float = 0.2, limit: float = 100
) -> list[subprocess.Popen]:
    """A launcher over a rank that runs `program`, twice."""
    program = RANK + ATTEMPT.format(folder=str(folder)) + program
    launcher = MACHINE.format(budget=budget, pause=pause, follow=follow, limit=limit)
    port = str(free_port())
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=jobs.ROOT, start_new_session=True)
    found = []
    for index in range(2):
        command = [sys.executable, "-c", launcher, program, str(folder), str(index), port]
        found.append(subprocess.Popen(command, **pipes))
    started.extend(found)
    return found


def ready(process: subprocess.Popen) -> int:
    """The process id of the machine's rank, once it says so."""
    return int(process.stdout.readline().split()[2])


def ends(found: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    return [end(process) for process in found]


def test_a_crash_on_any_machine_is_a_restart_of_all_from_what_is_saved(tmp_path):
    program = (
        f"tell('train', 8)\nif number == 0:\n  save(5)\n  {CRASH}\nsay(ranks.launcher.restart.cause); tell('end', 9)"
    )
    (code_0, out_0, err_0), (code_1, out_1, err_1) = ends(machines(program, tmp_path))
    assert (code_0, code_1) == (0, 0)
    assert out_0 == out_1 == "rank 1 was ended by SIGKILL\n" and err_1 == out_1
    assert err_0 == (
        "restart 1 of 3 in 0.01 s: rank 1 was ended by SIGKILL after step 7; going on from step 5, so that 2 steps are "
        "done again\n"
    )


def test_a_crash_that_comes_again_is_given_up_on_all_machines(tmp_path):
    first, other = ends(machines(f"ready('train'); {CRASH}", tmp_path, budget=1))
    assert (first[0], other[0]) == (5, 5) and other[1].count("ready") == 2
    assert "crashed 2 times without saving anything in between; given up" in first[2]


@pytest.mark.parametrize("late", [0, 1])
def test_a_hang_is_explained_by_what_is_seen_on_all_machines(late, tmp_path):
    program = (
        f"answer(ranks.launcher); ready('train'); "
        f"os.kill(os.getpid(), signal.SIGSTOP) if ranks.rank == {late} else wait()"
    )
    found = machines(program, tmp_path, budget=0, limit=1)
    pids = [ready(process) for process in found]
    first, other = ends(found)
    assert (first[0], other[0]) == (6, 6) and other[2] == ""
    assert f"rank {late} is stopped by a signal, in step 3 (train)" in first[2]
    written = in_the_folder(tmp_path)
    assert {f"rank-{rank}.stacks.txt" for rank in range(2)} < set(written) and "rank 1: " in written["summary.txt"]
    assert all(map(gone, pids))


@pytest.mark.parametrize("busy", [0, 1])
def test_a_machine_that_waits_while_another_works_does_not_hang(busy, tmp_path):
    """However long: as all ranks wait for one that exports, or compiles for longer than others. Who works goes on until
    the other is at its end, as that would have been freed before."""
    program = (
        f"ready('train')\nleft = folder / 'left'\nif ranks.rank != {busy}: time.sleep(3)\n"
        "else:\n  while not left.exists(): time.sleep(0.1); tell('train', 3)\n"
        "tell('end', 9); left.touch()"
    )
    first, other = ends(machines(program, tmp_path, budget=0, limit=2))
    assert (first[0], other[0]) == (0, 0), first[2]


def test_a_machine_whose_ranks_have_just_ended_collects_nothing():
    """The others have: an order that comes that late would make a hang of a run that ended well."""
    watch = Watch.__new__(Watch)
    watch.hung, watch.processes = None, SimpleNamespace(running={})
    watch.hear({"kind": "collect", "name": "now", "seconds": 5.0})
    assert watch.hung is None


def test_collected_is_once_when_all_machines_that_are_at_work_have_just_said_that_they_stand(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(company.time, "monotonic", lambda: now[0])
    first = First()
    first.nodes = Nodes(3, 0, "127.0.0.1", 1)

    def orders(index: int) -> list[str]:
        first._heed({"kind": "hung", "seconds": 5.0}, index)
        return [order["kind"] for order in first.look()]

    assert [orders(1), orders(0)] == [[], []]
    now[0] += company.FRESH_SECONDS + 1  # and since then the others have got on
    assert [orders(2), orders(1)] == [[], []]
    first._end_of(0, End(0, done=True))
    assert [orders(2), orders(1), orders(2)] == [["collect"], [], []]


@pytest.mark.parametrize("asked", [0, 1])
def test_a_stop_on_one_machine_is_one_on_all(asked, tmp_path):
    found = machines("ready('train'); wait_to_be_asked(); tell('end', 4); sys.exit(143)", tmp_path)
    for process in found:
        ready(process)
    found[asked].send_signal(signal.SIGUSR1)
    first, other = ends(found)
    assert (first[0], other[0]) == (138, 138) and "got 0 15" in first[1] and "got 1 15" in other[1]


@pytest.mark.parametrize("asked", [0, 1])
def test_a_stop_in_the_pause_ends_the_run_on_all_machines(asked, tmp_path):
    found = machines(f"ready('train'); {CRASH}", tmp_path, pause=100)
    assert "restart 1" in found[0].stderr.readline()
    found[asked].send_signal(signal.SIGTERM)
    assert [code for code, _, _ in ends(found)] == [143, 143]


@pytest.mark.parametrize("here", [True, False])
def test_a_stop_while_the_ends_come_in_ends_the_run(here, queue, monkeypatch):
    """Asked for when this machine's ranks have crashed and the other's are not known to have ended."""
    monkeypatch.setattr(restarts, "FIRST_PAUSE_SECONDS", 0.01)
    first, other = met(queue)

    def crashed(code: int) -> End:
        os.kill(os.getpid(), signal.SIGUSR1) if here else other.tell("stop", number=signal.SIGUSR1)
        threading.Timer(0.2, lambda: other.tell("end", **End(CRASHED, "b", followed=True).plain())).start()
        return End(code, "a")

    watches = [SimpleNamespace(until_the_end=lambda: CRASHED, end=crashed)]
    assert supervise(lambda restart: watches.pop(), queue, 3, lambda: -1, first) == 128 + signal.SIGUSR1
    assert [order["kind"] for order in heard(other, 1 + here)] == ["follow"] + ["stop"] * here
    first.dismiss(0)


def test_a_code_that_explains_itself_is_that_of_all_machines(tmp_path):
    program = "ready('train'); sys.exit(3) if ranks.rank else sys.exit(1)"
    first, other = ends(machines(program, tmp_path, follow=100))
    assert (first[0], other[0]) == (3, 3) and "restart" not in first[2]


def test_a_machine_that_is_gone_ends_the_run(tmp_path):
    found = machines("ready('train'); wait()", tmp_path)
    pids = [ready(process) for process in found]
    found[1].kill()
    code, _, err = end(found[0])
    host = socket.gethostname()
    assert code == 1 and err == f"machine 1 ({host}) gone; not started again without it\n"
    assert all(map(gone, pids))


def test_without_the_first_machine_the_others_end(tmp_path):
    found = machines("ready('train'); wait()", tmp_path)
    pids = [ready(process) for process in found]
    found[0].kill()
    code, _, err = end(found[1])
    assert code == 1 and err == "the first machine (127.0.0.1) is gone\n"
    assert all(map(gone, pids))


# Coming together


def heard(company: First | Other, count: int = 1) -> list[dict]:
    """What has come, once that many messages have: on a busy machine they take a moment, also over loopback."""
    found = []
    while len(found) < count and select.select(company.sockets, [], [], 60)[0]:
        found += company.look()
    return found


@pytest.fixture
def queue(monkeypatch):
    monkeypatch.setattr(company, "LATE_SECONDS", 0.1)
    made = SignalQueue()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("hello", "told"),
    [
        (dict(ranks=4), "NGPU, NNODES: given 4, 2 on machine 1 (b) and 2, 2 on the first"),
        (dict(count=3), "NGPU, NNODES: given 2, 3 on machine 1 (b) and 2, 2 on the first"),
        (dict(refused="optimizer.lr: ..."), "machine 1 (b) refuses the job:\noptimizer.lr: ..."),
        (dict(index=5), "NNODES: given 2, of which 1 did not come within 1 s to 127.0.0.1"),
        (dict(kind="GET / HTTP/1.1"), "NNODES: given 2, of which 1 did not come within 1 s to 127.0.0.1"),
    ],
    ids=str,
)
def test_who_cannot_take_part_is_told_by_name(hello, told, queue):
    first = First(Nodes(2, 0, "127.0.0.1", free_port()), 2)
    line = Line(socket.create_connection(("127.0.0.1", first.nodes.port)))
    line.send({"kind": "here", "index": 1, "host": "b", "ranks": 2, "count": 2} | hello)
    with pytest.raises(JobError) as error:
        first.meet(queue, 1 if "did not come" in told else 20)
    assert str(error.value).startswith(told)
    first.dismiss(2)
    assert line.receive() in ([{"kind": "leave", "code": 2}], [])


def test_one_node_rank_on_two_machines_is_refused(queue):
    first = First(Nodes(3, 0, "127.0.0.1", free_port()), 2)
    others = [Other(Nodes(3, 1, "127.0.0.1", first.nodes.port), 2) for _ in range(2)]
    for other in others:
        other.meet(queue, 20)
    with pytest.raises(JobError, match="NODE_RANK: given 1 on both .* and .*; allowed: on each machine another"):
        first.meet(queue, 20)
    first.dismiss(2)
    assert [other.next_order(queue)["code"] for other in others] == [2, 2]


def test_a_stranger_at_the_door_is_sent_away_and_the_others_come_in(queue):
    first = First(Nodes(2, 0, "127.0.0.1", free_port()), 1)
    strangers = [socket.create_connection(("127.0.0.1", first.nodes.port)) for _ in range(3)]
    strangers[0].sendall(b"\x16\x03\x01\n[1, 2]\n")
    strangers[1].sendall(b'{"kind": ["here"]}\n')
    other = Other(Nodes(2, 1, "127.0.0.1", first.nodes.port), 1)
    other.meet(queue, 20)
    assert first.meet(queue, 20) is None and set(first.hosts) == {0, 1}
    first.dismiss(0)


def met(queue) -> tuple[First, Other]:
    """The launchers of two machines, in one process."""
    first = First(Nodes(2, 0, "127.0.0.1", free_port()), 1)
    other = Other(Nodes(2, 1, "127.0.0.1", first.nodes.port), 1)
    other.meet(queue, 20)
    assert first.meet(queue, 20) is None
    return first, other


@pytest.mark.parametrize("told", ["stop", "nothing"])
def test_who_has_come_is_heard_while_others_are_waited_for(told, queue):
    """A stop, also in one breath with the greeting; and that it is gone."""
    first = First(Nodes(3, 0, "127.0.0.1", free_port()), 2)
    line = Line(socket.create_connection(("127.0.0.1", first.nodes.port)))
    said = [{"kind": "here", "index": 1, "host": "b", "ranks": 2, "count": 3}, {"kind": "stop", "number": 2}]
    line.connection.sendall(b"".join(json.dumps(each).encode() + b"\n" for each in said[: 1 + (told == "stop")]))
    if told == "stop":
        assert first.meet(queue, 20) == 2
    else:
        line.close()
        with pytest.raises(JobError, match=r"machine 1 \(b\) gone before all had come; start all machines again"):
            first.meet(queue, 20)
    first.dismiss(2)


def test_what_comes_in_one_breath_with_an_order_is_heard_later(queue):
    first, other = met(queue)
    stop = {"kind": "stop", "number": 2}
    orders = [{"kind": "start", "port": 5, "restart": None}, stop]
    first.lines[1].connection.sendall(b"".join(json.dumps(order).encode() + b"\n" for order in orders))
    assert [other.next_order(queue), other.look(), other.look()] == [orders[0], [stop], []]
    first.dismiss(0)


def test_a_stop_that_crosses_a_start_stops_what_was_started(queue):
    first, other = met(queue)
    first.lines[1].send({"kind": "start", "port": 5, "restart": None})
    os.kill(os.getpid(), signal.SIGTERM)
    assert other.next_order(queue)["kind"] == "start"
    stop = {"kind": "stop", "number": signal.SIGTERM}
    assert other.look() == [stop] and heard(first) == [stop]
    first.dismiss(0)


def test_a_first_machine_that_does_not_come_is_told(queue):
    other = Other(Nodes(2, 1, "127.0.0.1", port := free_port()), 1)
    with pytest.raises(JobError, match=f"HEAD_ADDR, HEAD_PORT: given 127.0.0.1, {port}, where no launcher answers"):
        other.meet(queue, 0.1)


# What an end is


def test_ends_come_over_the_wire_as_they_are():
    evidence = Evidence(3.0, "place", "", {1: ("train", 3, 1.5)}, {1: "S"}, {1: {"entries": []}})
    for told in (End(0, done=True), End(HUNG, evidence=evidence)):
        received = read_end(json.loads(json.dumps(told.plain())))
        assert received.evidence is None or received.evidence.states == {1: "S"}
        assert json.dumps(received.plain()) == json.dumps(told.plain())


@pytest.mark.parametrize(
    ("found", "code", "cause"),
    [
        ([End(0, done=True), End(0, done=True)], 0, ""),
        ([End(1, "a"), End(137, "b", by_signal=True)], 137, "b"),
        ([End(137, "a", by_signal=True, followed=True), End(1, "b")], 1, "b"),
        ([End(CRASHED, "a"), End(NON_FINITE, "b")], NON_FINITE, "b"),
        ([End(TERMINATED, "a"), End(CRASHED, "b")], CRASHED, "b"),
        ([End(0, "a", done=True), End(CRASHED, "b")], CRASHED, "b"),
    ],
    ids=str,
)
def test_of_several_ends_the_one_that_explains_most_counts(found, code, cause):
    end = together(found)
    assert (end.code, end.cause) == (code, cause)
    assert together(found[::-1]).code == code


def test_a_silent_machine_is_not_waited_for_for_ever(queue, monkeypatch):
    monkeypatch.setattr(company, "QUIET_SECONDS", 0.1)
    first, other = met(queue)
    end = together(first.gather(End(0, done=True), queue))
    assert end.code == 1 and first.gone == [f"machine 1 ({socket.gethostname()})"]
    assert heard(other)[-1] == {"kind": "follow"}
