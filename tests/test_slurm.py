"""SLURM without SLURM: programs of its names on PATH that do what its manual says of them.

srun starts its tasks on this machine, sets what they find in the environment, passes SIGUSR1 on and ends with the
highest exit code. What the real one does besides is tested by `./run_tests.sh slurm`.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import jobs
from torchtitan.core.errors import JobError
from torchtitan.launcher import slurm
from torchtitan.launcher.nodes import Nodes
from torchtitan.process.ranks import count_ranks

SRUN = """
import itertools, os, signal, subprocess, sys
options = list(itertools.takewhile(lambda word: word.startswith("--"), sys.argv[1:]))
given = dict(option[2:].partition("=")[::2] for option in options)
count, each = int(given["ntasks"]), int(given.get("ntasks-per-node", 1))
def task(index):
    step = dict(ID=0, NODELIST="n[1-2]", NUM_TASKS=count, NUM_NODES=count // each)
    step["TASKS_PER_NODE"] = f"{each}(x{count // each})"
    names = {f"SLURM_STEP_{name}": value for name, value in step.items()}
    names |= dict(SLURM_PROCID=index, SLURM_NODEID=index // each, SLURM_LOCALID=index % each)
    environment = os.environ | {name: str(value) for name, value in names.items()}
    return subprocess.Popen(sys.argv[1 + len(options):], env=environment)
with open(os.environ["SEEN"], "a") as seen:
    print("srun", *options, file=seen)
tasks, early = [], []
def pass_on(*_):
    early.append(1) if len(tasks) < count else [each.send_signal(signal.SIGUSR1) for each in tasks]
signal.signal(signal.SIGUSR1, pass_on)
for index in range(count):
    tasks.append(task(index))
if early:
    pass_on()
sys.exit(max(128 - code if code < 0 else code for code in [each.wait() for each in tasks]))
"""
SCONTROL = """
import os, sys
with open(os.environ["SEEN"], "a") as seen:
    print("scontrol", *sys.argv[1:], file=seen)
if sys.argv[1:3] == ["show", "hostnames"]:
    print("n1\\nn2")
elif "node" in sys.argv:
    print(f"NodeName={sys.argv[-1]} Arch=x86_64 NodeAddr=127.0.0.1 NodeHostName=somewhere State=IDLE")
sys.exit(int(os.environ.get("SCONTROL", "0")))
"""
SQUEUE = """
print("2030-01-02T03:04:05")
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Path:
    """An allocation of two machines, outside of a step; the file of what was asked of SLURM."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("squeue", SQUEUE)):
        (programs / name).write_text(f"#!{sys.executable}\n{text}")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    seen = tmp_path / "seen"
    monkeypatch.setenv("SEEN", str(seen))
    for name, value in dict(JOB_ID=77, JOB_NODELIST="n[1-2]", JOB_NUM_NODES=2, JOB_CPUS_PER_NODE="96(x2),48").items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    return seen


def as_task(monkeypatch, task: int, tasks: int, machines: int, step: str = "3") -> None:
    each = tasks // machines
    names = dict(STEP_ID=step, STEP_NUM_TASKS=tasks, STEP_NUM_NODES=machines, STEP_NODELIST="n[1-2]")
    names |= dict(
        PROCID=task, LOCALID=task % each, STEP_TASKS_PER_NODE=f"{each}(x{machines})" if machines > 1 else each
    )
    for name, value in names.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))


def launch(*words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "torchtitan.launch", *words]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=jobs.ROOT, start_new_session=True, **pipes)


# Where a process is


@pytest.mark.parametrize(
    ("names", "inside", "outside"),
    [
        ({}, False, False),
        ({"SLURM_JOB_ID": "7"}, False, True),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, True, False),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "4294967290"}, False, True),
        ({"SLURM_JOB_ID": "7", "NNODES": "1"}, False, False),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "NNODES": "2"}, False, False),
    ],
    ids=["nowhere", "batch script", "step", "shell of salloc", "by hand", "by hand in a step"],
)
def test_where_a_process_is(names, inside, outside, monkeypatch):
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert (slurm.in_step(), slurm.outside_of_step()) == (inside, outside)


def test_a_task_a_machine_is_a_launcher_a_machine(cluster, monkeypatch):
    as_task(monkeypatch, 1, 2, 2)
    assert slurm.nodes_of_step(8) == Nodes(2, 1, "127.0.0.1", 20000 + 77 * 8 + 3)
    assert cluster.read_text().splitlines() == ["scontrol show hostnames n[1-2]", "scontrol --oneliner show node n1"]
    monkeypatch.setenv("HEAD_ADDR", "10.0.0.1")
    monkeypatch.setenv("HEAD_PORT", "29500")
    assert slurm.nodes_of_step(8) == Nodes(2, 1, "10.0.0.1", 29500)


def test_one_task_is_one_machine(cluster, monkeypatch):
    as_task(monkeypatch, 0, 1, 1)
    assert slurm.nodes_of_step(8) == Nodes() and not cluster.exists()


@pytest.mark.parametrize(("visible", "taken"), [("4,5", "5"), ("7", "7"), (None, None)])
def test_a_task_a_gpu_is_a_rank_with_that_gpu(visible, taken, cluster, monkeypatch):
    """Those that are bound to theirs by SLURM see one; those that are not see all of the machine's."""
    as_task(monkeypatch, 3, 4, 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert slurm.nodes_of_step(1).count == 4 and slurm.nodes_of_step(1).index == 3
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == taken


@pytest.mark.parametrize(
    ("tasks", "ranks", "visible", "told"),
    [
        (4, 2, "0,1", "srun: 4 tasks on 2 machines, with NGPU = 2; allowed: a task a machine"),
        (6, 1, "0,1", "srun: 3 or more tasks on a machine and 2 GPUs"),
    ],
)
def test_tasks_that_are_neither_are_refused(tasks, ranks, visible, told, cluster, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    as_task(monkeypatch, 0 if ranks > 1 else 2, tasks, 2)
    with pytest.raises(JobError, match=told.replace("(", r"\(")):
        slurm.nodes_of_step(ranks)
    as_task(monkeypatch, 1, tasks, 2)
    if ranks > 1:  # which all of them see
        with pytest.raises(JobError, match="^$"):
            slurm.nodes_of_step(ranks)


def test_tasks_in_uneven_numbers_are_refused(cluster, monkeypatch):
    as_task(monkeypatch, 0, 4, 2)
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "3,1")
    with pytest.raises(JobError, match="4 tasks on 2 machines"):
        slurm.nodes_of_step(1)


def test_a_slurm_that_does_not_answer_is_told(cluster, monkeypatch):
    as_task(monkeypatch, 0, 2, 2)
    monkeypatch.setenv("SCONTROL", "1")
    with pytest.raises(JobError, match="HEAD_ADDR: not given, and SLURM does not tell it"):
        slurm.nodes_of_step(1)


@pytest.mark.parametrize(("visible", "count"), [("0,1,2", 3), ("GPU-a", 1), ("", 2)])
def test_as_many_ranks_as_gpus(visible, count, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_ranks() == count


# srun


def test_without_srun_there_is_a_remedy(cluster, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    process = launch("1", "--training.steps=3")
    told = process.communicate(timeout=120)[1]
    assert told.startswith("SLURM_JOB_ID: given 77, an allocation of SLURM, and there is")
    assert process.returncode == 2


def test_a_refused_job_is_told_once_and_keeps_its_code(cluster, tmp_path):
    process = launch("1", *jobs.arguments(tmp_path / "run", jobs.write_texts(tmp_path), training__seq_len=-3))
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, ""), err
    assert err.count("training.seq_len") == 1
    asked = cluster.read_text().splitlines()[0]
    assert asked.startswith("srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=48 --kill-on-bad-exit=0")


PROGRAM = """
import os, signal, sys, time
def asked(number, frame):
    os.write(1, f"{os.environ['SLURM_PROCID']} got {number}\\n".encode())
    sys.exit(138)
signal.signal(signal.SIGUSR1, asked)
os.write(1, f"ready {os.environ.get('SLURM_CPUS_PER_TASK')} {os.environ.get('SLURM_JOB_END_TIME')}\\n".encode())
time.sleep(600)
"""
FRONT = """
import sys
from torchtitan.launcher.slurm import start_on_all
from torchtitan.launcher.processes import SignalQueue
sys.exit(start_on_all([sys.executable, "-c", sys.argv[1]], SignalQueue()))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_reaches_the_launchers_as_one_that_srun_survives(number, cluster, monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")  # of the allocation's request, not of the step's
    command = [sys.executable, "-c", FRONT, PROGRAM]
    process = subprocess.Popen(command, cwd=jobs.ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    for _ in range(2):
        assert process.stdout.readline() == f"ready None {int(time.mktime((2030, 1, 2, 3, 4, 5, 0, 0, -1)))}\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert sorted(out.splitlines()) == ["0 got 10", "1 got 10"] and process.returncode == 128 + number


# The batch script

RUN = """#!/usr/bin/env bash
trap 'echo saved; exit 138' USR1
touch started
while [ ! -e done ]; do sleep 0.05; done
exit $(cat done)
"""


@pytest.fixture
def batch(cluster, tmp_path, monkeypatch):
    """The batch script as SLURM starts it, over a run that a file ends with the exit code that is in it."""
    (tmp_path / "run_llama_train.sh").write_text(RUN)
    (tmp_path / "run_llama_train.sh").chmod(0o755)
    monkeypatch.setenv("SLURM_SUBMIT_DIR", str(tmp_path))
    script = shutil.copy(jobs.ROOT / "scripts/multinode_trainer.slurm", tmp_path / "slurm_script")
    process = subprocess.Popen(["bash", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not (tmp_path / "started").exists():
        assert process.poll() is None
        time.sleep(0.02)
    yield process
    (tmp_path / "done").write_text("1")
    process.wait(60)


def finish(process: subprocess.Popen, folder: Path, code: int | None = None) -> tuple[int, str, list[str]]:
    """Exit code, output, and what was asked of SLURM."""
    if code is not None:
        (folder / "done.new").write_text(str(code))
        (folder / "done.new").rename(folder / "done")
    out, _ = process.communicate(timeout=120)
    seen = folder / "seen"
    return process.returncode, out, seen.read_text().splitlines() if seen.exists() else []


def test_a_notice_saves_and_queues_again(batch, tmp_path):
    batch.send_signal(signal.SIGUSR1)
    code, out, asked = finish(batch, tmp_path)
    assert code == 0 and asked == ["scontrol requeue 77"] and "saved\n== queued again" in out


def test_a_cancelled_job_is_not_queued_again_though_it_had_a_notice(batch, tmp_path):
    batch.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    batch.send_signal(signal.SIGUSR1)
    code, _, asked = finish(batch, tmp_path)
    assert (code, asked) == (138, [])


@pytest.mark.parametrize("code", [0, 2, 3, 4, 5, 7, 1, 6, 137, 130])
def test_a_run_that_ends_by_itself_is_not_queued_again_and_keeps_its_code(code, batch, tmp_path):
    assert finish(batch, tmp_path, code)[::2] == (code, [])


def test_a_run_that_has_seen_its_end_come_is_queued_again(batch, tmp_path):
    assert finish(batch, tmp_path, 143)[::2] == (0, ["scontrol requeue 77"])


def test_a_cluster_that_does_not_queue_again_gets_the_exit_code(cluster, tmp_path, monkeypatch, request):
    monkeypatch.setenv("SCONTROL", "1")
    code, out, _ = finish(request.getfixturevalue("batch"), tmp_path, 143)
    assert code == 143 and "== not queued again, after 0 times" in out


def test_there_is_a_last_time(cluster, tmp_path, monkeypatch, request):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setenv("MAX_REQUEUES", "2")
    assert finish(request.getfixturevalue("batch"), tmp_path, 143)[::2] == (143, [])


def test_the_batch_script_is_for_any_cluster():
    text = (jobs.ROOT / "scripts/multinode_trainer.slurm").read_text()
    asked = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert asked == ["--job-name=torchtitan", "--requeue", "--open-mode=append", "--signal=B:USR1@180"]
