"""Tests of the trainer's state: which plans restore the random numbers of a checkpoint."""

from types import SimpleNamespace

import pytest
import torch

from tests.support import jobs
from torchtitan.checkpoint import rng_state
from torchtitan.config.job import JobConfig
from torchtitan.job import ResolvedJob
from torchtitan.metrics.goodput import Goodput
from torchtitan.training.restore import Restorer, TrainState

OPTIONS = {
    "expert": "expert_parallel_degree",
    "tensor": "tensor_parallel_degree",
    "data_replicate": "data_parallel_replicate_degree",
}


def restorer(**degrees):
    """Create the restorer of rank 1 of four, without a model."""
    hooks = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    steps = SimpleNamespace(name="guard", state_dict=dict, load_state_dict=lambda state: None)
    options = {f"parallelism.{OPTIONS[name]}": degree for name, degree in degrees.items()}
    job = ResolvedJob(JobConfig(), 4).with_options(options)
    return Restorer(
        job,
        SimpleNamespace(rank=1, world_size=4),
        SimpleNamespace(hooks=hooks, dims=job.layout.dims),
        1,
        TrainState(step=3, tokens=96),
        hooks,
        SimpleNamespace(steps=steps),
        SimpleNamespace(state_dict=lambda step: {}, load_state_dict=lambda step, state: None),
        Goodput(),
    )


@pytest.fixture
def saved_state():
    """Return the state of four ranks with expert parallel over two, and the numbers that rank 1 draws next."""
    torch.manual_seed(11)
    ranks = [{"rng": rng_state()} for _ in range(4)]
    return restorer(expert=2).trainer_state(), ranks, torch.rand(3)


def numbers_after_restore(state, ranks, **degrees):
    torch.manual_seed(0)
    restorer(**degrees).load_state(state, ranks)
    return torch.rand(3)


def test_the_same_plan_restores_random_numbers(saved_state):
    state, ranks, numbers = saved_state
    assert torch.equal(numbers_after_restore(state, ranks, expert=2), numbers)


@pytest.mark.parametrize(
    "other", [dict(expert=4), dict(), dict(expert=2, tensor=2), dict(expert=2, data_replicate=2)], ids=str
)
def test_another_plan_does_not_restore_random_numbers(saved_state, other):
    state, ranks, numbers = saved_state
    assert not torch.equal(numbers_after_restore(state, ranks, **other), numbers)


def test_checkpoints_without_all_degrees_load(saved_state):
    """Earlier versions saved no degree of expert parallel, or no degrees at all."""
    state, ranks, numbers = saved_state
    del state["degrees"]["ep"]
    assert torch.equal(numbers_after_restore(state, ranks, expert=2), numbers)
    assert not torch.equal(numbers_after_restore(state, ranks, expert=2, tensor=2), numbers)
    del state["degrees"]
    assert torch.equal(numbers_after_restore(state, ranks), numbers)


def test_a_start_without_checkpoints_is_logged(tmp_path):
    texts = jobs.write_texts(tmp_path / "texts")
    message = "checkpoint.enable is off: the weights will be lost when the run ends"
    _, _, err = jobs.run(jobs.arguments(tmp_path / "a", texts, training__steps=1))
    assert message in err
