"""How runs end, by the launcher's record: each cause, once for each start, and what the next start says of it.

The rank is a program of a few lines here.
"""

import signal
import socket

import pytest

from tests.support import jobs
from tests.support.forked_job import Program
from tests.support.launched_ranks import RANK, has_ended, nothing_is_left, started
from tests.support.ports import free_port
from torchtitan.metrics.json_lines import read_records

assert nothing_is_left  # a fixture, for all tests here too

LAUNCH = """
import sys
from torchtitan import launch
from torchtitan.launcher import hangs, monitor, restarts, run_folder
from torchtitan.process.exit import exit_with
restarts.FIRST_PAUSE_SECONDS, hangs.ANSWER_SECONDS = 0.01, 0.2
{patch}
monitor.FOLLOW_SECONDS = monitor.POLL_SECONDS = 0.1
launch.PROGRAM = (sys.executable, "-c", sys.argv.pop(1))
exit_with(lambda: launch.main(["{ranks}", *sys.argv[1:]]))
"""
RUN_END = """
from torchtitan.metrics.run_end import PEER_GONE, RunEnd
def pass_on(code, *fields):
    RunEnd(code, *fields).pass_on(ranks.launcher.end)
    sys.exit(code)
"""


def start(folder, program, environment=None, patch="", ranks=1, **options):
    """Start a launcher of ranks with a program of a few lines. `patch`: executed in the launcher before its start."""
    argv = jobs.arguments(folder / "run", jobs.write_texts(folder, 2), training__local_batch_size=4, **options)
    arguments = (RANK + RUN_END + program, *argv)
    started.append(
        Program(LAUNCH.format(patch=patch, ranks=ranks), *arguments, folder=jobs.ROOT, environment=environment)
    )
    return started[-1]


def finish(folder, program, **options):
    return jobs.finish(start(folder, program, **options))


def ends(folder):
    """Return the fields of each end, without the time."""
    records = read_records(folder / "run/metrics.jsonl")
    names = ("step", "cause", "exit_code", "reason")
    return [tuple(record[name] for name in names) for record in records if record.get("event") == "end"]


KILL = "os.kill(os.getpid(), 9)"
RESTARTS = dict(checkpoint__enable=True, job__max_restarts=1)
HUNG = dict(comm__train_timeout_seconds=1, comm__init_timeout_seconds=1)
REASON = "ValueError: 3 is none"
KILLED = "rank 0 was ended by SIGKILL"
CASES = {
    "finished": ("tell('end', 4); pass_on(0)", {}, (4, "finished", 0, "")),
    "early stop": ("tell('end', 4); pass_on(0, 'early stop', 'no gain')", {}, (4, "early stop", 0, "no gain")),
    "a program without a word": ("tell('end', 4)", {}, (4, "finished", 0, "")),
    "crashed": (f"tell('train', 4); pass_on(1, '', {REASON!r})", {}, (3, "crashed", 1, REASON)),
    "killed": (f"tell('train', 4); {KILL}", {}, (3, "killed", 137, KILLED)),
    "refused": ("pass_on(2, '', 'no')", {}, (0, "refused", 2, "no")),
    "data": ("tell('data', 4); pass_on(2, 'data', 'no more')", {}, (3, "data", 2, "no more")),
    "time limit": ("tell('end', 4); pass_on(11)", {}, (4, "time limit", 11, "")),
    "restarts given up": (f"tell('train', 4); {KILL}", RESTARTS, (3, "restarts given up", 5, KILLED)),
    "restarted": (
        f"tell('train', 4)\nif ranks.launcher.restart is None: {KILL}\ntell('end', 9); pass_on(0)",
        RESTARTS,
        (9, "finished", 0, ""),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_cause_is_recorded_once_with_the_exit_code(name, tmp_path):
    program, options, expected = CASES[name]
    code, out, err = finish(tmp_path, program, **options)
    assert ends(tmp_path) == [expected], (out, err)
    assert code == expected[2]


@pytest.mark.parametrize(
    "program, expected",
    [
        ("pass_on(1, '', 'no' if ranks.rank else PEER_GONE)", (3, "crashed", 1, "rank 1: no")),
        ("time.sleep(9) if ranks.rank else pass_on(2, 'data', 'no more')", (3, "data", 2, "rank 0: no more")),
        ("pass_on(4, '', 'loss is nan')", (3, "bad step", 4, "loss is nan")),
    ],
)
def test_the_rank_that_fails_is_named_unless_all_do(program, expected, tmp_path):
    without_forks = "forking = launch.Processes; launch.Processes = lambda *given: forking(*given[:-1])"
    _, out, err = finish(tmp_path, f"tell('train', 4)\n{program}", patch=without_forks, ranks=2)
    assert ends(tmp_path) == [expected], (out, err)


def test_a_hang_is_recorded_with_the_rank_behind(tmp_path):
    code, out, err = finish(tmp_path, "tell('train', 4); wait()", **HUNG)
    ((step, cause, exit_code, reason),) = ends(tmp_path)
    assert (step, cause, exit_code, code) == (3, "hung", 6, 6) and reason.startswith("hang: no rank has got on for")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_recorded_and_the_next_start_says_so(number, tmp_path):
    process = start(tmp_path, "ready('train'); wait_to_be_asked(); tell('end', 3); pass_on(143)")
    while not process.stdout.readline().startswith("ready"):
        pass
    process.send_signal(number)
    code, _, _ = jobs.finish(process)
    assert code == 128 + number and [end[:3] for end in ends(tmp_path)] == [(3, "stopped", code)]
    _, out, _ = finish(tmp_path, "pass_on(2, 'data', 'gone')")
    assert (
        f"the last run in this folder: stopped by {signal.Signals(number).name} after step 3 (exit code {code})" in out
    )
    assert [end[:3] for end in ends(tmp_path)] == [(3, "stopped", code), (3, "data", 2)]


def test_after_a_killed_launcher_the_next_start_says_that_no_end_was_left(tmp_path):
    process = start(tmp_path, "ready('train'); wait()")
    while not (line := process.stdout.readline()).startswith("ready"):
        pass
    process.kill()
    process.wait()
    assert has_ended(int(line.split()[2])) and not (tmp_path / "run/metrics.jsonl").exists()
    _, out, _ = finish(tmp_path, "pass_on(0)")
    assert "the last run in this folder left no end: it was killed, or its machine failed" in out
    _, out, _ = finish(tmp_path, "pass_on(0)")
    assert "the last run in this folder: finished after step 0 (exit code 0)" in out


def test_a_job_that_is_refused_before_the_start_records_nothing(tmp_path):
    assert finish(tmp_path, "", optimizer__lr=-1)[0] == 2
    assert not (tmp_path / "run").exists()


def test_an_end_that_cannot_be_written_changes_neither_exit_code_nor_the_first_error(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").symlink_to("/dev/full")
    code, _, err = finish(tmp_path, f"tell('train', 4); {KILL}")
    assert code == 137 and err.splitlines()[0] == KILLED
    assert "the end of the run could not be written" in err


FOLLOWS = "tell('train', 4)\nif ranks.rank == 0: wait()\npass_on(2, 'data', 'no more')"


@pytest.mark.parametrize(
    "program, expected",
    [
        (FOLLOWS, (3, "data", 2, f"rank 1 on {socket.gethostname()}: no more")),
        ("tell('end', 4); pass_on(0)", (4, "finished", 0, "")),
    ],
)
def test_several_machines_leave_one_record_with_the_first_cause(program, expected, tmp_path):
    head = dict(NNODES="2", HEAD_ADDR="127.0.0.1", HEAD_PORT=str(free_port()))
    machines = [start(tmp_path, program, head | {"NODE_RANK": str(index)}) for index in range(2)]
    assert [jobs.finish(machine)[0] for machine in machines] == [expected[2]] * 2
    assert ends(tmp_path) == [expected]


UNREADABLE = """
from torchtitan.core.machine_errors import MachineError
calls = []
def newest(folder):
    calls.append(folder)
    if len(calls) in {which}: raise MachineError("checkpoint: the machine cannot read it now")
    return None, []
run_folder.newest_complete = newest
"""


@pytest.mark.parametrize(
    "which, expected",
    [((2,), (9, "finished", 0, "")), ((1,), (0, "crashed", 1, "checkpoint: the machine cannot read it now"))],
)
def test_a_folder_that_cannot_be_read_for_a_while_does_not_prevent_a_restart(which, expected, tmp_path):
    program, options, _ = CASES["restarted"]
    code, out, err = finish(tmp_path, program, patch=UNREADABLE.format(which=which), **options)
    assert ends(tmp_path) == [expected] and code == expected[2], (out, err)
    assert err.count("the machine cannot read it now") == 1


def test_a_machine_that_refuses_the_job_is_the_reason(tmp_path):
    head = dict(NNODES="2", HEAD_ADDR="127.0.0.1", HEAD_PORT=str(free_port()))
    lacking = {"training__dataset_path": tmp_path / "none.jsonl"}
    machines = [
        start(tmp_path, "", head | {"NODE_RANK": str(index)}, **(lacking if index else {})) for index in range(2)
    ]
    assert [jobs.finish(machine)[0] for machine in machines] == [2, 2]
    ((step, cause, code, reason),) = ends(tmp_path)
    assert (step, cause, code) == (0, "refused", 2) and "refuses the job" in reason and "none.jsonl" in reason
