"""Tests of warm starts with counters: steps, tokens and data position continue, and the schedule begins there.

Also the tags of a run, and faults that are reported before the start.
"""

import json
from pathlib import Path

import pytest

from tests.support import judged
from tests.support.jobs import arguments, full, logged_steps, write_texts
from tests.support.judged import lines
from tests.support.pool import RankFailed, run_ranks
from torchtitan.checkpoint import read_state
from torchtitan.config import manager
from torchtitan.process.ranks import read_ranks
from torchtitan.training.trainer import Trainer

anywhere = judged.anywhere
BASE = dict(checkpoint__enable=True, checkpoint__keep_latest_k=0, optimizer__lr=1e-3)


def train_and_report(argv):
    """Train; return weights, logged rows, (step, tokens, first batch) at the start, and the final trainer state."""
    trainer = Trainer(manager.load(argv), read_ranks())
    began = trainer.current_step, trainer.state.tokens, next(iter(trainer.loader))["tokens"].tolist()
    trainer.train()
    trainer.metrics.close()
    weights = {name: full(p.detach()).numpy() for name, p in trainer.model.named_parameters()}
    return weights, logged_steps(Path(trainer.exports.folder)), began, trainer.restorer.trainer_state()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Train 6 steps; return the run's folder, its texts, and the batch that its 7th step would read."""
    folder = tmp_path_factory.mktemp("base")
    texts = write_texts(folder / "texts")
    options = BASE | dict(training__steps=6, lr_scheduler__warmup_steps=2)
    run_ranks(1, train_and_report, arguments(folder / "run", texts, **options))
    more = options | dict(training__steps=7, checkpoint__load_only=True)
    resumed = run_ranks(1, train_and_report, arguments(folder / "run", texts, **more))[0]
    return folder / "run", texts, resumed[2][2]


def warm_start_job(folder, base, **options):
    start = dict(checkpoint__initial_load_path=base[0], checkpoint__initial_load_counters=True)
    return arguments(folder, base[1], **BASE | start | dict(training__steps=14, lr_scheduler__warmup_steps=4) | options)


def test_a_warm_start_continues_steps_and_data_and_begins_a_schedule(tmp_path, base):
    weights, rows, (step, tokens, batch), state = run_ranks(
        1, train_and_report, warm_start_job(tmp_path, base, job__tags='["warm"]')
    )[0]
    assert (step, tokens, batch) == (6, 6 * 8 * 32, base[2]), "the data continue at their position"
    assert [row["step"] for row in rows] == list(range(7, 15)) and state["schedule_start"] == 6
    peaks = [row["lr"] / 1e-3 for row in rows]
    assert peaks[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0]) and peaks[-1] == pytest.approx(0.1), "8 steps, not 14"
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {"step": 6, "event": "tags", "tags": "warm"} in events
    # a resume takes the schedule's start from its own checkpoint, whatever the job says now
    (tmp_path / "checkpoint").rename(tmp_path / "all")
    part = warm_start_job(tmp_path, base, training__steps=10, lr_scheduler__total_steps=8)
    first = run_ranks(1, train_and_report, part)[0]
    last_part = warm_start_job(tmp_path, base, lr_scheduler__total_steps=8, checkpoint__initial_load_counters=False)
    final_weights, last_rows, began, state = run_ranks(1, train_and_report, last_part)[0]
    assert first[3]["step"] == 10 == began[0] and state["schedule_start"] == 6
    assert [row["lr"] for row in last_rows[-4:]] == [row["lr"] for row in rows[4:]]
    assert all((final_weights[name] == weights[name]).all() for name in weights)


def test_a_warm_start_without_saving_is_bit_equal(tmp_path, base):
    """Its losses and weights are bit-equal, and it leaves no checkpoint."""
    weights, rows, began, _ = run_ranks(1, train_and_report, warm_start_job(tmp_path / "saved", base))[0]
    trial_weights, trial_rows, began_again, _ = run_ranks(
        1, train_and_report, warm_start_job(tmp_path / "trial", base, checkpoint__enable=False)
    )[0]
    assert began_again == began and [row["loss"] for row in trial_rows] == [row["loss"] for row in rows]
    assert all((trial_weights[name] == weights[name]).all() for name in weights)
    assert (tmp_path / "saved/checkpoint").exists() and not (tmp_path / "trial/checkpoint").exists()


def test_counters_come_from_a_training_state_of_relora(tmp_path, base):
    """ReLoRA's scripts save a training_state.json next to the weights."""
    options = dict(checkpoint__last_save_model_only=True, checkpoint__last_save_in_hf=True, training__steps=1)
    run_ranks(1, train_and_report, arguments(tmp_path / "a", base[1], **BASE | options))
    folder = tmp_path / "a/model_hf"
    state = {"update_step": 6, "tokens_seen": 99, "global_step": 12}
    (folder / "training_state.json").write_text(json.dumps(state))
    options = warm_start_job(tmp_path / "b", base, checkpoint__initial_load_path=folder)
    _, rows, began, _ = run_ranks(1, train_and_report, options)[0]
    assert began[:2] == (6, 99) and rows[0]["step"] == 7


def test_other_data_need_dataloader_in_exclude_from_loading(tmp_path, base):
    other = write_texts(tmp_path / "others", documents=90)
    options = dict(training__steps=12, training__dataset_path=other)
    with pytest.raises(RankFailed, match=r"checkpoint.exclude_from_loading = \[.dataloader.\]"):
        run_ranks(1, train_and_report, warm_start_job(tmp_path / "run", base, **options))
    without_position = options | dict(checkpoint__exclude_from_loading='["dataloader"]')
    _, rows, began, _ = run_ranks(1, train_and_report, warm_start_job(tmp_path / "run", base, **without_position))[0]
    assert began[0] == 6 and len(rows) == 6


WARM = ["--checkpoint.enable", "--checkpoint.initial_load_counters"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--training.steps=6"], "training.steps: given 6; allowed: more than 6; "),
        (
            ["--lr_scheduler.decay_type=relora_cyclical", "--lr_scheduler.cycle_length=7", "--training.steps=14"],
            "cycle_length: given 7; allowed: a divisor of the 8 steps in all",
        ),
        (
            ["--qat.weight_dtype=int4", "--qat.after_steps=8", "--training.steps=14"],
            "qat.after_steps: given 8; allowed: less than training.steps = 14 - 6, the steps from the weights' step on",
        ),
        (["--checkpoint.initial_load_model_only=false"], "false with initial_load_model_only = false"),
    ],
    ids=str,
)
def test_faults_of_warm_starts(base, arguments, message):
    assert lines(*WARM, f"--checkpoint.initial_load_path={base[0]}") == []
    assert any(message in line for line in lines(*WARM, f"--checkpoint.initial_load_path={base[0]}", *arguments))


def test_weights_without_counters_are_refused(tmp_path, base):
    (fault,) = lines("--checkpoint.enable", "--checkpoint.initial_load_counters")
    assert "checkpoint.initial_load_counters: given true; allowed: true only with initial_load_path" in fault
    (disabled,) = lines("--checkpoint.initial_load_counters")
    assert "nothing with checkpoint.enable = false" in disabled
    (tmp_path / "w").mkdir()
    (tmp_path / "w/model.safetensors").touch()
    (line,) = lines(*WARM, f"--checkpoint.initial_load_path={tmp_path}/w")
    assert "weights next to a training_state.json" in line and "does not record the number of trained steps" in line
    (line,) = lines("--checkpoint.enable", f"--checkpoint.initial_load_path={tmp_path}/nothing")
    assert "checkpoint.initial_load_path" in line and "no such file or folder" in line
    assert read_state(next((base[0] / "checkpoint").glob("step-*6")))["trainer"]["schedule_start"] == 0
