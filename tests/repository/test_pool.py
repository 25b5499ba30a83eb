"""The test harness: results in order of ranks, failures named by rank, new ranks after a failure."""

import ast
import os
import resource
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.support import shared_meshes
from tests.support.jobs import ROOT
from tests.support.launched_ranks import has_ended
from tests.support.leftovers import restore_after_test
from tests.support.pool import RankCrashed, RankFailed, run_alone, run_ranks, run_script
from torchtitan.checkpoint.agreement import Peers
from torchtitan.parallelisms.degrees import ParallelDims
from torchtitan.process import distributed
from torchtitan.process.ranks import Ranks


def sum_of_ranks(offset):
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def fail_on_rank_one():
    if dist.get_rank() == 1:
        raise ValueError("planted")
    dist.barrier()


def test_every_rank_answers_in_order():
    assert run_ranks(2, sum_of_ranks, 10) == [(0, 21.0), (1, 21.0)]


def test_a_failing_rank_is_named_and_the_next_test_gets_fresh_ranks():
    with pytest.raises(RankFailed, match=r"rank 1 ---[\s\S]*planted"):
        run_ranks(2, fail_on_rank_one)
    assert run_ranks(2, sum_of_ranks, 0) == [(0, 1.0), (1, 1.0)]


def destroy_process_group():
    dist.destroy_process_group()


def test_a_test_that_destroys_the_process_group_fails_and_not_the_next():
    with pytest.raises(RankFailed, match="left a process group"):
        run_ranks(2, destroy_process_group)
    assert run_ranks(2, sum_of_ranks, 0) == [(0, 1.0), (1, 1.0)]


def world_inside_and_afterwards() -> tuple[bool, list[str], bool]:
    """Return whether a process group exists inside `taken_away`, the changed variables afterwards, and whether one
    exists afterwards.
    """
    os.environ.pop("TORCH_GLOO_LAZY_INIT", None)
    os.environ |= {"CHANGED": "a", "REMOVED": "a"}
    environment = dict(os.environ)
    with restore_after_test():
        distributed.init(Ranks(), timeout_seconds=10)
        os.environ["CHANGED"] = "b"
        del os.environ["REMOVED"]
        within = dist.is_initialized() and os.environ["TORCH_GLOO_LAZY_INIT"] == "1"
    return within, sorted(set(os.environ.items()) ^ set(environment.items())), dist.is_initialized()


def test_a_test_starts_without_the_process_group_of_an_earlier_one():
    assert run_alone(world_inside_and_afterwards) == (True, [], False)


def test_run_script_behaves_like_a_new_python_process(tmp_path):
    script = tmp_path / "scripts/speak.py"
    script.parent.mkdir()
    script.with_name("beside.py").write_text("import os, sys\n")
    script.write_text(
        "from beside import os, sys\nprint(sys.argv[1:], os.getcwd(), __name__, flush=True)\n"
        "os.system('echo its child')\nraise SystemExit('no more')\n"
    )
    expected = f"['a', '--b'] {tmp_path} __main__\nits child\n"
    assert run_script(tmp_path, script, "a", "--b") == (1, expected, "no more\n")


STARTER = """
import subprocess, sys

def run(*command, **options):
    done = subprocess.run(command, text=True, capture_output=True, **options)
    print([done.returncode, done.stdout, done.stderr])

show = "import os, sys; sys.stdout.reconfigure(errors='replace')"
show += "; print(os.getppid(), sys.argv, os.getcwd(), os.environ.get('A'), input()); sys.exit(3)"
run(sys.executable, "-c", show, "b", input="typed", cwd="/", env={"A": "1"})
run(sys.executable, "child.py", "c")
run(sys.executable, "-m", "child")
run("sh", "-c", "echo $PPID; kill -9 $$")
raise SystemExit(int("torch" not in sys.modules))
"""


def test_programs_that_a_script_starts_are_forks_of_it(tmp_path):
    """They have its imports and the arguments, streams, folder and exit codes of new processes."""
    (tmp_path / "starter.py").write_text("import os\nprint(os.getpid())\n" + STARTER)
    child = "import sys\nprint(sys.argv, 'torch' in sys.modules, file=sys.stderr)\n"
    (tmp_path / "child.py").write_text(child + "assert __name__ == '__main__'\nraise SystemExit('ended')\n")
    code, out, err = run_script(tmp_path, tmp_path / "starter.py")
    pid, *answers = out.splitlines()
    assert (code, err) == (0, "")
    assert [ast.literal_eval(answer) for answer in answers] == [
        [3, f"{pid} ['-c', 'b'] / 1 typed\n", ""],
        [1, "", "['child.py', 'c'] True\nended\n"],
        [1, "", f"['{tmp_path}/child.py'] True\nended\n"],
        [-9, f"{pid}\n", ""],
    ]


FIRST = """
import os, sys
from pathlib import Path
from tests.support import pool

pool._context.set_forkserver_preload([])
os.environ["OF_A_TEST"] = "1"
print(pool.run_script(Path(), Path(sys.argv[1])), os.environ["OF_A_TEST"])
"""


def test_forks_get_the_environment_of_their_own_test(tmp_path):
    script = tmp_path / "environment.py"
    script.write_text("import os\nprint('OF_A_TEST' in os.environ)\n")
    done = subprocess.run([sys.executable, "-c", FIRST, script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "(0, 'False\\n', '') 1\n", done.stderr


def crash_on_rank_one():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def test_a_crash_below_python_is_named():
    with (
        pytest.warns(UserWarning, match=r"crash_on_rank_one\(\): [\s\S]*rank 1 ---\nprocess ended .* -11\nFatal"),
        pytest.raises(RankCrashed, match=r"exit code -11\n[\s\S]* in crash_on_rank_one\n"),
    ):
        run_ranks(2, crash_on_rank_one)


CRASHING = """
from pathlib import Path
from tests.support.pool import RankCrashed, RankFailed

def once_more(folder, kind):
    assert not list(folder.iterdir())
    (folder / "written").touch()
    begun = Path(__file__).with_name(kind.__name__)
    begun.touch() if not begun.exists() else begun.unlink()
    if begun.exists():
        raise kind

def test_crash(tmp_path):
    once_more(tmp_path, RankCrashed)

def test_failure(tmp_path):
    once_more(tmp_path, RankFailed)
"""


def test_a_test_with_a_crashed_rank_is_retried_once_in_a_new_folder(tmp_path):
    (tmp_path / "test_crashing.py").write_text(CRASHING)
    command = [
        sys.executable,
        "-m",
        "pytest",
        f"--rootdir={ROOT}",
        "-c",
        ROOT / "pyproject.toml",
        "-p",
        "no:cacheprovider",
    ]
    ended = subprocess.run([*command, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1 and "1 failed, 1 passed, 1 rerun" in ended.stdout, ended.stdout


def wait_for_ever():
    while True:
        time.sleep(0.1)


def test_hanging_ranks_print_their_stacks():
    run_ranks(2, sum_of_ranks, 0)  # from here on they are there, however long it takes to start them
    with pytest.raises(RankFailed, match=r"rank 0 ---\nno answer within 1 s[\s\S]*in wait_for_ever[\s\S]*rank 1 ---"):
        run_ranks(2, wait_for_ever, limit=1)


def makes_meshes_and_groups() -> tuple[bool, bool]:
    dims, group = ParallelDims(2, 1, 2), Peers("a").group
    return dims.build_mesh("cpu") is dims.build_mesh("cpu"), Peers("a").group is group is not Peers("b").group


def test_equal_meshes_and_groups_are_shared():
    """Otherwise the threads of their groups would accumulate over the tests."""
    assert run_ranks(2, makes_meshes_and_groups) == [(True, True)] * 2


def test_ranks_listen_on_the_configured_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(RuntimeError, match="nowhere0"):
        shared_meshes.share_gloo_device()


KILLED = """
import os, signal
from tests.support import pool

pool._context.set_forkserver_preload([])
print(pool.run_ranks(1, os.getpid)[0], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_do_not_outlive_a_killed_pytest():
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert has_ended(int(done.stdout))
