"""Jobs with experts in the trainer: plans, resuming, metrics, and a router with NaN."""

import math
from pathlib import Path

import pytest
import torch

from tests.support import jobs
from tests.support.expert_jobs import EP, JOB, PP, SIZES
from tests.support.pool import RankFailed, run_ranks
from torchtitan.config import manager
from torchtitan.metrics.logger import tags_of
from torchtitan.parallelisms.pipeline.cut import SCHEDULES
from torchtitan.process.ranks import read_ranks
from torchtitan.training.trainer import Trainer

HALF = dict(training__local_batch_size=4)
OVERLAP = EP | PP | HALF | dict(parallelism__pipeline_parallel_schedule="DualPipeV")
OVERLAP |= dict(parallelism__pipeline_parallel_expert_parallel_overlap=True)
POLICIES = ("none", "selective", "full_keep_comm", "full")
PLANS = {
    "EP 2": (2, EP | HALF),
    "FSDP 4, EP 2": (4, EP | dict(training__local_batch_size=2)),
    "TP 2, EP 2": (2, EP | dict(parallelism__tensor_parallel_degree=2)),
    **{f"PP 2, EP 2, {n}": (4, EP | PP | HALF | dict(parallelism__pipeline_parallel_schedule=n)) for n in SCHEDULES},
    **{f"PP 2, EP 2, overlap, {mode}": (4, OVERLAP | dict(activation_checkpoint__mode=mode)) for mode in POLICIES},
    "recompute": (2, EP | HALF | dict(activation_checkpoint__mode="full")),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return jobs.write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def plain(texts, tmp_path_factory):
    return run_ranks(1, jobs.train, jobs.arguments(tmp_path_factory.mktemp("plain"), texts, **JOB))[0][0]


@pytest.mark.parametrize("plan", PLANS)
def test_losses_and_loads_are_those_of_one_rank(plan, plain, texts, tmp_path):
    ranks, options = PLANS[plan]
    begun = JOB | dict(training__steps=5, lr_scheduler__total_steps=20)
    rows, _ = run_ranks(ranks, jobs.train, jobs.arguments(tmp_path, texts, **begun, **options))[0]
    expected = plain[: len(rows)]
    assert len(rows) == 5
    for name in ("loss", "expert_load_max", "expert_load_max_mean", "expert_entropy", "expert_bias_range"):
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in expected], rel=1e-5)


def test_a_model_with_experts_learns(plain):
    assert plain[-1]["loss"] < plain[0]["loss"] - 0.5


def test_what_is_logged_of_the_experts(plain):
    for row in plain:
        tags = tags_of(row, world_size=1, flops_per_token_full=1.0)
        assert tags["expert_metrics/load_max"] == row["expert_load_max"]
        assert 1 <= row["expert_load_max_mean"] <= row["expert_load_max"] <= 8 / 3  # of 8 experts a token has 3
        assert 0 < row["expert_entropy"] <= 1
    # biases move by 0.001 a step, up or down, so within one layer by 0.002 apart
    assert plain[0]["expert_bias_range"] == pytest.approx(0.002)


def test_a_resumed_job_goes_on_with_its_biases_under_another_plan(plain, texts, tmp_path):
    saving = dict(checkpoint__enable=True, checkpoint__interval=10)
    # the learning rate's schedule has 20 steps from the start
    half_way = dict(lr_scheduler__total_steps=20, training__steps=10)
    run_ranks(2, jobs.train, jobs.arguments(tmp_path, texts, **JOB, **saving, **EP, **HALF, **half_way))
    second = jobs.arguments(tmp_path, texts, **JOB, **saving, **EP, **PP, **HALF)
    rows, _ = run_ranks(4, jobs.train, second)[0]
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in plain], rel=1e-5)
    assert rows[-1]["expert_bias_range"] == pytest.approx(plain[-1]["expert_bias_range"], rel=1e-5)


def test_the_auxiliary_loss_is_logged(texts, tmp_path):
    """Even routing would make it the weight times the number of layers with experts."""
    options = JOB | dict(model__overrides=SIZES.replace("}", ", aux_loss_weight=0.01}"), training__steps=3)
    rows = [
        run_ranks(ranks, jobs.train, jobs.arguments(tmp_path / str(ranks), texts, **options | plan))[0][0]
        for ranks, plan in ((1, {}), (2, EP | HALF), (4, OVERLAP | dict(activation_checkpoint__mode="full")))
    ]
    for one, *other_rows in zip(*rows, strict=True):
        assert 0.03 <= one["expert_aux_loss"] < 0.08
        assert [other["expert_aux_loss"] for other in other_rows] == pytest.approx(
            [one["expert_aux_loss"]] * 2, rel=1e-5
        )


def test_a_model_without_a_layer_of_experts_logs_nothing_of_them(texts, tmp_path):
    options = JOB | dict(model__overrides=SIZES.replace("}", ", n_dense_layers=4}"), training__steps=2)
    rows, _ = run_ranks(1, jobs.train, jobs.arguments(tmp_path, texts, **options))[0]
    assert len(rows) == 2 and not any(name.startswith("expert_") for name in rows[0])


def train_with_a_broken_router(argv: list[str]) -> None:
    trainer = Trainer(manager.load(argv), read_ranks())
    with torch.no_grad():
        for part in trainer.model.parts:
            if "2" in part.layers:
                part.layers["2"].moe.router.gate.weight.fill_(math.nan)
    trainer.train()


@pytest.mark.parametrize("ranks, options", [(1, {}), (4, EP | PP | HALF)])
def test_a_router_that_is_not_finite_is_named_on_every_rank(ranks, options, texts, tmp_path: Path):
    with pytest.raises(RankFailed) as failed:
        run_ranks(ranks, train_with_a_broken_router, jobs.arguments(tmp_path, texts, **JOB, **options))
    assert str(failed.value).count("(first seen by the router of layers.2); the run stops") == ranks
