"""The launcher: environment of ranks, exit codes, signals, leftover processes, and sockets on loopback only.

Most ranks here are programs of a few lines, which start quickly; the ones that need torch train a small job.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import jobs
from tests.support.launched_ranks import LOOPBACK, end, has_ended, lines, listening, nothing_is_left, ready, start
from torchtitan.launcher import processes
from torchtitan.launcher.processes import StopRequests
from torchtitan.process.exit import EXPLAINED, REPORTED_BY_FIRST_RANK, STOP_SIGNALS

assert nothing_is_left  # a fixture, for all tests here


# Environment of ranks


def test_ranks_get_the_environment_variables_of_torchrun():
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE"
    program = f"import json; say(json.dumps([os.environ.get(n) for n in '{names}'.split()]))"
    code, out, err = end(start(program))
    variables = sorted(json.loads(line) for line in out.splitlines())
    assert (code, err) == (0, "")
    assert variables == [[str(rank), str(rank), "2", "2", "0", "1", str(rank), "2"] for rank in range(2)]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is a private temporary file")
def test_shared_memory_of_ranks_is_on_no_disk():
    program = "say(*sorted({os.readlink(p) for p in (ranks.launcher.store, ranks.launcher.progress)}))"
    code, out, err = end(start(program))
    assert (code, err) == (0, "")
    assert out == 2 * "/memfd:torchtitan-progress (deleted) /memfd:torchtitan-store (deleted)\n"


# Exit codes and leftover processes


@pytest.mark.parametrize("code", [0, *sorted(EXPLAINED), 1, 9])
def test_the_exit_code_of_the_first_rank_to_fail_is_that_of_the_run(code):
    """The launcher ends the other rank, which cannot continue alone."""
    program = "tell('end', 3)" if code == 0 else f"tell('train', 3); sys.exit({code}) if ranks.rank else wait()"
    ended, out, err = end(start(program, follow=0.1))
    assert ended == code and out == ""
    explained = code in EXPLAINED or not code
    explanation = " and the others did not" if code in REPORTED_BY_FIRST_RANK else "; its output above tells why"
    explained = explained and code not in REPORTED_BY_FIRST_RANK  # the first rank was ended before it could print it
    assert err == ("" if explained else f"rank 1 ended with exit code {code}{explanation}\n")


def test_a_rank_that_refuses_explains_the_end_of_one_that_lost_it_and_ended_before():
    """A rank closes its connections before its process is gone. One that is killed stays the reason: others may
    then refuse what they cannot save.
    """
    program = "tell('train', 3); (time.sleep(1), sys.exit(2)) if ranks.rank else {}"
    assert end(start(program.format("sys.exit(1)"))) == (2, "", "")
    killed = end(start(program.format("os.kill(os.getpid(), signal.SIGKILL)")))
    assert killed == (137, "", "rank 0 was ended by SIGKILL\n")


def test_a_killed_rank_is_named_and_its_peers_end():
    process = start("ready('train'); wait()", follow=0.1)
    pids = ready(process)
    os.kill(pids[1], signal.SIGKILL)
    assert end(process) == (137, "", "rank 1 was ended by SIGKILL\n")
    assert has_ended(pids[0])


CRASHES_BELOW_PYTHON = """
import os, resource, signal
from torchtitan import train
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
def crash(*job, **options):
    os.kill(os.getpid(), signal.SIGSEGV)
train.load_job = crash
"""


def test_a_crash_below_python_prints_the_stack():
    program = CRASHES_BELOW_PYTHON + "ready('train'); train.main([]) if ranks.rank else wait()"
    code, _, err = end(start(program, follow=0.1))
    assert code == 128 + signal.SIGSEGV and err.startswith("Fatal Python error: Segmentation fault")
    assert " in crash\n" in err and err.endswith("rank 1 was ended by SIGSEGV\n")


def test_a_crash_below_python_prints_the_stack_under_torchrun():
    command = [sys.executable, "-c", CRASHES_BELOW_PYTHON + "train.main([])"]
    env = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    done = subprocess.run(command, cwd=jobs.ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV and " in crash\n" in done.stderr


def test_ranks_that_finish_late_are_waited_for():
    """For example the first rank uploads metrics after the other has ended."""
    program = "tell('end', 9); time.sleep(0 if ranks.rank else 1.5); say('done', ranks.rank)"
    code, out, _ = end(start(program, follow=0.1))
    assert code == 0 and sorted(out.splitlines()) == ["done 0", "done 1"]


def test_a_rank_that_ends_during_startup_ends_the_others():
    """It exited with 0, but the others would wait for it forever."""
    process = start("ready('start'); wait_to_be_asked() if ranks.rank else wait()", follow=0.1)
    pids = ready(process)
    os.kill(pids[1], signal.SIGTERM)
    assert end(process)[0] == 137 and has_ended(pids[0])


@pytest.mark.parametrize("where", ["start", "train"])
def test_ranks_die_with_their_launcher(where):
    process = start(f"ready('{where}'); wait()")
    pids = ready(process)
    process.kill()
    process.wait()
    assert has_ended(pids[0]) and has_ended(pids[1])


def test_a_rank_whose_launcher_died_early_ends():
    program = (
        "import os; from torchtitan.process.exit import die_with_parent; die_with_parent(os.getpid()); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=jobs.ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (137, "")


def test_leftover_children_of_a_rank_are_ended():
    """The child has its own session, so it would survive the process group of its rank."""
    child = "import subprocess; p = subprocess.Popen(['sleep', '1000'], start_new_session=True, stdout=2)"
    program = f"{child}; say('ready', ranks.rank, p.pid); tell('end', 3)"
    process = start(program)
    pids = ready(process)
    assert end(process)[0] == 0
    assert has_ended(pids[0]) and has_ended(pids[1])


def test_leftover_grandchildren_of_a_rank_are_ended():
    child = (
        "import subprocess; p = subprocess.Popen(['sh', '-c', 'sleep 1000 & echo $!; wait'], stdout=subprocess.PIPE)"
    )
    process = start(f"{child}; say('ready', ranks.rank, int(p.stdout.readline())); tell('end', 3)")
    pids = ready(process)
    assert end(process)[0] == 0
    assert has_ended(pids[0]) and has_ended(pids[1])


def test_a_rank_that_never_exits_is_killed_after_a_time():
    program = "ready('train'); wait_to_be_asked(); tell('end', 3); wait() if ranks.rank else 0"
    process = start(program, shutdown=0.5)
    pids = ready(process)
    os.kill(pids[0], signal.SIGTERM)
    assert has_ended(pids[0])  # otherwise a slow exit might be killed as well
    os.kill(pids[1], signal.SIGTERM)
    assert end(process)[::2] == (137, "rank 1 was ended by SIGKILL\n")


# Stops


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_a_stop_signal_reaches_every_rank_once_and_sets_the_exit_code(number):
    process = start("ready('train'); wait_to_be_asked(); tell('end', 4); sys.exit(143)")
    ready(process)
    process.send_signal(number)
    code, out, err = end(process)
    assert (code, err) == (128 + number, "")
    assert sorted(out.splitlines()) == ["got 0 15", "got 1 15", "stopping after this step " + TWICE_MORE]


def test_a_rank_that_fails_since_another_one_stopped_does_not_change_the_exit_code():
    process = start(
        "ready('first'); wait_to_be_asked(); (time.sleep(0.5), sys.exit(1)) if ranks.rank else sys.exit(143)"
    )
    ready(process)
    process.send_signal(signal.SIGHUP)
    assert end(process)[::2] == (129, "")


TWICE_MORE = "(twice more to stop at once, without saving)"


def test_the_second_signal_is_ignored_and_the_third_kills():
    process = start("ready('save'); wait_to_be_asked(); wait()")
    pids = ready(process)
    process.terminate()
    assert sorted(line[0] for line in lines(process, 3)) == ["got", "got", "stopping"]
    process.terminate()
    assert lines(process, 1)[0][:2] == ["still", "stopping"]
    assert not has_ended(pids[0], 0.2) and not has_ended(pids[1], 0)
    process.terminate()
    assert end(process) == (143, "", "") and has_ended(pids[0]) and has_ended(pids[1])


def test_duplicate_signals_count_once(monkeypatch):
    """srun, slurmstepd and an outer launcher forward the same signal."""
    clock = [0.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: clock[0])
    requests, is_new = StopRequests(), []
    for clock[0], number in [(9.0, 15), (9.1, 15), (9.4, 1), (9.6, 2), (9.7, 15), (11.0, 15)]:
        is_new.append(requests.add(number))
    assert is_new == [True, False, False, True, False, True]
    assert (requests.first, requests.count) == (15, 3)


@pytest.mark.parametrize("phase", ["start", "load"])
def test_ranks_that_are_still_starting_are_killed_at_once(phase):
    """They are inside a library, where no Python signal handler runs."""
    process = start(f"ready('{phase}'); wait()", follow=0.2)
    ready(process)
    process.send_signal(signal.SIGINT)
    code, out, err = end(process)
    assert code == 130 and err == "not stopped in time and killed: rank 0, rank 1\n"


def test_a_saving_rank_is_waited_for_while_it_makes_progress():
    program = "ready('train'); wait_to_be_asked(); [(tell('save', step), time.sleep(0.1)) for step in range(20)]"
    process = start(f"{program}; tell('end', 4); say('saved'); sys.exit(143)", follow=0.2, shutdown=1.5)
    ready(process)
    process.terminate()
    code, out, err = end(process)
    assert (code, err) == (143, "") and out.count("saved") == 2


def test_a_stuck_rank_is_killed():
    process = start("ready('train'); wait_to_be_asked(); wait()", shutdown=0.3)
    ready(process)
    process.terminate()
    code, out, err = end(process)
    assert (code, err) == (137, "not stopped in time and killed: rank 0, rank 1\n")


def test_an_ignored_hangup_stays_ignored():
    """Under nohup the run continues when its terminal is closed."""
    process = start("ready('train'); wait_to_be_asked(); tell('end'); sys.exit(143)", preexec_fn=ignore_hangup)
    ready(process)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGUSR1)  # handled after SIGHUP
    assert end(process)[0] == 128 + signal.SIGUSR1


def ignore_hangup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_a_closed_terminal_does_not_keep_ranks_from_saving():
    reading, writing = os.pipe()
    program = (
        "os.write(2, b'ready'); tell('train', 3); wait_to_be_asked(); os.write(2, b'saved'); tell('end'); os._exit(143)"
    )
    process = start(f"handled = lambda *_: asked.append(1)\nsignal.signal(15, handled)\n{program}", stdout=writing)
    os.close(writing)
    assert process.stderr.read(10) == "readyready"
    os.close(reading)
    process.send_signal(signal.SIGHUP)
    assert end(process) == (129, None, "savedsaved")


# Sockets


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
def test_a_run_on_one_machine_listens_on_loopback_only(tmp_path, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")  # set by the tests for ranks without a launcher
    texts = jobs.write_texts(tmp_path)
    argv = jobs.arguments(tmp_path / "run", texts, training__local_batch_size=4, training__steps=100000)
    process = jobs.start_new(argv, ranks=2)
    jobs.wait_for_step(tmp_path / "run", 1, process)
    pids = jobs.children(process.pid)
    addresses = listening([process.pid, *pids])
    process.kill()
    process.communicate()
    assert len(pids) == 2 and all(map(has_ended, pids))
    assert addresses and addresses <= LOOPBACK


def test_torchrun_can_start_the_ranks(tmp_path):
    texts = jobs.write_texts(tmp_path)
    argv = jobs.arguments(tmp_path / "run", texts, training__local_batch_size=4, training__steps=2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "-m", "torchtitan.train", *argv], cwd=jobs.ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert len(jobs.logged_steps(tmp_path / "run")) == 2 and list((tmp_path / "run").glob("run.lock*")) == []
