"""The script of docs/convergence.md: plans and transformers' Trainer have the losses of one device, and a wrong loss is
noticed. The page and docs/model_card.md show what the shipped job and the script have.
"""

import json
import re

import pytest

from tests.support.jobs import ROOT
from tests.support.pool import run_script
from torchtitan.config import manager
from torchtitan.metrics.json_lines import METRICS

STEPS = 4
SIZES = "{dim=32, n_layers=4, n_heads=4, n_kv_heads=2, multiple_of=16, tied_embeddings=true}"
SMALL = (f"--model.overrides={SIZES}", "--training.seq_len=32", "--lr_scheduler.warmup_steps=1")
NAMES = ("one device", "transformers' Trainer", "TP 2, sequence parallel", "PP 2, 1F1B")
"""The first is trained without being asked for, as the others are held against it."""
LIMIT = "5e-5"
"""Of float32 after four steps at the full learning rate, which differ by 1e-6."""


def compare(folder):
    job = [*SMALL, "--validation.samples=8", "--validation.local_batch_size=4"]
    options = ["--precision", "float32", "--steps", STEPS, "--folder", folder, "--limit", LIMIT]
    return run_script(ROOT, ROOT / "scripts/convergence.py", "--only", *NAMES[1:], *map(str, options), "--", *job)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folder of the finished runs and what the script printed."""
    folder = tmp_path_factory.mktemp("convergence")
    code, out, err = compare(folder)
    assert code == 0, out + err + "\n".join(path.read_text()[-2000:] for path in folder.rglob("log.txt"))
    return folder, out


def test_plans_and_the_trainer_have_the_losses_of_one_device(runs):
    folder, out = runs
    rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows] == ["run", *NAMES] and all(len(row) == 4 for row in rows[2:]), out
    assert (folder / "convergence.png").stat().st_size > 10_000


def test_a_loss_that_is_wrong_in_the_fourth_digit_is_noticed(runs):
    folder, _ = runs
    path = folder / "float32/TP_2__sequence_parallel" / METRICS
    text = path.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    try:
        for key in ("loss", "validation_loss"):
            wrong = [
                line | {key: line[key] + 1e-3} if line["step"] == STEPS and key in line else line for line in lines
            ]
            path.write_text("\n".join(map(json.dumps, wrong)) + "\n")
            code, out, _ = compare(folder)
            assert code == 1 and "finished" not in out, "nothing was trained again"
    finally:
        path.write_text(text)


def test_the_card_has_the_job_and_its_last_checkpoint():
    page = (ROOT / "docs/model_card.md").read_text()
    (job,) = set(re.findall(r"train_configs/\w+\.toml", page))
    config = manager.load(["--job.config_file", str(ROOT / job)])
    folder = config.job.dump_folder.removeprefix("./")
    assert f"{folder}/{config.checkpoint.folder}/step-{config.training.steps:08d}/__0_0.distcp" in page
    assert re.search(r"`[0-9a-f]{64}`", page) and f"torchtitan verify {folder} --steps 3" in page
