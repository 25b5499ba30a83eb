"""What a trainer keeps of its plan, and when it takes the random numbers of a checkpoint as its own."""

from types import SimpleNamespace

import pytest
import torch

from torchtitan.checkpoint import rng_state
from torchtitan.config.job import JobConfig
from torchtitan.metrics.goodput import Goodput
from torchtitan.parallelisms.parallel_dims import ParallelDims
from torchtitan.training.restore import TrainState
from torchtitan.training.trainer import Trainer


def trainer(**degrees):
    """The second of four ranks, without a model."""
    made = Trainer.__new__(Trainer)
    made.config, made.dims = JobConfig(), ParallelDims(4, **degrees)
    made.ranks, made.dp_rank = SimpleNamespace(rank=1, world_size=4), 1
    made.state, made.restorer = TrainState(step=3, tokens=96), SimpleNamespace(base=None)
    hooks = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    made.model = SimpleNamespace(hooks=hooks)
    steps = SimpleNamespace(name="guard", state_dict=dict, load_state_dict=lambda state: None)
    made.guards, made.goodput = SimpleNamespace(steps=steps), Goodput()
    made.findings = SimpleNamespace(state_dict=lambda step: {}, load_state_dict=lambda step, state: None)
    made.schedulers = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    return made


@pytest.fixture
def kept():
    """The state of four ranks with expert parallel over two, and the numbers that rank 1 draws next."""
    torch.manual_seed(11)
    ranks = [{"rng": rng_state()} for _ in range(4)]
    return trainer(ep=2).trainer_state(), ranks, torch.rand(3)


def drawn_after(state, ranks, **degrees):
    torch.manual_seed(0)
    made = trainer(**degrees)
    made.load_state(state, ranks)
    return torch.rand(3)


def test_the_same_plan_goes_on_with_its_random_numbers(kept):
    state, ranks, numbers = kept
    assert torch.equal(drawn_after(state, ranks, ep=2), numbers)


@pytest.mark.parametrize("other", [dict(ep=4), dict(), dict(ep=2, tp=2), dict(ep=2, dp_replicate=2)], ids=str)
def test_another_plan_does_not(kept, other):
    state, ranks, numbers = kept
    assert not torch.equal(drawn_after(state, ranks, **other), numbers)


def test_checkpoints_that_do_not_name_all_degrees_load(kept):
    """They come from before expert parallel, or from before any degree was kept."""
    state, ranks, numbers = kept
    del state["degrees"]["ep"]
    assert torch.equal(drawn_after(state, ranks, ep=2), numbers)
    assert not torch.equal(drawn_after(state, ranks, ep=2, tp=2), numbers)
    del state["degrees"]
    assert torch.equal(drawn_after(state, ranks), numbers)
