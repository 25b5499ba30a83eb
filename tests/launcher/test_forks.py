"""Ranks that are forked from one process: the same as ranks that are started one by one, in less memory.

Most ranks here are programs of a few lines, whose fork server imports nothing.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import jobs
from tests.support.launched_ranks import RANK, end, has_ended, lines, nothing_is_left, ready, start  # noqa: F401
from torchtitan.launcher import hangs
from torchtitan.launcher.forks import FORKS, ForkedRank, ForkServer
from torchtitan.launcher.processes import Processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets the launcher adopt the ranks")

SERVER = r"""
import os, signal, sys, time
from torchtitan.launcher.forks import first_rank, fork_ranks
from torchtitan.process.exit import die_with_parent
server = first_rank()
if server:
    die_with_parent(server.pid)
"""
FORK = "\nif server: fork_ranks()\n"


def start_forked(program: str, before: str = "pass", **options) -> subprocess.Popen:
    """Start a launcher of two ranks that are forked; the server runs `before` first."""
    steps = f"if server:\n    {before}\n"
    return start(SERVER + steps + FORK + RANK + program, can_fork=True, **options)


# A forked rank is like one that is started


DESCRIBE = r"""
import json, re
def files():
    for number in os.listdir("/proc/self/fd"):
        if int(number) > 2 and os.path.exists(f"/proc/self/fd/{number}"):
            yield re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{number}"))
variables = sorted((name, os.environ[name]) for name in os.environ if name != "TORCHTITAN_LAUNCHER")
handlers = [str(signal.getsignal(number)) for number in (1, 2, 10, 12, 13, 17)]
parents = os.getsid(0) == os.getpid(), os.getppid() == ranks.launcher.pid
say(json.dumps([ranks.rank, variables, handlers, parents, os.nice(0), sorted(files())]))
tell("end", 3)
"""


def test_a_forked_rank_has_the_environment_session_and_files_of_a_started_one():
    """In particular it holds no file of another rank: whoever reads from a pipe sees its end when its rank ends."""
    started, forked = end(start(DESCRIBE)), end(start_forked(DESCRIBE))
    assert started[::2] == forked[::2] == (0, "") and FORKS not in forked[1]
    assert sorted(started[1].splitlines()) == sorted(forked[1].splitlines())
    assert forked[1].count("[true, true]") == 2 and forked[1].count("pipe:") == 2


@pytest.mark.parametrize("code", [0, 2, 7])
def test_the_exit_code_of_a_forked_rank_is_the_runs(code):
    program = "tell('end', 3)" if code == 0 else f"tell('train', 3); sys.exit({code}) if ranks.rank else wait()"
    assert end(start_forked(program, follow=0.1))[0] == code


def test_a_killed_fork_is_named_and_its_peers_end():
    process = start_forked("ready('train'); wait()", follow=0.1)
    pids = ready(process)
    os.kill(pids[1], signal.SIGKILL)
    assert end(process) == (137, "", "rank 1 was ended by SIGKILL\n")
    assert has_ended(pids[0])


def test_forks_die_with_their_launcher():
    process = start_forked("ready('train'); wait()")
    pids = ready(process)
    process.kill()
    process.wait()
    assert has_ended(pids[0]) and has_ended(pids[1])


def test_a_stop_signal_reaches_every_fork_once():
    process = start_forked("ready('train'); wait_to_be_asked(); tell('end', 4); sys.exit(143)")
    ready(process)
    process.send_signal(signal.SIGINT)
    code, out, err = end(process)
    assert (code, err) == (130, "")
    assert sorted(line.split()[0] for line in out.splitlines()) == ["got", "got", "stopping"]


# The server


FAILED = "the process that imports torch for all ranks of this machine"


def test_a_server_that_crashes_is_explained():
    code, out, err = end(start_forked("say('never')", "raise ImportError('no torch here')"))
    assert (code, out) == (1, "") and "ImportError: no torch here" in err
    assert err.endswith(f"{FAILED} ended with exit code 1; its output above tells why\n")


def test_a_server_that_is_killed_is_explained():
    code, out, err = end(start_forked("say('never')", "os.kill(os.getpid(), signal.SIGKILL)"))
    assert (code, out, err) == (137, "", f"{FAILED} was ended by SIGKILL\n")


def test_a_server_that_is_killed_while_it_names_its_forks_ends_them_quietly():
    kill = "import json; json.dump = lambda *_: os.kill(os.getpid(), 9)"
    code, out, err = end(start_forked("say('never')", kill))
    assert (code, out, err) == (137, "", f"{FAILED} was ended by SIGKILL\n")


def test_a_server_that_ends_without_forks_is_explained():
    code, out, err = end(start_forked("say('never')", "os._exit(0)"))
    assert (code, out) == (1, "") and FAILED in err and "Traceback" not in err


def test_without_all_ranks_none_runs():
    """The second fork fails, as where a user may have no more processes."""
    fails = "fork = os.fork; calls = []; os.fork = lambda: fork() if not calls.append(1) and len(calls) < 2 else 1 / 0"
    code, out, err = end(start_forked("say('never')", fails))
    assert (code, out) == (1, "") and "ZeroDivisionError" in err and FAILED in err


def test_a_server_that_ends_while_it_is_polled_is_no_end_of_a_rank():
    server = object.__new__(ForkServer)
    server.process = SimpleNamespace(pid=os.getpid(), poll=iter([None, 0, None]).__next__)
    server.code, server._pids = None, []
    assert ForkedRank(server, 0).poll() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_its_launcher_or_at_a_stop(number):
    process = start_forked("say('never')", "print('ready', 0, os.getpid(), flush=True); time.sleep(1000)", follow=0.1)
    ((_, _, pid),) = lines(process, 1)
    process.send_signal(number)
    assert end(process)[0] == (143 if number == signal.SIGTERM else -9)
    assert has_ended(int(pid))


def test_a_signal_that_the_server_no_longer_receives_reaches_its_forks(tmp_path):
    """A blocked signal stands for one that arrives after the last fork."""
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); print('ready', flush=True); "
    block += "exec('while signal.SIGTERM not in signal.sigpending(): time.sleep(0.01)')"
    program = (
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM}); wait_to_be_asked(); tell('end'); sys.exit(143)"
    )
    process = start_forked(program, block)
    lines(process, 1)
    process.terminate()
    code, out, err = end(process)
    assert (code, err) == (143, "") and out.count("got") == 2


def test_a_server_with_threads_starts_its_ranks_from_scratch():
    """A fork might inherit a lock that a thread holds."""
    thread = "import threading; threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"
    program = "say('forked' if server else 'started', ranks.rank, os.getppid() == ranks.launcher.pid); tell('end', 3)"
    assert sorted(end(start_forked(program, thread))[1].splitlines()) == ["started 0 True", "started 1 True"]
    assert sorted(end(start_forked(program))[1].splitlines()) == ["forked 0 True", "forked 1 True"]


def test_a_hang_in_the_imports_shows_its_stack(tmp_path, monkeypatch):
    marker = tmp_path / "begun"
    program = "from torchtitan.launcher import hangs; hangs.write_stacks_on_request(server)\n"
    program += f"def stuck():\n    open({str(marker)!r}, 'w').close()\n    time.sleep(1000)\nstuck()"
    monkeypatch.setattr(hangs, "ANSWER_SECONDS", 0.5)
    monkeypatch.chdir(jobs.ROOT)
    ranks = Processes([sys.executable, "-c", SERVER + program], 2, can_fork=True)
    try:
        while not marker.exists():
            assert not ranks.poll()
            time.sleep(0.01)
        evidence = hangs.collect_evidence(ranks, tmp_path, "hang", 1.0)
        assert (
            [state.process for state in evidence.ranks.values()] == ["S", "S"]
            and ranks.cpu_seconds(0) > 0
            and ranks.bytes_moved(1) > 0
        )
        assert "in stuck" in (tmp_path / "hang" / "rank-0.stacks.txt").read_text()
    finally:
        ranks.close()
    assert [(ended.rank, ended.code) for ended in ranks.exits] == [(0, -9), (1, -9)]


# Jobs


STARTED_ONE_BY_ONE = """
import sys
from torchtitan import launch
from torchtitan.launcher import processes
from torchtitan.process.exit import exit_with
processes._adopt_orphans = lambda: False
exit_with(lambda: launch.main(sys.argv[1:]))
"""


def private_bytes(pid: int) -> int:
    """Return the memory of a process that no other process uses."""
    rows = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(1024 * int(row[1]) for row in rows if row[0].startswith("Private_"))


def test_a_job_of_forked_ranks_has_the_same_losses_in_less_memory(tmp_path):
    texts = jobs.write_texts(tmp_path)
    losses, memory = [], []
    for name, program in (("forked", ["-m", "torchtitan.launch"]), ("started", ["-c", STARTED_ONE_BY_ONE])):
        argv = jobs.arguments(tmp_path / name, texts, training__local_batch_size=4, training__steps=100000)
        process = subprocess.Popen(
            [sys.executable, *program, "2", *argv], cwd=jobs.ROOT, start_new_session=True, stdout=subprocess.DEVNULL
        )
        try:
            jobs.wait_for_step(tmp_path / name, 5, process)
            memory.append([private_bytes(pid) for pid in jobs.started_ranks(process, 2)])
        finally:
            process.kill()
            process.wait()
        losses.append([row["loss"] for row in jobs.logged_steps(tmp_path / name)][:5])
    assert losses[0] == losses[1]
    # what both import is three quarters of the memory of a rank that is started
    assert max(memory[0]) < 0.5 * min(memory[1]), memory
