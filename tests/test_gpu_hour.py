"""What is to be run on the first GPUs can run there: every job of scripts/gpu_hour.sh passes the rules for them."""

import shlex
import subprocess

import pytest

from tests.support.jobs import ROOT
from torchtitan.config.manager import load
from torchtitan.rules import check

SCRIPT = ROOT / "scripts/gpu_hour.sh"


def steps(gpus: int) -> dict[str, list[str]]:
    done = subprocess.run(["bash", SCRIPT, "--list", str(gpus)], capture_output=True, text=True, check=True)
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert all(len(row) == 3 and row[1] for row in rows)
    return {name: shlex.split(command) for name, _, command in rows}


@pytest.mark.parametrize("gpus", [1, 8])
def test_every_job_can_start(gpus):
    jobs = {name: words for name, words in steps(gpus).items() if "./run_llama_train.sh" in words}
    assert len(jobs) > 5
    for name, words in jobs.items():
        settings = dict(word.split("=", 1) for word in words[1 : words.index("./run_llama_train.sh")])
        file = ROOT / settings.get("CONFIG_FILE", "train_configs/debug_model.toml")
        device = "cpu" if "CUDA_VISIBLE_DEVICES" in settings else "cuda"
        options = words[words.index("./run_llama_train.sh") + 1 :]
        faults = check(load([f"--job.config_file={file}", *options]), int(settings["NGPU"]), device)
        assert not faults, f"{name}: {'; '.join(map(str, faults))}"


def test_other_steps_are_there():
    for words in (words for gpus in (1, 8) for words in steps(gpus).values()):
        for word in words:
            if word.startswith(("./", "scripts/")):
                assert (ROOT / word).exists(), word


def test_what_it_is_for_is_said_where_the_number_is_wrong():
    done = subprocess.run(["bash", SCRIPT, "3"], capture_output=True, text=True)
    assert done.returncode == 2 and "scripts/gpu_hour.sh [--list] [1 | 8] [FOLDER]" in done.stdout
