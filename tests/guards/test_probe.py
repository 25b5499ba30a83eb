"""Tests of `guard.replay_every`: a rank that computes wrongly is named, right ones go on with the same losses."""

import pytest

from tests.support import jobs
from tests.support.pool import run_ranks
from torchtitan.config.manager import load
from torchtitan.guards import ReplicasDiffer
from torchtitan.guards.probe import next_rank
from torchtitan.models.layers import SwiGLU
from torchtitan.parallelisms.degrees import ParallelDims
from torchtitan.process.ranks import read_ranks
from torchtitan.rules import check
from torchtitan.training.trainer import Trainer

JOB = {"training__steps": 4, "training__local_batch_size": 2, "guard__replay_every": 2}
JOB |= {"model__overrides": jobs.SHALLOW, "guard__replica_check_interval": 0}
TP = {"parallelism__tensor_parallel_degree": 2}
PP = {"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_schedule": "GPipe"}
PP |= {"model__overrides": jobs.SHALLOW.replace("n_layers=1", "n_layers=2")}
CP = {"parallelism__context_parallel_degree": 2}
DROPOUT = {"model__name": "gpt2", "model__overrides": "{dim=32, n_layers=1, n_heads=4, vocab_size=260, max_seq_len=32}"}


def losses(argv):
    steps, _ = jobs.train(argv)
    return [step["loss"] for step in steps]


def train_with_a_wrong_rank(argv, wrong, first_step):
    """Let the feed-forward of a rank be wrong by the last bits from a step on; return the last step, and the error."""
    forward, trainer = SwiGLU.forward, Trainer(load(argv), read_ranks())

    def inexact(self, x):
        output = forward(self, x)
        faulty = trainer.ranks.rank == wrong and trainer.current_step + 1 >= first_step
        return output * (1 + 2**-20) if faulty else output

    SwiGLU.forward = inexact
    try:
        trainer.train()
        return trainer.current_step, ""
    except ReplicasDiffer as error:
        return trainer.current_step, str(error)
    finally:
        SwiGLU.forward = forward
        trainer.metrics.close()


@pytest.mark.parametrize("plan", [{}, TP, PP, CP, DROPOUT], ids=["fsdp", "tp", "pp", "cp", "dropout"])
def test_right_ranks_go_on_with_the_same_losses(plan, tmp_path):
    texts, ranks = jobs.write_texts(tmp_path), 4 if plan in (TP, PP, CP) else 2
    with_probe = run_ranks(ranks, losses, jobs.arguments(tmp_path / "a", texts, **JOB | plan))
    without = jobs.arguments(tmp_path / "b", texts, **JOB | plan | {"guard__replay_every": 0})
    assert with_probe == run_ranks(ranks, losses, without) and len(with_probe[0]) == 4


@pytest.mark.parametrize(("first_step", "step"), [(1, 1), (4, 3)])
def test_a_rank_that_computes_wrongly_ends_the_run(first_step, step, tmp_path):
    argv = jobs.arguments(tmp_path / "run", jobs.write_texts(tmp_path), **JOB)
    answers = run_ranks(2, train_with_a_wrong_rank, argv, 1, first_step)
    assert {error for _, error in answers} == {answers[0][1]} and [done for done, _ in answers] == [step, step]
    assert f"step {step + 1}: the same microbatch and weights give other outputs on ranks" in answers[0][1]
    assert "ranks 0 and 1 from layers.0, call 1 on" in answers[0][1]


def test_of_four_ranks_the_wrong_one_is_in_all_differences(tmp_path):
    argv = jobs.arguments(tmp_path / "run", jobs.write_texts(tmp_path), **JOB)
    (_, error), *_ = run_ranks(4, train_with_a_wrong_rank, argv, 2, 1)
    assert "ranks 1 and 2 from layers.0, call 1 on, ranks 2 and 3 from layers.0" in error and error.count(" and ") == 3


def test_the_next_rank_has_the_same_place():
    class Model:
        dims = ParallelDims(world_size=24, pp=2, dp_replicate=2, dp_shard=3, tp=2)

    assert [next_rank(rank, Model) for rank in (0, 1, 9, 10, 11, 12, 22)] == [2, 3, 11, 0, 1, 14, 12]
    assert sorted(next_rank(rank, Model) for rank in range(24)) == list(range(24))


@pytest.mark.parametrize(
    "options",
    [
        {"parallelism__expert_parallel_degree": 2, "model__name": "deepseek", "model__flavor": "debugmodel"},
        {"task__kind": "documents", "adapter__kind": "neurocache"},
        {"parallelism__tensor_parallel_degree": 2},  # no other data-parallel rank
    ],
)
def test_jobs_without_an_equal_forward_on_another_rank_are_refused(options, tmp_path):
    config = load(
        jobs.arguments(tmp_path / "run", jobs.write_texts(tmp_path), **JOB | {"model__overrides": "{}"} | options)
    )
    assert "guard.replay_every" in [fault.key for fault in check(config, 2, "cpu")]
