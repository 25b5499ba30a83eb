"""The SLURM launcher with fake programs srun, scontrol and squeue on PATH that behave as SLURM's manual says.

The fake srun starts its tasks on this machine, sets their environment, forwards SIGUSR1 and ends with the highest exit
code. `./run_tests.sh slurm` tests with a real cluster.
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
from torchtitan.launcher.processes import SignalQueue
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
    """Simulate an allocation of two machines, outside of a step; the file that logs calls of SLURM's programs."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("squeue", SQUEUE)):
        (programs / name).write_text(f"#!{sys.executable}\n{text}")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    log = tmp_path / "seen"
    monkeypatch.setenv("SEEN", str(log))
    for name, value in dict(JOB_ID=77, JOB_NODELIST="n[1-2]", JOB_NUM_NODES=2, JOB_CPUS_PER_NODE="96(x2),48").items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    return log


def set_task(monkeypatch, task: int, tasks: int, machines: int, step: str = "3") -> None:
    tasks_per_machine = tasks // machines
    names = dict(STEP_ID=step, STEP_NUM_TASKS=tasks, STEP_NUM_NODES=machines, STEP_NODELIST="n[1-2]")
    names |= dict(
        PROCID=task,
        LOCALID=task % tasks_per_machine,
        STEP_TASKS_PER_NODE=f"{tasks_per_machine}(x{machines})" if machines > 1 else tasks_per_machine,
    )
    for name, value in names.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))


def launch(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "torchtitan.launch", *arguments]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=jobs.ROOT, start_new_session=True, **pipes)


# Inside and outside of a step


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
def test_in_step_and_outside_of_step(names, inside, outside, monkeypatch):
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert (slurm.in_step(), slurm.outside_of_step()) == (inside, outside)


def test_one_task_per_machine_is_one_launcher_per_machine(cluster, monkeypatch):
    set_task(monkeypatch, 1, 2, 2)
    assert slurm.nodes_of_step(8) == Nodes(2, 1, "127.0.0.1", 20000 + 77 * 8 + 3)
    assert cluster.read_text().splitlines() == ["scontrol show hostnames n[1-2]", "scontrol --oneliner show node n1"]
    monkeypatch.setenv("HEAD_ADDR", "10.0.0.1")
    monkeypatch.setenv("HEAD_PORT", "29500")
    assert slurm.nodes_of_step(8) == Nodes(2, 1, "10.0.0.1", 29500)


def test_one_task_is_one_machine(cluster, monkeypatch):
    set_task(monkeypatch, 0, 1, 1)
    assert slurm.nodes_of_step(8) == Nodes() and not cluster.exists()


@pytest.mark.parametrize(("visible", "expected"), [("4,5", "5"), ("7", "7"), (None, None)])
def test_one_task_per_gpu_is_one_rank_with_that_gpu(visible, expected, cluster, monkeypatch):
    """A task sees only its GPU if SLURM binds it, else all GPUs of the machine."""
    set_task(monkeypatch, 3, 4, 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert slurm.nodes_of_step(1).count == 4 and slurm.nodes_of_step(1).index == 3
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == expected


@pytest.mark.parametrize(
    ("tasks", "ranks", "visible", "message"),
    [
        (4, 2, "0,1", "srun: 4 tasks on 2 machines, with NGPU = 2; allowed: a task a machine"),
        (6, 1, "0,1", "srun: 3 or more tasks on a machine and 2 GPUs"),
    ],
)
def test_other_numbers_of_tasks_are_refused(tasks, ranks, visible, message, cluster, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    set_task(monkeypatch, 0 if ranks > 1 else 2, tasks, 2)
    with pytest.raises(JobError, match=message.replace("(", r"\(")):
        slurm.nodes_of_step(ranks)
    set_task(monkeypatch, 1, tasks, 2)
    if ranks > 1:  # all tasks see this fault, so only the first reports it
        with pytest.raises(JobError, match="^$"):
            slurm.nodes_of_step(ranks)


def test_tasks_in_uneven_numbers_are_refused(cluster, monkeypatch):
    set_task(monkeypatch, 0, 4, 2)
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "3,1")
    with pytest.raises(JobError, match="4 tasks on 2 machines"):
        slurm.nodes_of_step(1)


def test_a_failing_scontrol_is_reported(cluster, monkeypatch):
    set_task(monkeypatch, 0, 2, 2)
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
    errors = process.communicate(timeout=120)[1]
    assert errors.startswith("SLURM_JOB_ID: given 77, an allocation of SLURM, and there is")
    assert process.returncode == 2


def test_a_refused_job_is_reported_once_and_keeps_its_code(cluster, tmp_path):
    process = launch("1", *jobs.arguments(tmp_path / "run", jobs.write_texts(tmp_path), training__seq_len=-3))
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, ""), err
    assert err.count("training.seq_len") == 1
    call = cluster.read_text().splitlines()[0]
    assert call.startswith("srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=48 --kill-on-bad-exit=0")


PROGRAM = """
import os, signal, sys, time
def asked(number, frame):
    os.write(1, f"{os.environ['SLURM_PROCID']} got {number}\\n".encode())
    sys.exit(138)
signal.signal(signal.SIGUSR1, asked)
os.write(1, f"ready {os.environ.get('SLURM_CPUS_PER_TASK')} {os.environ.get('SLURM_JOB_END_TIME')}\\n".encode())
time.sleep(600)
"""
FRONT_END = """
import sys
from torchtitan.launcher.slurm import start_on_all
from torchtitan.launcher.processes import SignalQueue
sys.exit(start_on_all([sys.executable, "-c", sys.argv[1]], SignalQueue()))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_reaches_the_launchers_as_one_that_srun_survives(number, cluster, monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")  # of the allocation, not of the step
    command = [sys.executable, "-c", FRONT_END, PROGRAM]
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
    """Start the batch script as SLURM does. Its run ends with the exit code that a test writes to the file `done`."""
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
    """End the run with `code`, if any; return the batch script's exit code, output, and calls of SLURM's programs."""
    if code is not None:
        (folder / "done.new").write_text(str(code))
        (folder / "done.new").rename(folder / "done")
    out, _ = process.communicate(timeout=120)
    log = folder / "seen"
    return process.returncode, out, log.read_text().splitlines() if log.exists() else []


def test_a_time_limit_notice_saves_and_requeues(batch, tmp_path):
    batch.send_signal(signal.SIGUSR1)
    code, out, calls = finish(batch, tmp_path)
    assert code == 0 and calls == ["scontrol requeue 77"] and "saved\n== queued again" in out


def test_a_cancelled_job_is_not_requeued_after_a_notice(batch, tmp_path):
    batch.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    batch.send_signal(signal.SIGUSR1)
    code, _, calls = finish(batch, tmp_path)
    assert (code, calls) == (138, [])


@pytest.mark.parametrize("code", [0, 2, 3, 4, 5, 7, 1, 6, 137, 130])
def test_a_run_that_ends_by_itself_is_not_queued_again_and_keeps_its_code(code, batch, tmp_path):
    assert finish(batch, tmp_path, code)[::2] == (code, [])


def test_a_run_stopped_by_its_time_limit_is_requeued(batch, tmp_path):
    assert finish(batch, tmp_path, 11)[::2] == (0, ["scontrol requeue 77"])


def test_a_cluster_that_does_not_queue_again_gets_the_exit_code(cluster, tmp_path, monkeypatch, request):
    monkeypatch.setenv("SCONTROL", "1")
    code, out, _ = finish(request.getfixturevalue("batch"), tmp_path, 11)
    assert code == 11 and "== not queued again, after 0 times" in out


def test_the_number_of_requeues_is_limited(cluster, tmp_path, monkeypatch, request):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setenv("MAX_REQUEUES", "2")
    assert finish(request.getfixturevalue("batch"), tmp_path, 11)[::2] == (11, [])


@pytest.mark.parametrize("image", ["images/torchtitan.sif", "registry.example#torchtitan:0.2"], ids=["sif", "pyxis"])
def test_launchers_start_in_a_container(image, cluster, tmp_path, monkeypatch):
    (tmp_path / "run_llama_train.sh").write_text("exit 99")
    (tmp_path / "run_llama_train.sh").chmod(0o755)
    (tmp_path / "efa.sh").write_text("FI_PROVIDER=efa\n")
    for name in ("python3", "apptainer"):
        program = tmp_path / f"programs/{name}"
        program.write_text(f'#!/bin/sh\necho "{name} $* head $HEAD_ADDR provider $FI_PROVIDER"\n')
        program.chmod(0o755)
    (tmp_path / "functions").write_text('module() { echo "module $*"; }\nexport -f module\n')
    given = dict(SLURM_SUBMIT_DIR=tmp_path, SLURM_CPUS_ON_NODE=96, CONTAINER=image, SRUN_FLAGS="--network=sn_all")
    given |= dict(MODULES="cuda efa", ENVIRONMENT_FILES="efa.sh", NGPU=8, CONFIG_FILE="job.toml")
    given |= dict(BASH_ENV=tmp_path / "functions")
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    script = jobs.ROOT / "scripts/multinode_trainer.slurm"
    done = subprocess.run(["bash", script, "--training.steps=5"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    out, (call,) = done.stdout, [line for line in cluster.read_text().splitlines() if line.startswith("srun")]
    assert "module load cuda\nmodule load efa\n" in out
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=96 --kill-on-bad-exit=0" in call
    assert "--network=sn_all" in call
    command = "-m torchtitan.launch 8 --job.config_file job.toml --training.steps=5 head 127.0.0.1 provider efa"
    if image.endswith(".sif"):
        prefix = f"apptainer exec --nv --pwd {tmp_path} --bind {tmp_path}:{tmp_path} {image} python3 "
    else:
        prefix = "python3 "
        flags = f"--container-image={image} --container-mounts={tmp_path}:{tmp_path} --container-workdir={tmp_path}"
        assert call.endswith(flags)
    assert out.count(f"\n{prefix}{command}") == 2  # on two machines


def test_a_module_that_does_not_load_ends_the_job(tmp_path, cluster, monkeypatch):
    (tmp_path / "run_llama_train.sh").touch(0o755)
    monkeypatch.setenv("SLURM_SUBMIT_DIR", str(tmp_path))
    monkeypatch.setenv("MODULES", "none")
    script = jobs.ROOT / "scripts/multinode_trainer.slurm"
    assert subprocess.run(["bash", script], capture_output=True, timeout=60).returncode == 2


def test_flags_of_srun_are_passed_on(cluster, monkeypatch):
    monkeypatch.setenv("SRUN_FLAGS", "--network=sn_all '--comment=two words'")
    queue = SignalQueue()
    try:
        assert slurm.start_on_all([sys.executable, "-c", ""], queue) == 0
    finally:
        queue.close()
    assert "--mpi=none --network=sn_all --comment=two words" in cluster.read_text()


def test_the_batch_script_is_for_any_cluster():
    text = (jobs.ROOT / "scripts/multinode_trainer.slurm").read_text()
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert options == ["--job-name=torchtitan", "--requeue", "--open-mode=append", "--signal=B:USR1@180"]
