"""ReLoRA in jobs: steps of restarts, resumes at any step, several ranks equal to one, and traffic of a merge."""

import json
import math

import pytest
import torch

from tests.plans.combinations import Combination
from tests.support.jobs import arguments, full, train, write_texts
from tests.support.pool import run_ranks
from tests.support.relora_jobs import RELORA
from tests.support.table_rows import assembled
from torchtitan.adapters.low_rank import low_rank_modules, merge_product
from torchtitan.config import manager
from torchtitan.planner.time.traffic import Traffic
from torchtitan.process.ranks import read_ranks
from torchtitan.training.trainer import Trainer


def job(folder, texts, **options):
    settings = {name.replace(".", "__"): value for name, value in RELORA.items()}
    return arguments(folder, texts, **settings | options)


def train_and_record_restarts(argv):
    """Train; return the steps after which frozen matrices changed, the rate of each step, the final trained weights,
    the counts, and the final frozen weights.
    """
    trainer = Trainer(manager.load(argv), read_ranks())
    frozen = {name: p for name, p in trainer.model.named_parameters() if not p.requires_grad}
    name = next(name for name in frozen if name.endswith("attention.wq.weight"))
    before, changed, after_step = full(frozen[name].detach()).clone(), [], trainer.model.adapter.after_step

    def record_changes(step, parts, optimizers):
        nonlocal before
        after_step(step, parts, optimizers)
        now = full(frozen[name].detach()).clone()
        if not torch.equal(now, before):
            changed.append(step)
        before = now

    trainer.model.adapter.after_step = record_changes
    trainer.train()
    trainer.metrics.close()
    weights = {name: full(p.detach()).numpy() for name, p in trainer.model.named_parameters()}
    rows = [json.loads(line) for line in trainer.metrics.path.read_text().splitlines()]
    rates = {row["step"]: row["lr"] for row in rows if "lr" in row}
    return changed, rates, weights, trainer.model.adapter.state_dict(), sorted(frozen)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"))


def test_restarts_happen_at_the_cadence_and_resume_exactly(tmp_path, texts):
    saving = dict(checkpoint__enable=True, checkpoint__interval=1, checkpoint__keep_latest_k=0)
    changed, rates, weights, counts, frozen = run_ranks(1, train_and_record_restarts, job(tmp_path, texts, **saving))[0]
    assert changed == [11, 21] and counts == {"merges": 2, "resets": 2}
    assert [step for step, rate in rates.items() if rate == 0] == [1, 11, 21], (
        "steps count from 1, steps of the schedule from 0"
    )
    assert frozen == sorted(
        f"layers.{i}.{m}.weight"
        for i in range(4)
        for m in (*(f"attention.w{x}" for x in "qkvo"), *(f"feed_forward.w{x}" for x in "123"))
    )
    for step in (12, 11, 10):  # descending, since each resume moves newer checkpoints aside
        _, _, resumed, counts, _ = run_ranks(
            1, train_and_record_restarts, job(tmp_path, texts, **saving, checkpoint__load_step=step)
        )[0]
        assert counts == {"merges": 2, "resets": 2}
        assert all((weights[name] == resumed[name]).all() for name in weights), step


def merge_traffic():
    """Merge all matrices on this rank of two; return the bytes sent and the bytes of all A."""
    model = assembled(Combination(ranks=2, dp_shard=2, adapter="lora", recompute="none"))
    with Traffic() as traffic, torch.no_grad():
        for _, module in low_rank_modules(model.parts):
            merge_product(module)
    size = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "lora_A" in name)
    return [(exchange.kind, exchange.sent) for exchange in traffic.exchanges], size


def test_a_sharded_merge_gathers_only_a():
    for exchanges, size in run_ranks(2, merge_traffic):
        assert {kind for kind, _ in exchanges} == {"all_gather"}
        assert sum(sent for _, sent in exchanges) == size / 2, "each rank sends its half of each A to the other"


PLANS = [{}, {"parallelism__data_parallel_replicate_degree": 2}, {"tp": 2}, {"pp": 2}]


@pytest.mark.parametrize("degrees", PLANS, ids=str)
def test_several_ranks_equal_one(tmp_path, texts, degrees):
    """Compare after two merges and resets. Differences from the order of sums grow with the steps: 1e-3."""
    options = dict(optimizer__lr=1e-3, optimizer__eps=1e-5)
    one_rank = run_ranks(1, train_and_record_restarts, job(tmp_path / "a", texts, **options))[0]
    degree_options = (
        {"parallelism__tensor_parallel_degree": 2} if "tp" in degrees else degrees | {"training__local_batch_size": 4}
    )
    degree_options = {"parallelism__pipeline_parallel_degree": 2} if "pp" in degrees else degree_options
    gathered = {}
    for changed, _, weights, counts, _ in run_ranks(
        2, train_and_record_restarts, job(tmp_path / "b", texts, **options, **degree_options)
    ):
        assert changed == one_rank[0] and counts == one_rank[3]
        assert all((gathered.get(name, weight) == weight).all() for name, weight in weights.items()), "equal on both"
        gathered |= weights
    for name, weight in one_rank[2].items():
        assert abs(gathered[name] - weight).max() <= 1e-3 * abs(weight).max() + 1e-6, name


def test_trained_scales_are_logged_the_same_under_every_plan(tmp_path, texts):
    """The logged scale of each linear is tanh of a number that starts at 1, and that a restart resets."""
    options = dict(adapter__train_scaling=True, training__steps=12, optimizer__lr=1e-3)
    names = [f"adapter_scaling_{which}" for which in ("min", "mean", "max")]
    one, _ = run_ranks(1, train, job(tmp_path / "a", texts, **options))[0]
    for number, degree_options in enumerate(
        (dict(training__local_batch_size=4), dict(parallelism__pipeline_parallel_degree=2))
    ):
        for rows, _ in run_ranks(2, train, job(tmp_path / f"{number}", texts, **options, **degree_options)):
            assert [[row[n] for n in names] for row in rows] == [
                pytest.approx([row[n] for n in names], rel=1e-5) for row in one
            ]
    least, mean, most = ([row[name] for row in one] for name in names)
    assert least[0] == mean[0] == most[0] == pytest.approx(math.tanh(1)), "the first step's rate is 0"
    assert least[8] < mean[8] < most[8] and least[10] == most[10] == pytest.approx(math.tanh(1))
