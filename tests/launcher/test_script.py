"""`torchtitan run`: a user's script on several ranks, its exit codes, signals, restarts and hangs.

Most scripts here are a few lines that need no torch.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import jobs
from tests.support.forked_job import Program
from tests.support.launched_ranks import lines, nothing_is_left, started
from torchtitan.config import manager
from torchtitan.metrics.json_lines import read_records

assert nothing_is_left  # a fixture, for all tests here too

PROGRAM = """
import sys
from torchtitan import cli
from torchtitan.launcher import hangs, monitor, processes, restarts, script
restarts.FIRST_PAUSE_SECONDS, hangs.ANSWER_SECONDS, hangs.BUSY_SHARE = 0.01, 0.2, 1
monitor.FOLLOW_SECONDS, monitor.POLL_SECONDS, processes.ONE_REQUEST_SECONDS = {follow}, 0.1, 0
script.STOP_SECONDS = {stop}
cli.run("run")
"""
# Parts of scripts. `say` writes a line at once, so that those of two ranks do not mix.
RANK = r"""
import os, signal, sys, time
rank = int(os.environ["RANK"])
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())
"""
ENGINE = r"""
from torchtitan.config import manager
from torchtitan.launcher.rank import start_rank
from torchtitan.launcher.script import announce
from torchtitan.process.heartbeat import Progress
ranks = start_rank()
restart = ranks.launcher.restart
tell = Progress(ranks.launcher.progress, ranks.local_rank).enter
def begin(**options):
    argv = [f"--{name.replace('__', '.')}={value}" for name, value in options.items()]
    announce(manager.load(argv), ranks)
"""
COLLECTIVES = r"""
import torch
import torch.distributed as dist
from torchtitan.process import distributed
from torchtitan.process.ranks import read_ranks
ranks = read_ranks()
distributed.init(ranks, 60)
total = torch.tensor(ranks.rank + 1.0)
"""


def start(
    folder: Path,
    text: str,
    *arguments: str,
    after: Sequence[str] = (),
    ranks: int = 2,
    follow: float = 0.3,
    stop: float = 30,
    environment: dict[str, str] | None = None,
) -> Program:
    """Start a script in `folder` under the launcher. Both are forks of a process that has imported torch."""
    (folder / "script.py").write_text(text)
    arguments = (f"--ranks={ranks}", *arguments, str(folder / "script.py"), *after)
    program = PROGRAM.format(follow=follow, stop=stop)
    started.append(Program(program, *arguments, folder=jobs.ROOT, environment=environment))
    return started[-1]


def finish(*arguments, **options) -> tuple[int, str, str]:
    return jobs.finish(start(*arguments, **options), 120)


def test_a_script_finds_what_python_gives_it(tmp_path):
    script = tmp_path / "folder" / "script.py"
    script.parent.mkdir()
    (script.parent / "neighbour.py").write_text("")
    names = "__name__, __file__, __spec__, __doc__, sys.argv, sys.path[0], '' in sys.path, sys.stdin.read()"
    script.write_text(f"'text'\nimport json, neighbour, sys\nprint(json.dumps([{names}]))\nassert __builtins__")
    options = dict(cwd=tmp_path, input="typed", capture_output=True, text=True)
    argv = ["folder/script.py", "a", "--ranks", "3", "--max_restarts=1", "--", "--help"]
    python = subprocess.run([sys.executable, *argv], **options)
    ours = subprocess.run([sys.executable, "-m", "torchtitan", "run", "--ranks", "1", *argv], **options)
    assert (ours.returncode, ours.stderr) == (0, "")
    assert json.loads(ours.stdout) == json.loads(python.stdout) and "typed" in ours.stdout


def test_help_after_the_script_is_its_own(tmp_path):
    (tmp_path / "script.py").write_text("import argparse; argparse.ArgumentParser('mine').parse_args()")
    ours, script = (
        subprocess.run([sys.executable, "-m", "torchtitan", "run", *arguments], capture_output=True, text=True)
        for arguments in (["--help"], [tmp_path / "script.py", "--help"])
    )
    assert "--max-restarts" in ours.stdout and script.stdout.startswith("usage: mine")


@pytest.mark.parametrize("name, message", [("none.py", "no such file"), (".", "a folder"), ("", "required: SCRIPT")])
def test_what_is_no_script_is_refused(name, message, tmp_path):
    arguments = [str(tmp_path / name)] if name else []
    command = [sys.executable, "-m", "torchtitan", "run", *arguments]
    done = subprocess.run(command, cwd=jobs.ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


def test_several_machines_are_refused(tmp_path):
    code, _, err = finish(tmp_path, "", environment={"NNODES": "2"})
    assert code == 2 and "torchrun" in err


@pytest.mark.parametrize("launcher", ["torchtitan", "torchrun", "python"])
def test_ranks_meet_under_every_launcher(launcher, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        COLLECTIVES + "dist.all_reduce(total)\n"
        # in one piece: torchrun's ranks share a pipe without a buffer
        "import sys; sys.stdout.write(f'sum {total.item()} {ranks.rank}\\n')\ndistributed.close()"
    )
    command = {
        "torchtitan": ["-m", "torchtitan", "run", "--ranks", "2"],
        "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
        "python": [],
    }[launcher]
    done = subprocess.run([sys.executable, *command, script], cwd=jobs.ROOT, capture_output=True, text=True)
    expected = {"torchtitan": ["[rank 1] sum 3.0 1", "sum 3.0 0"], "torchrun": ["sum 3.0 0", "sum 3.0 1"]}
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == expected.get(launcher, ["sum 1.0 0"])


def test_an_exception_on_one_rank_ends_the_others_in_a_collective(tmp_path):
    text = COLLECTIVES + "def fail():\n    raise ValueError('no')\nif ranks.rank:\n    fail()\ndist.all_reduce(total)"
    code, _, err = finish(tmp_path, text)
    assert code == 1 and err.count("Traceback") == 1 and err.count("ValueError: no") == 1
    traceback = err[err.index("[rank 1] Traceback") :].splitlines()
    assert str(tmp_path / "script.py") in traceback[1] and "site-packages" not in err and "_rank.py" not in err
    assert err.endswith("rank 1 ended with exit code 1; its output above tells why\n")


def test_a_syntax_error_is_shown_as_by_python(tmp_path):
    (tmp_path / "script.py").write_text("a = (")
    python = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True)
    code, _, err = finish(tmp_path, "a = (", ranks=1)
    assert code == 1 and err.startswith(python.stderr)


ENDS = {
    "sys.exit()": (0, ""),
    "sys.exit(3)": (3, "rank 0 ended with exit code 3; its output above tells why\n"),
    "sys.exit('too few')": (1, "too few\nrank 0 ended with exit code 1; its output above tells why\n"),
    "raise KeyboardInterrupt": (130, "rank 0 ended with exit code 130; its output above tells why\n"),
    "os.kill(os.getpid(), 9)": (137, "rank 0 was ended by SIGKILL\n"),
    "from torchtitan.core.errors import JobError; raise JobError('no such job')": (
        2,
        "no such job\n    at SCRIPT, line 6\n",
    ),
}


@pytest.mark.parametrize("ending", ENDS)
def test_a_script_keeps_its_exit_code(ending, tmp_path):
    code, _, err = finish(tmp_path, RANK + ending, ranks=1)
    assert (code, err.replace(str(tmp_path / "script.py"), "SCRIPT")) == ENDS[ending]


def test_a_rank_that_ends_well_leaves_the_others_their_time(tmp_path):
    code, out, err = finish(tmp_path, RANK + "time.sleep(0 if rank else 1.5); say('done', rank)")
    assert (code, err, sorted(out.splitlines())) == (0, "", ["done 0", "done 1"])


def test_threads_and_functions_at_exit_run_to_their_end(tmp_path):
    text = "import atexit, threading, time\natexit.register(print, 'last')\n"
    text += "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()"
    assert finish(tmp_path, text, ranks=1) == (0, "thread\nlast\n", "")


WAIT = r"""
try:
    say("ready", rank)
    time.sleep(100)
except {error}:
    time.sleep(0.6 * rank)
    say("saved", rank)
    {then}
"""


@pytest.mark.parametrize(
    "number, error, then, code",
    [
        (signal.SIGINT, "KeyboardInterrupt", "raise", 130),
        (signal.SIGTERM, "SystemExit", "raise", 143),
        (signal.SIGINT, "KeyboardInterrupt", "sys.exit(0)", 0),
    ],
)
def test_a_stop_signal_leaves_a_script_time_to_end(number, error, then, code, tmp_path):
    process = start(tmp_path, RANK + WAIT.format(error=error, then=then))
    lines(process, 2)
    process.send_signal(number)
    end, out, err = jobs.finish(process, 60)
    assert (end, err) == (code, "") and {"saved 0", "saved 1"} < set(out.splitlines())


def test_a_script_that_ignores_a_stop_signal_is_killed(tmp_path):
    process = start(
        tmp_path, RANK + "signal.signal(signal.SIGTERM, print)\nsay('ready', rank)\nwhile 1: time.sleep(1)", stop=1
    )
    lines(process, 2)
    process.terminate()
    code, _, err = jobs.finish(process, 60)
    assert code == 143 and err == "not stopped in time and killed: rank 0, rank 1\n"


CRASH_ONCE = RANK + "restarted = 'restart\": {' in os.environ['TORCHTITAN_LAUNCHER']\n"
CRASH_ONCE += "say(rank, restarted)\nif rank and not restarted: os.kill(os.getpid(), 9)"


def test_a_script_is_restarted_if_asked_to(tmp_path):
    code, _, err = finish(tmp_path, CRASH_ONCE)
    assert (code, err) == (137, "rank 1 was ended by SIGKILL\n")
    code, out, err = finish(tmp_path, CRASH_ONCE, "--max-restarts=2")
    assert code == 0 and "restart 1 of 2" in err and {"0 True", "1 True"} < set(out.splitlines())
    assert "the script starts again" in err and "step" not in err


def test_the_job_of_an_engine_gives_restarts_and_the_folder_of_hangs(tmp_path):
    options = dict(job__dump_folder=tmp_path, checkpoint__enable=True, job__max_restarts=1)
    options |= dict(comm__train_timeout_seconds=1, comm__init_timeout_seconds=1)
    text = RANK + ENGINE + f"begin(**{ {key: str(value) for key, value in options.items()} })\n"
    text += "tell('train', 5)\nif not rank and restart is None: os.kill(os.getpid(), 9)\ntime.sleep(100)"
    code, _, err = finish(tmp_path, text)
    assert code == 5 and "restart 1 of 1" in err and "hang: no rank has got on" in err, err
    assert "time.sleep" not in err and len(list(tmp_path.glob("hangs/*/rank-*.stacks.txt"))) == 2


TRAIN = """
import os, sys, time
from torchtitan.engine import Engine
with Engine.from_job(sys.argv[1]) as engine:
    for batch in engine.data:
        engine.step(batch)
        engine.save()
        if engine.ranks.rank and engine.current_step == 2 and engine.ranks.launcher.restart is None:
            {event}
        print("step", engine.current_step)
"""


def start_training(folder: Path, event: str) -> Program:
    """Start the script of an engine of four steps; at the second one `event` happens on the second rank."""
    options = dict(training__steps=4, training__local_batch_size=2, checkpoint__enable=True)
    argv = jobs.arguments(folder / "run", jobs.write_texts(folder), **options)
    (folder / "job.toml").write_text(manager.to_toml(manager.load(argv)))
    return start(folder, TRAIN.format(event=event), after=[str(folder / "job.toml")], follow=5)


def test_an_engine_resumes_from_its_checkpoint_after_a_crash(tmp_path):
    code, out, err = jobs.finish(start_training(tmp_path, "os.kill(os.getpid(), 9)"))
    restart = "restart 1 of 3 in 0.01 s: rank 1 was ended by SIGKILL after step 2; going on from step 2"
    assert code == 0 and restart in err, err
    steps = [line for line in out.splitlines() if line.startswith("[rank 1] step")]
    assert steps == [f"[rank 1] step {step}" for step in (1, 3, 4)], out
    end = read_records(tmp_path / "run/metrics.jsonl")[-1]
    assert (end["event"], end["cause"], end["step"]) == ("end", "finished", 4)


def test_a_stop_signal_ends_the_data_of_an_engine(tmp_path):
    code, out, _ = jobs.finish(start_training(tmp_path, "os.kill(os.getppid(), 15); time.sleep(1)"))
    assert code == 143 and "step 3" in out and "step 4" not in out, out
    end = read_records(tmp_path / "run/metrics.jsonl")[-1]
    assert (end["cause"], end["exit_code"], end["step"]) == ("stopped", 143, 3)


def test_a_script_whose_engine_was_stopped_does_not_look_finished(tmp_path):
    text = RANK + ENGINE + "from torchtitan.metrics.run_end import RunEnd\ntell('end', 4); time.sleep(0.6 * rank)\n"
    assert finish(tmp_path, text + "RunEnd(143).pass_on(ranks.launcher.end)")[::2] == (143, "")
    assert finish(tmp_path, text + "RunEnd(11).pass_on(ranks.launcher.end); sys.exit()")[::2] == (11, "")


def test_a_failure_that_an_engine_has_logged_is_not_shown_again(tmp_path):
    text = (
        RANK
        + ENGINE
        + """
from torchtitan.guards import BadStep
from torchtitan.training.ends import end_of_failure
try:
    raise BadStep("loss is NaN")
except BadStep as error:
    end_of_failure(error, None, ranks).pass_on(ranks.launcher.end)
    raise
"""
    )
    code, _, err = finish(tmp_path, text, ranks=1)
    assert code == 4 and err.startswith("loss is NaN\n    at ") and len(err.splitlines()) == 2


def test_an_engine_that_cannot_be_built_is_explained(tmp_path):
    text = """
from torchtitan.core.errors import JobError
from torchtitan.training import ends
raise JobError("training.steps: given 0; allowed: at least 1")
"""
    code, _, err = finish(tmp_path, text, ranks=1)
    assert code == 2 and "training.steps: given 0" in err
    assert "its output above tells why" not in err


def test_a_script_without_an_engine_is_never_called_hung(tmp_path):
    text = RANK + ENGINE + "tell('script', 1); time.sleep(2.5)"  # as if the limits of HangLimits(0, 0) held
    assert finish(tmp_path, text) == (0, "", "")
