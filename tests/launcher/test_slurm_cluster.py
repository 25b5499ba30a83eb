"""Jobs on a real SLURM of two nodes, which the tests start on this machine. Run by `./run_tests.sh slurm`.

After a signal, a preemption, a killed rank or the time limit, the run resumes and has the losses of an uninterrupted
run; after scancel it stays ended.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import jobs, slurm_cluster
from tests.support.pool import run_ranks
from tests.support.slurm_cluster import Cluster

STEPS, LIMIT = 60, 30
SCRIPT = jobs.ROOT / "scripts/multinode_trainer.slurm"
OPTIONS = dict(training__local_batch_size=4, training__steps=STEPS, checkpoint__enable=True, optimizer__lr=1e-3)
OPTIONS |= dict(checkpoint__interval=1000)


@pytest.fixture(scope="module")
def slurm(request, tmp_path_factory):
    if not request.config.getoption("--slurm"):
        pytest.skip("starts daemons and takes minutes: ./run_tests.sh slurm")
    if (reason := slurm_cluster.missing()) is not None:
        pytest.skip(reason)
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        print(f"{cluster.version}, proctrack/{slurm_cluster.tracking()}")
        yield cluster


@pytest.fixture(scope="module")
def texts(slurm, tmp_path_factory):
    return jobs.write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def undisturbed(texts, tmp_path_factory):
    """Return the losses of an uninterrupted run on two ranks."""
    rows = run_ranks(2, jobs.train, jobs.arguments(tmp_path_factory.mktemp("straight"), texts, **OPTIONS))[0][0]
    return [row["loss"] for row in rows]


class Job:
    """A run of scripts/multinode_trainer.slurm on both nodes, one rank each unless `request` changes that.

    `seconds` is SLURM's time limit of each start; its command line only takes minutes.
    """

    def __init__(
        self, slurm: Cluster, folder: Path, texts: Path, *request: str, seconds: int | None = None, **options: object
    ) -> None:
        self.slurm, self.folder, self.log = slurm, folder / "run", folder / "log"
        script = SCRIPT
        if seconds is not None:
            script, options_of_bash = folder / "sooner.slurm", "set -uo pipefail\n"
            set_end = f"scontrol update JobId=$SLURM_JOB_ID EndTime=now+{seconds}\n"
            script.write_text(SCRIPT.read_text().replace(options_of_bash, options_of_bash + set_end, 1))
        request = request or ("--gpus-per-node=1",)
        command = ["sbatch", "--parsable", "--nodes=2", f"--output={self.log}", *request, str(script)]
        self.id = slurm.run(*command, *jobs.arguments(self.folder, texts, **OPTIONS | options), cwd=jobs.ROOT).strip()

    def state(self) -> dict[str, str]:
        return self.slurm.state(self.id)

    def wait_for(self, condition: Callable[[], bool], seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (self.state(), self.log.read_text())
            time.sleep(0.1)

    def wait_for_step(self, step: int) -> None:
        metrics = self.folder / "metrics.jsonl"
        self.wait_for(lambda: metrics.exists() and len(jobs.logged_steps(self.folder)) >= step)

    def started_again(self, times: int = 1) -> dict[str, str]:
        return self.slurm.wait(self.id, lambda state: state["Restarts"] == str(times))

    def completed(self, seconds: float = 120) -> dict[str, str]:
        state = self.slurm.ended(self.id, seconds)
        assert state["JobState"] == "COMPLETED", (state, self.log.read_text())
        return state

    def losses(self) -> list[float]:
        rows = jobs.logged_steps(self.folder)
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        return [row["loss"] for row in rows]

    def saved_steps(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in (self.folder / "checkpoint").glob("step-*"))

    def ranks(self) -> list[int]:
        """Return the process ids of all ranks."""
        pids = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                arguments = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if b"torchtitan.train" in arguments and f"--job.dump_folder={self.folder}".encode() in arguments:
                pids.append(int(path.parent.name))
        return sorted(pids)


def test_a_launch_detects_machines_and_gpus_and_fails_without_a_save(slurm, texts, tmp_path):
    options = dict(training__local_batch_size=2, training__steps=100000, checkpoint__enable=False)
    job = Job(slurm, tmp_path, texts, "--gpus-per-node=2", **options)
    job.wait_for_step(1)
    ranks = job.ranks()
    assert len(ranks) == 4
    os.kill(ranks[0], signal.SIGKILL)
    state = slurm.ended(job.id)
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "137:0", "0") and job.ranks() == []
    assert "== job " in job.log.read_text() and "dp_shard 4 on cpu" in job.log.read_text()


def test_after_a_killed_rank_and_a_signal_losses_equal_an_uninterrupted_run(slurm, texts, undisturbed, tmp_path):
    """A killed rank restarts within the allocation; a signalled job saves and is queued again."""
    job = Job(slurm, tmp_path, texts, checkpoint__interval=10)
    job.wait_for_step(13)
    os.kill(job.ranks()[-1], signal.SIGKILL)
    job.wait_for(lambda: "restart 1 of 3" in job.log.read_text())
    noticed = len(job.losses()) + 3  # more than the first start made
    job.wait_for_step(noticed)
    assert job.state()["Restarts"] == "0"
    slurm.run("scancel", "--batch", "--signal=USR1", job.id)
    job.started_again()
    assert noticed <= max(job.saved_steps()) < STEPS
    assert job.completed()["Restarts"] == "1"
    assert job.losses() == undisturbed
    log = job.log.read_text()
    assert log.count("== job ") == 2 and "started again 1 times" in log and "== queued again" in log


def test_a_preempted_job_resumes_and_a_cancelled_one_does_not(slurm, texts, tmp_path):
    job = Job(slurm, tmp_path, texts, training__steps=100000)
    job.wait_for_step(3)
    urgent = ["--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 1", f"--output={tmp_path / 'urgent'}"]
    slurm.ended(slurm.run("sbatch", "--parsable", *urgent).strip())
    job.started_again()
    (saved,) = job.saved_steps()
    job.wait_for_step(saved + 2)
    slurm.run("scancel", job.id)
    state = slurm.ended(job.id)
    assert (state["JobState"], state["Restarts"]) == ("CANCELLED", "1")
    slurm.wait(job.id, lambda state: not job.ranks())
    assert job.saved_steps() == [saved, len(job.losses())]  # its last step was saved, as on any stop
    time.sleep(3)
    assert job.state()["JobState"] == "CANCELLED" and slurm.run("squeue", "-h", f"--jobs={job.id}").strip() == ""


def test_a_time_limit_shorter_than_the_job_takes_several_starts(slurm, texts, tmp_path):
    """The run asks SLURM for its end time and saves before it. The signal of SLURM itself is ignored here."""
    job = Job(slurm, tmp_path, texts, "--gpus-per-node=1", "--signal=B:URG@1", seconds=LIMIT, training__steps=100000)
    job.wait_for_step(3)
    job.started_again()
    (saved,) = job.saved_steps()
    job.wait_for_step(saved + 1)
    slurm.run("scancel", job.id)
    slurm.ended(job.id)
    log = job.log.read_text()
    assert len(job.losses()) > saved and "before the time limit" in log and "Traceback" not in log


def test_a_refused_job_is_reported_once_and_keeps_its_exit_code(slurm, texts, tmp_path):
    job = Job(slurm, tmp_path, texts, training__seq_len=-3)
    state = slurm.ended(job.id)
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "2:0", "0")
    log = job.log.read_text()
    assert log.count("training.seq_len") == 1 and "Traceback" not in log


def test_one_task_per_rank_forms_one_world(slurm, texts, tmp_path):
    """Two tasks share a machine, and each sees both of its GPUs."""
    argv = jobs.arguments(tmp_path / "run", texts, **OPTIONS | dict(training__steps=5))
    command = ["srun", "--nodes=1", "--ntasks=2", "--gpus-per-node=2", sys.executable, "-m", "torchtitan", "train"]
    done = subprocess.run([*command, *argv], env=slurm.environment, cwd=jobs.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "dp_shard 2 on cpu" in done.stdout and len(jobs.logged_steps(tmp_path / "run")) == 5


def test_a_wrong_number_of_tasks_is_refused_in_one_line(slurm, texts, tmp_path):
    argv = jobs.arguments(tmp_path / "run", texts)
    command = ["srun", "--nodes=1", "--ntasks=2", sys.executable, "-m", "torchtitan.launch", "2", *argv]
    done = subprocess.run(command, env=slurm.environment, cwd=jobs.ROOT, capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if not re.match("srun: (error|launch|job)", line)]
    assert done.returncode == 2 and len(errors) == 1
    assert errors[0].startswith("srun: 2 tasks on 1 machine, with NGPU = 2; allowed: a task a machine")


def test_launchers_start_by_themselves_in_an_interactive_allocation(slurm, texts, tmp_path):
    argv = jobs.arguments(tmp_path / "run", texts, **OPTIONS | dict(training__steps=5))
    command = ["salloc", "--nodes=2", "--gpus-per-node=1", sys.executable, "-m", "torchtitan", "train", *argv]
    done = subprocess.run(command, env=slurm.environment, cwd=jobs.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert "dp_shard 2 on cpu" in done.stdout and rows[-1]["step"] == 5
