"""Optimizers against torch.optim called directly; the step in backward against the ordinary one, bit for bit."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.pool import run_ranks
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.optimizers.build import build_optimizers

SETTINGS = dict(lr=0.01, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.RMSNorm(5), nn.Linear(5, 3))


def gradients(model, step):
    torch.manual_seed(step)
    model(torch.randn(4, 6)).square().sum().backward()


def train(model, optimizers, steps=4):
    for step in range(steps):
        gradients(model, step)
        optimizers.step()
        optimizers.zero_grad()


def same(model, other):
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "implementation, flags",
    [("for-loop", {"foreach": False}), ("foreach", {"foreach": True}), ("fused", {"fused": True})],
)
def test_equal_to_torch(name, implementation, flags):
    ours, theirs = network(), network()
    train(ours, build_optimizers([ours], name=name, implementation=implementation, **SETTINGS))
    reference = getattr(torch.optim, name)(theirs.parameters(), 0.01, (0.8, 0.9), 1e-6, 0.1, **flags)
    train(theirs, reference)
    assert same(ours, theirs) and not same(ours, network())


def test_norms_and_biases_can_be_spared_from_decay():
    ours, theirs = network(), network()
    train(ours, build_optimizers([ours], name="AdamW", decay_norms_and_biases=False, **SETTINGS))
    groups = [
        {"params": [theirs[0].weight, theirs[2].weight], "weight_decay": 0.1},
        {"params": [theirs[0].bias, theirs[1].weight, theirs[2].bias], "weight_decay": 0.0},
    ]
    train(theirs, torch.optim.AdamW(groups, 0.01, (0.8, 0.9), 1e-6, fused=True))
    assert same(ours, theirs)
    decayed = network()
    train(decayed, build_optimizers([decayed], name="AdamW", **SETTINGS))
    assert not torch.equal(decayed[1].weight, ours[1].weight)


def test_every_part_of_a_model_has_its_optimizer():
    ours, theirs = network(), network()
    optimizers = build_optimizers([ours[0], ours[1:]], name="AdamW", **SETTINGS)
    assert len(optimizers.optimizers) == len(list(optimizers)) == len(optimizers.param_groups) == 2
    train(ours, optimizers)
    train(theirs, build_optimizers([theirs], name="AdamW", **SETTINGS))
    assert same(ours, theirs)


def test_frozen_parameters_are_left_out():
    model = network()
    model[0].requires_grad_(False)
    optimizers = build_optimizers([model], name="AdamW", **SETTINGS)
    assert sum(len(group["params"]) for group in optimizers.param_groups) == 3


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("decay", [True, False])
def test_stepping_in_backward_gives_the_same_bits_and_keeps_no_gradient(name, implementation, decay):
    ordinary, early = network(), network()
    settings = dict(name=name, implementation=implementation, decay_norms_and_biases=decay, **SETTINGS)
    train(ordinary, build_optimizers([ordinary], **settings))
    optimizers = build_optimizers([early], in_backward=True, **settings)
    gradients(early, 0)
    assert all(p.grad is None for p in early.parameters())
    early = network()
    optimizers = build_optimizers([early], in_backward=True, **settings)
    train(early, optimizers)
    assert same(ordinary, early)
    assert len(optimizers.optimizers) == len(optimizers.param_groups) == 5


def test_a_schedule_reaches_the_step_in_backward():
    model, other = network(), network()
    for m, in_backward in ((model, False), (other, True)):
        optimizers = build_optimizers([m], name="AdamW", in_backward=in_backward, **SETTINGS)
        schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)) for o in optimizers]
        for step in range(3):
            gradients(m, step)
            optimizers.step()
            optimizers.zero_grad()
            for schedule in schedules:
                schedule.step()
    assert same(model, other)


def test_states_are_named_by_parameter_and_cross_over():
    """What a checkpoint holds does not depend on how the step is taken."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    ordinary, early = network(), network()
    first = build_optimizers([ordinary], name="AdamW", **SETTINGS)
    train(ordinary, first)
    state = get_optimizer_state_dict(ordinary, first.optimizers, options=flat)
    second = build_optimizers([early], name="AdamW", in_backward=True, **SETTINGS)
    early.load_state_dict(ordinary.state_dict())
    set_optimizer_state_dict(early, second.optimizers, copy.deepcopy(state), options=flat)
    train(ordinary, first)
    train(early, second)
    assert same(ordinary, early)


def sharded(in_backward):
    model = network()
    mesh = init_device_mesh("cpu", (2,))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    optimizers = build_optimizers([model], name="AdamW", in_backward=in_backward, **SETTINGS)
    freed = []
    for step in range(4):
        torch.manual_seed(step)
        model(torch.randn(4, 6).chunk(2)[mesh.get_rank()]).square().sum().backward()
        freed.append(all(p.grad is None for p in model.parameters()))
        optimizers.step()
        optimizers.zero_grad()
    return freed, [p.detach().full_tensor() for p in model.parameters()]


def test_sharded_parameters_step_in_backward_too():
    ordinary, early = run_ranks(2, sharded, False)[0], run_ranks(2, sharded, True)[0]
    assert early[0] == [True] * 4 and ordinary[0] == [False] * 4
    assert all(torch.equal(p, q) for p, q in zip(ordinary[1], early[1], strict=True))
    assert not torch.equal(early[1][0], network()[0].weight)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="optimizer 'Lion'.*Adam, AdamW"):
        build_optimizers([network()], name="Lion", **SETTINGS)
    with pytest.raises(ValueError, match="implementation 'slow'.*for-loop, foreach, fused"):
        build_optimizers([network()], name="Adam", implementation="slow", **SETTINGS)
