"""Starts from another run's weights that count on: steps and tokens, the schedule from there, the data where they were;
the tags of a run. What of it is wrong is said before the start.
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


def trained(argv):
    """Weights, logged rows, what the first step read, and the trainer's state at the end."""
    trainer = Trainer(manager.load(argv), read_ranks())
    began = trainer.step, trainer.state.tokens, next(iter(trainer.loader))["tokens"].tolist()
    trainer.train()
    trainer.metrics.close()
    weights = {name: full(p.detach()).numpy() for name, p in trainer.model.named_parameters()}
    return weights, logged_steps(Path(trainer.folder)), began, trainer.trainer_state()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run of 6 steps, and what its 7th would read."""
    folder = tmp_path_factory.mktemp("base")
    texts = write_texts(folder / "texts")
    options = BASE | dict(training__steps=6, lr_scheduler__warmup_steps=2)
    run_ranks(1, trained, arguments(folder / "run", texts, **options))
    more = options | dict(training__steps=7, checkpoint__load_only=True)
    again = run_ranks(1, trained, arguments(folder / "run", texts, **more))[0]
    return folder / "run", texts, again[2][2]


def warm(folder, base, **options):
    start = dict(checkpoint__initial_load_path=base[0], checkpoint__initial_load_counters=True)
    return arguments(folder, base[1], **BASE | start | dict(training__steps=14, lr_scheduler__warmup_steps=4) | options)


def test_it_counts_on_and_its_schedule_begins(tmp_path, base):
    weights, rows, (step, tokens, batch), state = run_ranks(1, trained, warm(tmp_path, base, job__tags='["warm"]'))[0]
    assert (step, tokens, batch) == (6, 6 * 8 * 32, base[2]), "the data go on where they were"
    assert [row["step"] for row in rows] == list(range(7, 15)) and state["schedule_start"] == 6
    peaks = [row["lr"] / 1e-3 for row in rows]
    assert peaks[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0]) and peaks[-1] == pytest.approx(0.1), "8 steps, not 14"
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {"step": 6, "event": "tags", "tags": "warm"} in events
    # a resume has it from its own checkpoint, whatever the job says now
    (tmp_path / "checkpoint").rename(tmp_path / "all")
    part = warm(tmp_path, base, training__steps=10, lr_scheduler__total_steps=8)
    first = run_ranks(1, trained, part)[0]
    rest = warm(tmp_path, base, lr_scheduler__total_steps=8, checkpoint__initial_load_counters=False)
    again, late, began, state = run_ranks(1, trained, rest)[0]
    assert first[3]["step"] == 10 == began[0] and state["schedule_start"] == 6
    assert [row["lr"] for row in late[-4:]] == [row["lr"] for row in rows[4:]]
    assert all((again[name] == weights[name]).all() for name in weights)


def test_a_run_that_saves_nothing_begins_as_one_that_saves(tmp_path, base):
    """To the bit; nothing of it is left but its rows."""
    weights, rows, began, _ = run_ranks(1, trained, warm(tmp_path / "saved", base))[0]
    again, late, began_again, _ = run_ranks(1, trained, warm(tmp_path / "trial", base, checkpoint__enable=False))[0]
    assert began_again == began and [row["loss"] for row in late] == [row["loss"] for row in rows]
    assert all((again[name] == weights[name]).all() for name in weights)
    assert (tmp_path / "saved/checkpoint").exists() and not (tmp_path / "trial/checkpoint").exists()


def test_weights_beside_a_training_state(tmp_path, base):
    """As ReLoRA's scripts leave them."""
    words = dict(checkpoint__last_save_model_only=True, checkpoint__last_save_in_hf=True, training__steps=1)
    run_ranks(1, trained, arguments(tmp_path / "a", base[1], **BASE | words))
    folder = tmp_path / "a/model_hf"
    state = {"update_step": 6, "tokens_seen": 99, "global_step": 12}
    (folder / "training_state.json").write_text(json.dumps(state))
    words = warm(tmp_path / "b", base, checkpoint__initial_load_path=folder)
    _, rows, began, _ = run_ranks(1, trained, words)[0]
    assert began[:2] == (6, 99) and rows[0]["step"] == 7


def test_other_data_are_begun_by_saying_so(tmp_path, base):
    other = write_texts(tmp_path / "others", documents=90)
    options = dict(training__steps=12, training__dataset_path=other)
    with pytest.raises(RankFailed, match=r"checkpoint.exclude_from_loading = \[.dataloader.\]"):
        run_ranks(1, trained, warm(tmp_path / "run", base, **options))
    begun = options | dict(checkpoint__exclude_from_loading='["dataloader"]')
    _, rows, began, _ = run_ranks(1, trained, warm(tmp_path / "run", base, **begun))[0]
    assert began[0] == 6 and len(rows) == 6


WARM = ["--checkpoint.enable", "--checkpoint.initial_load_counters"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["--training.steps=6"], "training.steps: given 6; allowed: more than 6; "),
        (
            ["--lr_scheduler.decay_type=relora_cyclical", "--lr_scheduler.cycle_length=7", "--training.steps=14"],
            "cycle_length: given 7; allowed: what divides the 8 steps in all",
        ),
        (["--checkpoint.initial_load_model_only=false"], "false with initial_load_model_only = false"),
    ],
    ids=str,
)
def test_faults(base, words, said):
    assert lines(*WARM, f"--checkpoint.initial_load_path={base[0]}") == []
    assert any(said in line for line in lines(*WARM, f"--checkpoint.initial_load_path={base[0]}", *words))


def test_weights_that_count_nothing(tmp_path, base):
    (without,) = lines("--checkpoint.enable", "--checkpoint.initial_load_counters")
    assert "checkpoint.initial_load_counters: given true; allowed: true only with initial_load_path" in without
    (off,) = lines("--checkpoint.initial_load_counters")
    assert "nothing with checkpoint.enable = false" in off
    (tmp_path / "w").mkdir()
    (tmp_path / "w/model.safetensors").touch()
    (line,) = lines(*WARM, f"--checkpoint.initial_load_path={tmp_path}/w")
    assert "weights beside a training_state.json" in line and "does not say how far they were trained" in line
    (line,) = lines("--checkpoint.enable", f"--checkpoint.initial_load_path={tmp_path}/nothing")
    assert "checkpoint.initial_load_path" in line and "no such file or folder" in line
    assert read_state(next((base[0] / "checkpoint").glob("step-*6")))["trainer"]["schedule_start"] == 0
