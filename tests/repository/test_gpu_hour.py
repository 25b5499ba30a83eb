"""scripts/gpu_hour.sh, for a first hour on GPUs: its jobs pass the rules, and its parts run without a network."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import gpu_hour, gpu_programs, gpu_waits
from tests.support.forked_job import Program
from tests.support.jobs import ROOT
from torchtitan import launch
from torchtitan.config.manager import load
from torchtitan.rules import check

SCRIPT = ROOT / "scripts/gpu_hour.sh"
ENVIRONMENT = os.environ | {"PYTHON": sys.executable}


def listed_steps(**environment: str) -> list[tuple[str, str, dict[str, str], list[str]]]:
    """Return part, name, environment and command of each step of the script."""
    done = subprocess.run(
        ["bash", SCRIPT, "--list"], capture_output=True, text=True, check=True, env=ENVIRONMENT | environment
    )
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert all(len(row) == 5 and row[2] for row in rows)
    return [(part, name, json.loads(variables), shlex.split(command)) for part, name, _, variables, command in rows]


@pytest.mark.parametrize("environment", [{}, {"TINY": "1"}], ids=["real sizes", "tiny"])
def test_every_job_can_start(environment):
    jobs = [step for step in listed_steps(**environment) if any(part.startswith("--job.") for part in step[3])]
    assert {part for part, *_ in jobs} == {"same", "speed", "watch", "features", "large", "sharded", "pairs"}
    for _, name, variables, command in jobs:
        ranks = int(command[3]) if command[1:3] == ["-m", "torchtitan.launch"] else 1
        options = command[next(at for at, part in enumerate(command) if part.startswith("--job.")) :]
        options[0] = options[0].replace("=", f"={ROOT}/", 1)
        faults = check(load(options), ranks, "cpu" if "CUDA_VISIBLE_DEVICES" in variables else "cuda")
        assert not faults, f"{name}: {'; '.join(map(str, faults))}"


def test_waits_are_printed_by_the_ranks_of_the_launcher(monkeypatch, capsys):
    commands = []
    monkeypatch.setattr(launch, "PROGRAM", ("python", "gpu_waits.py"))
    monkeypatch.setattr(launch, "Processes", lambda command, *_: commands.append(command))
    monkeypatch.setattr(launch, "RankMonitor", lambda *_: None)
    launch.LocalRanks(load([]), ["--job.x=1"], 1, None).start(None, None, None, None)
    assert commands == [["python", "gpu_waits.py", "--job.x=1"]]
    gpu_waits.show_warning("called a synchronizing CUDA operation")
    gpu_waits.show_warning("another warning")
    assert capsys.readouterr().out == "host wait at elsewhere:0\n"


def test_names_are_unique_and_scripts_exist():
    steps = listed_steps()
    assert len({name for _, name, *_ in steps}) == len(steps)
    for _, _, _, command in steps:
        for part in command:
            if part.startswith("scripts/"):
                assert (ROOT / part).exists(), part


@pytest.mark.parametrize("arguments", [[], ["8"]], ids=["no part", "an unknown part"])
def test_wrong_arguments_print_the_usage(arguments):
    done = subprocess.run(["bash", SCRIPT, *arguments], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2 and "scripts/gpu_hour.sh PART [PART ...]" in done.stderr


@pytest.fixture
def archive(tmp_path):
    """Copy what an archive of the repository has; no git, no virtual environment."""
    for name in ("torchtitan", "scripts", "train_configs", "tests/assets/tokenizer"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


OWN_LOOPBACK = """
import fcntl, os, socket, struct, sys
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
os.execvp(sys.argv[1], sys.argv[1:])
"""


def without_network() -> list[str]:
    """Return the start of a command that runs with a loopback device and no network, where the machine allows that."""
    command = ["unshare", "-rn", sys.executable, "-c", OWN_LOOPBACK]
    allowed = shutil.which("unshare") and not subprocess.run([*command, "true"], capture_output=True).returncode
    return command if allowed else []


def test_parts_run_on_a_cpu_without_a_network(archive):
    variables = {"TINY": "1", "OUT": str(archive / "out"), "OMP_NUM_THREADS": "1", "HOME": str(archive)}
    variables |= {"PYTHON": sys.executable, "PATH": os.environ["PATH"]}
    command = [*without_network(), "bash", "scripts/gpu_hour.sh", "probe", "same"]
    done = subprocess.run(command, cwd=archive, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table = (archive / "out/table.txt").read_text()
    assert done.stdout.endswith(table) and "FAILED" not in table
    assert [row.split()[0] for row in table.splitlines() if row[0] != " "] == [
        *("probe", "float32", "float32_cpu", "bfloat16", "bfloat16_compiled", "float32")
    ]
    assert "float32 and float32_cpu differ by 0.0e+00: equal" in table and "  Dropout, 16384 x 4096 " in table
    (archive / "train_configs").rename(archive / "gone")
    command = ["bash", "scripts/gpu_hour.sh", "same"]
    output = subprocess.run(command, cwd=archive, env=variables, capture_output=True, check=True).stdout
    assert b"==" not in output, "steps that have a row are not run again"


def test_unknown_programs_are_refused(archive):
    command = [sys.executable, "scripts/gpu_programs.py", "llama", "compiled_llama"]
    done = subprocess.run(command, cwd=archive, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout and "unknown: compiled_llama; known: llama" in done.stderr


AS_MODULE = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def run_forked(command: list[str], cwd: Path, env: dict[str, str], timeout: float, **_) -> subprocess.CompletedProcess:
    """Run `python -m MODULE` like `subprocess.run`, in a fork."""
    assert command[:2] == [sys.executable, "-m"]
    process = Program(AS_MODULE, *command[2:], folder=cwd, environment=env)
    out, err = process.communicate(timeout)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_programs_are_compared_and_resumed_on_a_cpu(tmp_path, monkeypatch, capsys):
    """The programs are forks, and their model is smaller; the parts above run in new processes."""
    rows = ("llama", "pairs", "resume_disabled", "uses")
    monkeypatch.setattr(gpu_programs, "OUT", tmp_path)
    monkeypatch.setattr(gpu_programs, "EXACT", gpu_programs.EXACT | {"model.overrides": "{n_layers=1}"})
    monkeypatch.setattr(gpu_programs, "subprocess", SimpleNamespace(run=run_forked))
    monkeypatch.setattr(sys, "argv", ["gpu_programs.py", *rows])
    assert gpu_programs.main() == 0, capsys.readouterr().out
    answers = [row.split()[:2] for row in capsys.readouterr().out.splitlines()]
    assert sorted(answers) == sorted([name, "equal:"] for name in rows)


def test_a_step_that_fails_has_a_row_and_is_run_again(archive):
    (archive / "scripts/gpu_probe.py").write_text("print('the reason'); raise SystemExit(3)")
    variables = ENVIRONMENT | {"TINY": "1", "OUT": str(archive / "out")}
    for rows in (1, 2):
        subprocess.run(["bash", "scripts/gpu_hour.sh", "probe"], cwd=archive, env=variables, capture_output=True)
        table = (archive / "out/table.txt").read_text()
        assert table == "probe              FAILED (3): the reason\n" * rows


def test_wheels_of_a_failed_installation_are_installed_again(tmp_path, monkeypatch):
    exit_codes = [1, 0]

    def pip(command: list[str], check: bool) -> None:
        folder = Path(command[command.index("--target") + 1])
        folder.mkdir()  # not there yet
        (folder / f"{len(exit_codes)}.py").touch()
        if exit_codes.pop(0):
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(gpu_hour, "OUT", tmp_path)
    monkeypatch.setattr(gpu_hour.subprocess, "run", pip)
    monkeypatch.setenv("PYTHONPATH", "before")
    with pytest.raises(subprocess.CalledProcessError):
        gpu_hour.install_wheels("wheels")
    for _ in range(2):  # the second time they are there
        gpu_hour.install_wheels("wheels")
    assert [file.name for file in (tmp_path / "site").iterdir()] == ["1.py"]
    assert os.environ["PYTHONPATH"].startswith(f"{tmp_path / 'site'}:")
