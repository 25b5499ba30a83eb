"""Every job of scripts/gpu_hour.sh, which is for a first hour on GPUs, passes the rules for them."""

import shlex
import subprocess

import pytest

from tests.support.jobs import ROOT
from torchtitan.config.manager import load
from torchtitan.rules import check

SCRIPT = ROOT / "scripts/gpu_hour.sh"


def steps(gpus: int) -> dict[str, list[str]]:
    """Return the commands that the script would run, by name."""
    done = subprocess.run(["bash", SCRIPT, "--list", str(gpus)], capture_output=True, text=True, check=True)
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert all(len(row) == 3 and row[1] for row in rows)
    return {name: shlex.split(command) for name, _, command in rows}


@pytest.mark.parametrize("gpus", [1, 8])
def test_every_job_can_start(gpus):
    jobs = {name: command for name, command in steps(gpus).items() if "./run_llama_train.sh" in command}
    assert len(jobs) > 5
    for name, command in jobs.items():
        settings = dict(part.split("=", 1) for part in command[1 : command.index("./run_llama_train.sh")])
        file = ROOT / settings.get("CONFIG_FILE", "train_configs/debug_model.toml")
        device = "cpu" if "CUDA_VISIBLE_DEVICES" in settings else "cuda"
        options = command[command.index("./run_llama_train.sh") + 1 :]
        faults = check(load([f"--job.config_file={file}", *options]), int(settings["NGPU"]), device)
        assert not faults, f"{name}: {'; '.join(map(str, faults))}"


def test_files_of_other_steps_exist():
    for command in (command for gpus in (1, 8) for command in steps(gpus).values()):
        for part in command:
            if part.startswith(("./", "scripts/")):
                assert (ROOT / part).exists(), part


def test_a_wrong_number_of_gpus_prints_the_usage():
    done = subprocess.run(["bash", SCRIPT, "3"], capture_output=True, text=True)
    assert done.returncode == 2 and "scripts/gpu_hour.sh [--list] [1 | 8] [FOLDER]" in done.stdout
