"""Optimizers against their references, in every implementation; steps in backward equal ordinary ones bit for bit."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support import jobs, toy_optimizers
from tests.support import optimizer_references as references
from tests.support.pool import run_ranks
from tests.support.toy_optimizers import TOYS, add_toys
from torchtitan.checkpoint.tensors import allocate_state, optimizer_state, set_optimizer_values
from torchtitan.core.errors import JobError
from torchtitan.models.moe.layer import Experts
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.optimizers.build import build_optimizers

toys = toy_optimizers.toys

SHARED = dict(beta1=0.8, beta2=0.9, eps=1e-6)
SETTINGS = dict(lr=0.01, shared=SHARED, weight_decay=0.1)
FLAGS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


ADAM = dict(lr=0.01, decay=0.1, **SHARED)
REFERENCES = {
    "APOLLO": lambda p, flags: references.APOLLO(p, **ADAM, rank=2, gap=3),
    "Adafactor": lambda p, flags: references.Adafactor(p, 0.01, 0.1, beta1=0.8),
    "Adam": lambda p, flags: torch.optim.Adam(p, 0.01, (0.8, 0.9), 1e-6, 0.1, **flags),
    "AdamW": lambda p, flags: torch.optim.AdamW(p, 0.01, (0.8, 0.9), 1e-6, 0.1, **flags),
    "AdamW8bit": lambda p, flags: torch.optim.AdamW(p, 0.01, (0.8, 0.9), 1e-6, 0.1, **flags),
    "AdamWBF16": lambda p, flags: references.AdamW(p, **ADAM),
    "GaLore": lambda p, flags: references.GaLore(p, **ADAM, rank=2, gap=3),
    "Lion": lambda p, flags: references.Lion(p, lr=0.01, beta1=0.8, beta2=0.9, decay=0.1),
    "Muon": lambda p, flags: references.Muon(p, **ADAM, momentum=0.7),
    "SGD": lambda p, flags: torch.optim.SGD(p, 0.01, 0.7, weight_decay=0.1, nesterov=True, **flags),
}
"""Each optimizer made by hand, with the SETTINGS and OPTIONS of these tests."""
OPTIONS = {
    "APOLLO": {"rank": 2, "update_gap": 3, "targets": ["*"]},
    "GaLore": {"rank": 2, "update_gap": 3, "targets": ["*"]},
    "Adafactor": {"beta1": 0.8},
    "Lion": {"beta1": 0.8, "beta2": 0.9},
    "Muon": {"momentum": 0.7, "targets": ["*"], "precision": "float32"},
    "SGD": {"momentum": 0.7, "nesterov": True},
}
KINDS = [(name, kind) for name, spec in OPTIMIZERS.items() for kind in spec.implementations]


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


def options_of(name):
    return dict(name=name, options=OPTIONS.get(name, {}), **SETTINGS)


def test_every_optimizer_has_a_reference():
    assert REFERENCES.keys() == OPTIMIZERS.keys()


@pytest.mark.parametrize("name, implementation", KINDS)
def test_equal_to_its_reference(name, implementation):
    ours, expected = network(), network()
    train(ours, build_optimizers([ours], implementation=implementation, **options_of(name)))
    parameters = expected.named_parameters() if OPTIMIZERS[name].needs_names else expected.parameters()
    reference = REFERENCES[name](parameters, FLAGS[implementation])
    train(expected, reference)
    assert not same(ours, network())
    if isinstance(reference, torch.optim.Optimizer):
        assert same(ours, expected)
    for parameter, reference_parameter in zip(ours.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            parameter, reference_parameter
        )  # float32 against float64: a unit or two in the last place


def test_norms_and_biases_can_be_excluded_from_decay():
    ours, expected = network(), network()
    train(ours, build_optimizers([ours], name="AdamW", decay_norms_and_biases=False, **SETTINGS))
    groups = [
        {"params": [expected[0].weight, expected[2].weight], "weight_decay": 0.1},
        {"params": [expected[0].bias, expected[1].weight, expected[2].bias], "weight_decay": 0.0},
    ]
    train(expected, torch.optim.AdamW(groups, 0.01, (0.8, 0.9), 1e-6, fused=True))
    assert same(ours, expected)
    decayed = network()
    train(decayed, build_optimizers([decayed], name="AdamW", **SETTINGS))
    assert not torch.equal(decayed[1].weight, ours[1].weight)


def test_biases_of_stacked_experts_are_biases():
    experts = Experts(8, 16, 4, biases=True)
    optimizers = build_optimizers([experts], name="AdamW", decay_norms_and_biases=False, **SETTINGS)
    decayed, exempt = [{parameter.dim() for parameter in group["params"]} for group in optimizers.param_groups]
    assert (decayed, exempt) == ({3}, {2})


def test_every_part_of_a_model_has_its_optimizer():
    ours, expected = network(), network()
    optimizers = build_optimizers([ours[0], ours[1:]], name="AdamW", **SETTINGS)
    assert len(optimizers.optimizers) == len(list(optimizers)) == len(optimizers.param_groups) == 2
    train(ours, optimizers)
    train(expected, build_optimizers([expected], name="AdamW", **SETTINGS))
    assert same(ours, expected)


def test_frozen_parameters_are_left_out():
    model = network()
    model[0].requires_grad_(False)
    optimizers = build_optimizers([model], name="AdamW", **SETTINGS)
    assert sum(len(group["params"]) for group in optimizers.param_groups) == 3


@pytest.mark.parametrize("name, implementation", [*KINDS, *((name, "for-loop") for name in TOYS)])
@pytest.mark.parametrize("decay", [True, False])
def test_steps_in_backward_give_the_same_bits_and_free_gradients(name, implementation, decay, toys):
    ordinary, early = network(), network()
    settings = options_of(name) | dict(implementation=implementation, decay_norms_and_biases=decay)
    train(ordinary, build_optimizers([ordinary], **settings))
    optimizers = build_optimizers([early], in_backward=True, **settings)
    gradients(early, 0)
    assert all(p.grad is None for p in early.parameters())
    early = network()
    optimizers = build_optimizers([early], in_backward=True, **settings)
    train(early, optimizers)
    assert same(ordinary, early) and not same(early, network())
    assert len(optimizers.optimizers) == len(optimizers.param_groups) == 5


def test_parameters_are_grouped_by_name(toys):
    model = network()
    (optimizer,) = build_optimizers([model], decay_norms_and_biases=False, **options_of("ByName"))
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    assert groups == [
        dict(weight_decay=0.1, whole=True, lr=0.05, memory=0.9, param_names=["0.weight"]),
        dict(weight_decay=0.1, whole=False, lr=0.01, memory=0.9, param_names=["2.weight"]),
        dict(weight_decay=0.0, whole=False, lr=0.01, memory=0.9, param_names=["0.bias", "1.weight", "2.bias"]),
    ]
    assert optimizer.param_groups[0]["params"] == [model[0].weight]


@pytest.mark.parametrize("name", [*OPTIMIZERS, *TOYS])
@pytest.mark.parametrize("early", [False, True])
def test_a_checkpoint_holds_the_full_optimizer_state(name, early, toys):
    """Restore as a resume does: allocate the state, then overwrite it. The resumed run continues bit for bit."""
    uninterrupted, resumed = network(), network()
    first = build_optimizers([uninterrupted], **options_of(name))
    train(uninterrupted, first, steps=3)
    tensors, values = optimizer_state([uninterrupted], first)
    saved, values = {key: tensor.clone() for key, tensor in tensors.items()}, dict(values)
    resumed.load_state_dict(uninterrupted.state_dict())
    second = build_optimizers([resumed], in_backward=early, **options_of(name))
    allocate_state(second)
    live, names = optimizer_state([resumed], second)
    assert live.keys() == saved.keys() and names.keys() == values.keys() and (live or name == "SGD")
    for key, tensor in live.items():
        tensor.copy_(saved[key])
    set_optimizer_values([resumed], second, values)
    train(uninterrupted, first)
    train(resumed, second)
    assert same(uninterrupted, resumed)


def test_a_schedule_applies_to_steps_in_backward():
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


def test_optimizer_state_moves_between_step_modes():
    """State is named by parameter, so a checkpoint does not depend on where the step is taken."""
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


def sharded_steps(name, implementation, in_backward):
    """Take steps under FSDP; return which backwards freed all gradients, and the full weights."""
    add_toys()
    model = network()
    mesh = init_device_mesh("cpu", (2,))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    optimizers = build_optimizers([model], implementation=implementation, in_backward=in_backward, **options_of(name))
    freed = []
    for step in range(4):
        torch.manual_seed(step)
        model(torch.randn(4, 6).chunk(2)[mesh.get_rank()]).square().sum().backward()
        freed.append(all(p.grad is None for p in model.parameters()))
        optimizers.step()
        optimizers.zero_grad()
    return freed, [p.detach().full_tensor() for p in model.parameters()]


@pytest.mark.parametrize("name, implementation", [*KINDS, *((name, "for-loop") for name in TOYS)])
def test_sharded_parameters_step_as_unsharded_ones(name, implementation, toys):
    ordinary, early = (
        run_ranks(2, sharded_steps, name, implementation, in_backward)[0] for in_backward in (False, True)
    )
    assert early[0] == [True] * 4 and ordinary[0] == [False] * 4
    assert all(torch.equal(p, q) for p, q in zip(ordinary[1], early[1], strict=True))
    full_model = network()
    optimizers = build_optimizers([full_model], **options_of(name))
    for step in range(4):
        torch.manual_seed(step)
        for half in torch.randn(4, 6).chunk(2):  # FSDP divides the sum by its ranks
            (full_model(half).square().sum() / 2).backward()
        optimizers.step()
        optimizers.zero_grad()
    for ours, expected in zip(ordinary[1], full_model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-4, atol=1e-6)
    assert not torch.equal(early[1][0], network()[0].weight)


def test_unknown_names_are_refused():
    with pytest.raises(JobError, match="optimizer 'Sophia'.*Adam, AdamW"):
        build_optimizers([network()], name="Sophia", **SETTINGS)
    with pytest.raises(JobError, match="implementation 'slow'.*fused, foreach, for-loop"):
        build_optimizers([network()], name="Adam", implementation="slow", **SETTINGS)
    with pytest.raises(JobError, match="optimizer.options: given momentum = 0.9; allowed: nothing with optimizer.name"):
        build_optimizers([network()], name="Adam", options={"momentum": 0.9}, **SETTINGS)


@pytest.mark.parametrize("name", TOYS)
def test_a_job_with_a_custom_optimizer_trains_resumes_and_is_sharded(name, tmp_path, toys):
    texts = jobs.write_texts(tmp_path / "data")

    def job(folder, **options):
        more = dict(optimizer__name=name, optimizer__lr=1e-3, training__steps=4, checkpoint__enable=True)
        return jobs.arguments(tmp_path / folder, texts, **(more | {"checkpoint__interval": 2} | options))

    (uninterrupted,) = run_ranks(1, rows_and_state, job("straight"))
    run_ranks(1, rows_and_state, [*job("resumed", training__steps=2, lr_scheduler__total_steps=4)])
    (resumed,) = run_ranks(1, rows_and_state, [*job("resumed", lr_scheduler__total_steps=4)])
    assert resumed[1] == uninterrupted[1] and len(uninterrupted[0]) == 4
    both = run_ranks(2, rows_and_state, job("both", training__local_batch_size=4, training__global_batch_size=8))
    losses = [[row["loss"] for row in rows] for rows, _ in (uninterrupted, both[0])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0][-1] < losses[0][0]
    (early,) = run_ranks(1, rows_and_state, job("early", optimizer__early_step_in_backward=True, training__max_norm=0))
    assert len(early[0]) == 4


def rows_and_state(argv):
    add_toys()
    return jobs.train(argv)
