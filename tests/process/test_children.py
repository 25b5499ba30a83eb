"""Children run our package whatever the current folder holds, and end with the process that started them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import jobs
from torchtitan import launch
from torchtitan.planner import rehearsal
from torchtitan.process.children import python_command, tied_command

ROOT = jobs.ROOT
ISOLATED = {
    "datasets/template_process.py": "-I",
    "datasets/tokenizer/hf_json.py": "-I",
    "launcher/forks.py": "sys.orig_argv",  # repeats the command of this process
}
"""Files that start Python in another way, which needs none of our package."""


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A folder with another package of our name, and with a module of a user."""
    folder = tmp_path / "checkout"
    (folder / "torchtitan").mkdir(parents=True)
    for name in ("__init__", "train", "launch", "__main__"):
        (folder / f"torchtitan/{name}.py").write_text("raise ImportError('the other torchtitan: no module tyro')\n")
    (folder / "my_plugin.py").write_text("NAME = 'mine'\n")
    (folder / "json.py").write_text("raise ImportError('the json of this folder')\n")
    monkeypatch.chdir(folder)
    return folder


def run(command: list[str], **options) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def test_all_python_children_are_started_in_one_way():
    for path in (ROOT / "torchtitan").rglob("*.py"):
        name, text = path.relative_to(ROOT / "torchtitan").as_posix(), path.read_text()
        if "sys.executable" in text and name != "process/children.py":
            assert ISOLATED.get(name, "?") in text, f"{name}: use torchtitan.process.children.python_command"
        assert not re.search(r'"-m", "torchtitan', text), name


@pytest.mark.parametrize("safe", ["", "1"], ids=["", "PYTHONSAFEPATH"])
def test_a_module_is_run_as_python_does(foreign, safe):
    script = "import sys, torchtitan, json; print(torchtitan.__file__, __name__, __spec__.name, sys.argv[1:])"
    (foreign / "show_module.py").write_text(script)
    environment = {**os.environ, "PYTHONSAFEPATH": safe, "PYTHONPATH": str(foreign) if safe else ""}
    if safe:
        (foreign / "json.py").unlink()
    done = run(python_command("show_module", "a", "-b"), env=environment)
    assert done.stderr == "", done.stderr
    assert done.stdout.strip() == f"{ROOT / 'torchtitan/__init__.py'} __main__ show_module ['a', '-b']"


def test_modules_of_a_user_can_be_imported(foreign):
    """Entry points and multiprocessing's spawned children find them as under `python -m`."""
    (foreign / "spawning.py").write_text(
        "import multiprocessing\n\ndef name(queue):\n    import my_plugin, torchtitan\n"
        "    queue.put([my_plugin.NAME, torchtitan.__file__])\n\nif __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n    queue = context.SimpleQueue()\n"
        "    child = context.Process(target=name, args=(queue,))\n    child.start()\n    print(*queue.get())\n"
    )
    done = run(python_command("spawning"))
    assert done.stdout.split() == ["mine", str(ROOT / "torchtitan/__init__.py")], done.stderr


@pytest.mark.parametrize("start", ["program", "command"])
def test_a_job_trains_in_a_folder_of_another_torchtitan(start, foreign, tmp_path):
    argv = jobs.arguments(tmp_path / "run", jobs.write_texts(tmp_path), training__steps=2, training__local_batch_size=4)
    command = python_command("torchtitan.launch", "2", *argv)
    if start == "command":
        command = [sys.executable, str(Path(sys.executable).with_name("torchtitan")), "train", *argv]
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert len(jobs.logged_steps(tmp_path / "run")) == 2


def test_commands_that_start_others_run_ours(foreign, tmp_path):
    argv = jobs.arguments(tmp_path / "run", jobs.write_texts(tmp_path), training__steps=2, checkpoint__enable=True)
    assert run(python_command("torchtitan", "check", *argv)).stdout.count("not foretold") == 0
    bench = run(python_command("torchtitan", "bench", *argv, "--steps=1", f"--out={tmp_path}/rows.jsonl"))
    assert bench.returncode == 0, bench.stdout + bench.stderr
    sweep = run(python_command("torchtitan", "sweep", *argv, "--over=debug.seed=1", f"--to={tmp_path}/sweep"))
    assert sweep.returncode == 0, sweep.stdout + sweep.stderr
    generated = run(python_command("torchtitan", "generate", f"{tmp_path}/sweep/debug.seed=1", "--ranks=2"))
    assert generated.returncode == 0, generated.stderr


def test_the_fork_server_of_rehearsals_does_not_start_in_this_folder(foreign, monkeypatch):
    """It has the folder first on its path when it preloads; the processes that it forks return to this one."""
    folders = []
    monkeypatch.setattr(rehearsal.forkserver, "ensure_running", lambda: folders.append(os.getcwd()))
    rehearsal._start_fork_server()
    assert folders == ["/"] and os.getcwd() == str(foreign)


def test_ranks_are_started_in_this_way():
    assert python_command("torchtitan.train") == launch.PROGRAM


# The end of a parent


def descendants(pid: int) -> set[int]:
    found = {pid}
    for child in jobs.direct_children(pid):
        found |= descendants(child)
    return found


def wait_until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def all_ended(pids: set[int], seconds: float = 15) -> bool:
    deadline = time.monotonic() + seconds
    while not all(map(jobs.ended, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="processes end with their parents on Linux")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", ["bench", "sweep"])
def test_runs_end_with_the_command_that_started_them(command, number, tmp_path):
    texts = jobs.write_texts(tmp_path)
    argv = jobs.arguments(tmp_path / "run", texts, training__steps=100_000, training__local_batch_size=4)
    special = {
        "bench": ["--steps=100000", "--ranks=2", f"--out={tmp_path}/rows.jsonl"],
        "sweep": ["--over=debug.seed=1", "--ranks=2", f"--to={tmp_path}/sweep"],
    }[command]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        python_command("torchtitan", command, *argv, *special), stdout=subprocess.DEVNULL, env=environment
    )
    try:
        wait_until(lambda: list(tmp_path.rglob("metrics.jsonl")))
        everyone = descendants(process.pid)
        assert len(everyone) >= 4  # the command, the launcher and two ranks
        process.send_signal(number)
        code = process.wait(30)
        assert all_ended(everyone)
    finally:
        process.kill()
    assert code == (-9 if number == signal.SIGKILL else 128 + number)
    if command == "sweep":  # no failure is recorded, and the folder is free
        results = tmp_path / "sweep/sweep.jsonl"
        codes = [json.loads(line)["exit_code"] for line in results.read_text().splitlines()] if results.exists() else []
        assert codes == ([] if number == signal.SIGKILL else [128 + number])
    elif number != signal.SIGKILL:
        assert not list(tmp_path.glob("torchtitan-*"))


@pytest.mark.skipif(sys.platform != "linux", reason="processes end with their parents on Linux")
@pytest.mark.parametrize("kind", ["module", "program", "workers"])
def test_a_tied_child_ends_with_its_parent(kind, tmp_path):
    (tmp_path / "wait_long.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    code = {
        "module": "command = python_command('wait_long', tied=True)",
        "program": "command = tied_command(['sh', '-c', 'echo up; exec sleep 600'])",
        "workers": "command = python_command('prepare_long', tied=False)",
    }[kind]
    if kind == "workers":
        (tmp_path / "prepare_long.py").write_text(
            "import time\nfrom concurrent.futures import ProcessPoolExecutor\n"
            "from torchtitan.datasets import preparing\n"
            "if __name__ == '__main__':\n"
            "    arguments = 'bytes', {}, preparing.PrepareOptions()\n"
            "    pool = ProcessPoolExecutor(2, initializer=preparing._start_worker, initargs=arguments)\n"
            "    list(pool.map(time.sleep, [0.2] * 4))\n"
            "    futures = [pool.submit(time.sleep, 600) for _ in range(2)]\n"
            "    print('up', flush=True)\n    time.sleep(600)\n"
        )
    script = (
        "import subprocess\nfrom torchtitan.process.children import python_command, tied_command\n"
        f"{code}\nsubprocess.run(command)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "up\n"
    everyone = descendants(parent.pid)
    assert len(everyone) >= (4 if kind == "workers" else 2)
    victim = jobs.direct_children(parent.pid)[0] if kind == "workers" else parent.pid
    os.kill(victim, signal.SIGKILL)
    parent.wait(30)
    assert all_ended(everyone)


def test_a_child_of_a_parent_that_is_gone_does_not_start(tmp_path):
    command = tied_command(["true"])
    command[2] = "999999:15"
    assert run(command).returncode == 128 + signal.SIGKILL
