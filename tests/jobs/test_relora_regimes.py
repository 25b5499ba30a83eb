"""The command lines of the five regimes in ReLoRA's notes, scaled down, on two ranks.

They use the 9m preset with a small vocabulary, short samples, 20 and 40 updates in place of thousands, and small
batches for restarts; everything else is unchanged.
"""

import json
from pathlib import Path

import pytest

from scripts import compare_relora
from tests.support.jobs import full, logged_steps
from tests.support.pool import run_ranks
from tests.support.saved_blocks import save
from torchtitan.config import manager
from torchtitan.plugins.importers import parse, split
from torchtitan.plugins.importers.command import translate
from torchtitan.process.ranks import read_ranks
from torchtitan.rules import check
from torchtitan.training.trainer import Trainer

START, UPDATES, RUN = 20, 40, 23
"""Updates of the warm start, of the schedule after it, and of its part that runs."""
SHARED = """torchrun --nproc-per-node 2 torchrun_main.py --model_config configs/llama_9m.json --batch_size 24
    --total_batch_size 96 --max_length 16 --dtype fp32 --workers 0 --warmup_steps 5"""
FULL = "--lr 5e-4 --eval_every 2 --save_every 10 --num_training_steps 20"
RELORA = f"""--lr 1e-3 --use_peft --relora 10 --cycle_length 10 --restart_warmup_steps 5 --scheduler cosine_restarts
    --reset_optimizer_on_relora False --optimizer_magnitude_pruning 0.9 --lora_r 8 --eval_every 5000 --save_every 1
    --batch_size 4 --total_batch_size 16
    --num_training_steps {START + RUN}"""


def job(folder, data, flags, **options):
    """Import the command line as a job file; return its options with a small vocabulary and the test's overrides."""
    line = f"{SHARED} {flags} --dataset_path {data} --save_dir {folder}"
    text, *_ = translate(parse(split([line])), None)
    folder.mkdir(exist_ok=True)
    (folder / "imported.toml").write_text(text)
    overrides = {
        "model.overrides": "{vocab_size = 260, n_layers = 2}",
        "validation.steps": 1,
        "validation.local_batch_size": 4,
    }
    overrides |= {"checkpoint.verify": "false", "metrics.log_freq": 1, "metrics.plot": "false", "optimizer.eps": 1e-5}
    overrides |= {name.replace("__", "."): value for name, value in options.items()}
    return [
        "--job.config_file",
        str(folder / "imported.toml"),
        *(f"--{name}={value}" for name, value in overrides.items()),
    ]


def train_and_record_merges(argv):
    """Train; return passes per step, (loss, rate) by step, the updates after which it merged, and the weights."""
    trainer = Trainer(manager.load(argv), read_ranks())
    merges, adapter = [], trainer.model.adapter
    if adapter is not None:
        after_step = adapter.after_step

        def record_merges(step, parts, optimizers):
            before = adapter.state_dict().get("merges", 0)
            after_step(step, parts, optimizers)
            merges.extend([step] * (adapter.state_dict()["merges"] - before))

        adapter.after_step = record_merges
    trainer.train()
    trainer.metrics.close()
    rows = logged_steps(trainer.exports.folder)
    weights = {name: full(p.detach()).numpy() for name, p in trainer.model.named_parameters()}
    return trainer.prefetcher.count, {row["step"]: (row["loss"], row["lr"]) for row in rows}, merges, weights


@pytest.mark.parametrize("steps", [12, 300])
def test_the_jobs_of_the_documented_comparison_are_valid(tmp_path, steps):
    for name, parts in compare_relora.jobs(steps).items():
        start = None
        for part in parts:
            faults = check(manager.load(compare_relora.command_arguments(tmp_path / "run", part, start)), 1, "cpu")
            assert {fault.key for fault in faults} <= {"checkpoint.initial_load_path"}, name  # an earlier job writes it
            start = tmp_path / "first"
        assert part["training.steps"] == steps
    rows = [{"loss": 2.0, "step_seconds": 0.5}, {"validation_loss": 1.5}]
    text = compare_relora.table({"full": rows, "LoRA": rows}, {"full": 10**6, "LoRA": 10**6})
    assert text.splitlines()[-1] == "| LoRA | 1.500 | 1.00 | 1.00 MB |"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save(tmp_path_factory.mktemp("data") / "bytes_16", split="validation")


@pytest.fixture(scope="module")
def base(tmp_path_factory, data):
    """Train the first regime: full rank, replicated."""
    folder = tmp_path_factory.mktemp("warm") / "run"
    return folder, run_ranks(2, train_and_record_merges, job(folder, data, FULL))[0]


def test_full_rank_replicated_and_sharded(base, data, tmp_path):
    """Regimes 1 to 3."""
    folder, (passes, steps, _, weights) = base
    assert passes == 2, "a batch of 24 on each of two ranks, 96 in total"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "validation_loss" in row] == list(range(2, 21, 2))
    assert sorted(path.name for path in (folder / "checkpoint").glob("step-*")) == ["step-00000010", "step-00000020"]
    sharded = run_ranks(2, train_and_record_merges, job(tmp_path / "run", data, f"{FULL} --distributed_type fsdp"))[0]
    assert sharded[1] == {step: pytest.approx(both, rel=1e-5) for step, both in steps.items()}
    assert all(
        abs(sharded[3][name] - weight).max() <= 1e-4 * abs(weight).max() + 1e-6 for name, weight in weights.items()
    )


def run_restarts(folder, base, data, distribution="--distributed_type fsdp", **options):
    flags = f"{RELORA} {distribution} --continue_from {base[0]}"
    return run_ranks(
        2, train_and_record_merges, job(folder, data, flags, lr_scheduler__total_steps=UPDATES, **options)
    )[0]


def test_restarts_from_a_warm_start(base, data, tmp_path):
    """Run regimes 4 and 5 until the end of their second cycle."""
    _, steps, merges, weights = run_restarts(tmp_path / "a", base, data)
    assert merges == [11, 21] and list(steps) == list(range(START + 1, START + RUN + 1))
    assert [step - START - 1 for step, (_, rate) in steps.items() if rate == 0] == [0, 10, 20], "exactly"
    assert steps[START + 1][0] == pytest.approx(base[1][1][START][0], abs=0.3), (
        "training continues and does not start over"
    )
    _, replicated, same_merges, other = run_restarts(
        tmp_path / "b", base, data, distribution="", checkpoint__interval=100
    )
    assert same_merges == merges and replicated == {s: pytest.approx(both, rel=1e-4) for s, both in steps.items()}
    # differences from the order of sums grow with the steps, and may change which moments are pruned
    assert all(abs(other[name] - weight).max() <= 2e-3 * abs(weight).max() + 1e-5 for name, weight in weights.items())
    for update in (12, 11, 10):  # descending, since each resume moves newer checkpoints aside
        saving = dict(checkpoint__load_step=START + update, checkpoint__interval=100)
        _, resumed, merged, same = run_restarts(tmp_path / "a", base, data, **saving)
        assert merged == [merge for merge in merges if merge > update]
        assert all((same[name] == weights[name]).all() for name in weights), update
        assert {step: steps[step] for step in resumed} == resumed
    assert Path(tmp_path / "a/metrics.redone.jsonl").exists()
