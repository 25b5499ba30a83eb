"""Hangs: the rank that is behind is named, work that takes long is no hang, and a launcher that was stopped itself
(SIGSTOP, docker pause) gives its ranks the time that it has missed.
"""

import json
import os
import re
import signal
import time

import pytest

from tests.support.launched_ranks import end, has_ended, nothing_is_left, ready
from tests.support.restarted_ranks import read_evidence, supervise
from torchtitan.launcher import hangs
from torchtitan.launcher.hangs import AwakeClock, HangLimits
from torchtitan.launcher.nodes import Nodes
from torchtitan.launcher.processes import Processes
from torchtitan.process.heartbeat import Activity

assert nothing_is_left  # a fixture

STEPS = "ready('train')\nfor step in range(30): tell('train', step); time.sleep(0.1)\ntell('end', 30)"


def test_ranks_that_were_stopped_together_with_their_launcher_do_not_hang(tmp_path):
    launcher = supervise(STEPS, tmp_path, budget=0, limit=2)
    pids = [launcher.pid, *ready(launcher).values()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4)
    for (
        pid
    ) in pids:  # the launcher goes on first, and would find that no rank has reported anything for twice the limit
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.3)
    code, _, err = end(launcher)
    assert (code, err) == (0, "")


def test_a_rank_that_stays_stopped_hangs_after_its_time(tmp_path):
    launcher = supervise("respond_to_launcher(ranks.launcher); " + STEPS + "\nwait()", tmp_path, budget=0, limit=2)
    pids = [launcher.pid, *ready(launcher).values()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(launcher.pid, signal.SIGCONT)
    began = time.monotonic()
    code, _, err = end(launcher)
    assert code == hangs.HUNG and "ranks 0, 1 are stopped by a signal" in err and time.monotonic() - began > 1


@pytest.fixture
def now(monkeypatch) -> list[float]:
    times = [100.0]
    monkeypatch.setattr(hangs.time, "monotonic", lambda: times[0])
    return times


def test_the_clock_leaves_out_the_time_in_which_it_was_stopped(now):
    clock = AwakeClock()
    for seconds in (0.5, 0.5, 60.0, 0.5):
        now[0] += seconds
        clock.tick()
    assert clock.seconds(100.0, now[0]) == 2.0  # of the stop, half a second counts
    assert clock.seconds(130.0, now[0]) == 0.5 and clock.seconds(161.0, now[0]) == 0.5
    assert clock.seconds(90.0, 101.0) == 11.0


def test_the_clock_leaves_out_a_stop_since_the_last_tick(now):
    """A launcher may be stopped between its poll and its look at the ranks."""
    clock = AwakeClock()
    now[0] += 60.0
    assert clock.seconds(100.0, now[0]) == 0.5


def test_time_passes_where_the_launcher_seldom_runs(now):
    """A machine too busy to poll must not hide a hang for ever."""
    clock = AwakeClock()
    for _ in range(3000):
        now[0] += 5.0
        clock.tick()
    assert clock.seconds(100.0, now[0]) >= 1000


WAIT_IN_PHASES = (
    "respond_to_launcher(ranks.launcher); say('here'); "
    "tell('{0}' if ranks.rank else '{1}', {2} if ranks.rank else {3}); wait()"
)


@pytest.mark.parametrize(
    ("rank_1", "rank_0"),
    [
        (("data", 7), ("train", 7)),
        (("train", 6), ("data", 7)),
        (("validate", 7), ("save", 7)),
        (("save", 6), ("data", 7)),
    ],
)
def test_the_rank_that_is_behind_is_named(rank_1, rank_0, tmp_path):
    program = WAIT_IN_PHASES.format(rank_1[0], rank_0[0], rank_1[1], rank_0[1])
    code, out, err = end(supervise(program, tmp_path, budget=0, limit=1))
    assert code == 6 and out == "here\n" * 2
    assert err.startswith("hang: no rank has got on for ")
    assert (
        f"rank 1 is behind, in step {rank_1[1]} ({rank_1[0]}); stacks and collectives of all ranks: {tmp_path}" in err
    )
    evidence = read_evidence(tmp_path)
    assert set(evidence) == {"summary.txt"} | {
        f"rank-{r}.{w}" for r in (0, 1) for w in ("stacks.txt", "collectives.json")
    }
    assert all("in wait" in evidence[f"rank-{rank}.stacks.txt"] for rank in (0, 1))
    assert f"rank 0: in step {rank_0[1]} ({rank_0[0]}), process S" in evidence["summary.txt"]


def test_a_rank_that_is_stopped_is_named_and_not_the_one_that_waits_for_it(tmp_path):
    program = (
        "respond_to_launcher(ranks.launcher); ready('train'); "
        "os.kill(os.getpid(), signal.SIGSTOP) if ranks.rank == 0 else wait()"
    )
    process = supervise(program, tmp_path, budget=0, limit=1)
    pids = ready(process)
    code, out, err = end(process)
    assert code == 6 and "rank 0 is stopped by a signal, in step 3 (train)" in err
    assert 1 <= int(re.search(r"no rank has got on for (\d+) s", err)[1]) < 100  # the limit of a start
    assert has_ended(pids[0]) and has_ended(pids[1])


def test_a_rank_that_holds_the_gil_still_shows_its_stack(tmp_path):
    hold = "import ctypes\ndef hold():\n  ctypes.PyDLL(None).sleep(1000)\n"
    program = f"{hold}respond_to_launcher(ranks.launcher); tell('train', 3); hold() if ranks.rank else wait()"
    assert end(supervise(program, tmp_path, budget=0, limit=1))[0] == 6
    assert "in hold" in read_evidence(tmp_path)["rank-1.stacks.txt"]


def test_a_rank_that_writes_a_large_file_is_no_hang(tmp_path):
    """It sends no heartbeat for longer than the limit, while the other rank waits for it and ends first."""
    program = """
tell('save', 3)
left = folder / 'left'
if ranks.rank:
    with open(folder / 'large', 'wb', buffering=0) as file:
        while not left.exists():
            time.sleep(0.1)
            file.write(b'x')
else:
    time.sleep(2)
tell('end', 3)
left.touch()
"""
    assert end(supervise(program, tmp_path, budget=0, limit=1.5)) == (0, "", "")


BURN = "until = time.monotonic() + 3\nwhile time.monotonic() < until: sum(range(10**5))\n"


@pytest.mark.parametrize("where", ["in the rank", "in a child process"])
def test_a_rank_that_compiles_is_no_hang(where, tmp_path):
    """It sends no heartbeat for longer than the limit of a start, but it or a child process uses CPU time.

    Other tests may compete for the cores, so a fiftieth of a core over a longer time is enough here.
    """
    program = BURN if where == "in the rank" else "import subprocess\n"
    if where != "in the rank":
        program += f"subprocess.run([sys.executable, '-c', {'import time' + chr(10) + BURN!r}])\n"
    program = f"tell('first', 1)\n{program}tell('end', 1)"
    assert end(supervise(program, tmp_path, budget=0, start=1, answer=1, busy=0.02)) == (0, "", "")


class Spinning(Processes):
    """A rank on this machine that uses CPU time in a phase and makes no progress."""

    def __init__(self, machines: int, phase: str) -> None:
        self.nodes, self.rank_files, self.running, self.started_at = (
            Nodes(machines, 0, "head", 1),
            [None],
            {0: None},
            0.0,
        )
        self.progress, self.computed = {0: Activity(phase, 3, 1.0)}, 0.0

    def cpu_seconds(self, rank: int) -> float:
        self.computed += 10
        return self.computed

    def bytes_moved(self, rank: int) -> int:
        return 0


@pytest.mark.parametrize(
    ("machines", "phase", "standing"), [(1, "train", None), (2, "train", 99.0), (2, "export", None)]
)
def test_a_rank_that_spins_in_a_collective_with_another_machine_hangs(machines, phase, standing, monkeypatch):
    """An export is no hang, because one rank computes while the others wait."""
    monkeypatch.setattr(hangs, "ANSWER_SECONDS", 0.01)
    watchdog = hangs.Watchdog(Spinning(machines, phase), HangLimits(1, 1))
    assert watchdog.seconds_stuck(100.0) == standing


@pytest.mark.parametrize(
    ("heartbeat", "phase"),
    [("", "in its start"), ("tell('load')", "loading"), ("tell('first', 1)", "in step 1 (first)")],
)
def test_a_rank_that_waits_before_its_first_step_hangs(heartbeat, phase, tmp_path):
    program = f"respond_to_launcher(ranks.launcher); {heartbeat}\nwait()"
    code, out, err = end(supervise(program, tmp_path, budget=0, start=1.5))
    assert code == 6 and f"all ranks are {phase}, none is behind" in err


def test_a_rank_that_is_ending_is_not_a_hang(tmp_path):
    """It may still upload its last metrics; everything important is saved."""
    assert end(supervise("tell('end', 3); time.sleep(2)", tmp_path, budget=0, limit=1)) == (0, "", "")


def flight_log(*entries: tuple[str, int, str], ranks: str = "[0, 1, 2]") -> hangs.CollectiveLog:
    """Return a log as the launcher reads it from torch's flight recorder, of entries of (group, number, operation)."""
    log = {
        "entries": [
            {
                "is_p2p": False,
                "process_group": [group, group],
                "collective_seq_id": number,
                "profiling_name": operation,
                "input_sizes": [[4]],
            }
            for group, number, operation in entries
        ],
        "pg_config": {group: {"ranks": ranks} for group, _, _ in entries},
    }
    return hangs._parse_log(json.dumps(log))


SUM, GATHER = "gloo:all_reduce", "gloo:all_gather"


STEP_3 = {rank: Activity("train", 3, 1.0) for rank in range(3)}


SLEEPING = dict.fromkeys(range(3), "S")


BOTH = [("0", 1, SUM), ("0", 2, GATHER)]


WAITING = "ranks 0, 1 are waiting in gloo:all_gather of [4] (number 2 of group 0)"


MIXED = (
    "number 1 of group 0: rank 0 in gloo:all_reduce of [4], rank 1 in gloo:all_gather of [4], rank 2 in gloo:all_reduce"
)


@pytest.mark.parametrize(
    ("logs", "rank", "message"),
    [
        ([BOTH, BOTH, BOTH[:1]], 2, f"rank 2 is behind, in step 3 (train); {WAITING}"),
        ([BOTH, [("0", 1, GATHER), ("0", 2, SUM)], BOTH], 1, f"the ranks are in different collectives: {MIXED}"),
        ([BOTH, BOTH, BOTH], 0, "all ranks are in step 3 (train), none is behind"),
        ([BOTH, [*BOTH, ("0", 3, SUM)], BOTH], 0, "rank 0 is behind"),
    ],
    ids=["skipped", "swapped", "the same", "extra"],
)
def test_ranks_in_the_same_phase_are_distinguished_by_their_collectives(logs, rank, message):
    logs_by_rank = {number: flight_log(*entries) for number, entries in enumerate(logs)}
    late, reason = hangs.find_late_rank(STEP_3, SLEEPING, logs_by_rank)
    assert late == rank and reason.startswith(message)


def test_a_rank_without_a_log_is_no_evidence():
    late, reason = hangs.find_late_rank(
        STEP_3, SLEEPING, {0: flight_log(*BOTH), 1: flight_log(*BOTH), 2: hangs.CollectiveLog()}
    )
    assert (late, reason) == (0, "all ranks are in step 3 (train), none is behind")
