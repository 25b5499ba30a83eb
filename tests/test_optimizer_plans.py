"""Several steps of every optimizer under every kind of plan lead to the weights of one device."""

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from tests.combinations import COMPOSED, LAYOUTS, Combination
from tests.support.jobs import full
from tests.support.pool import RankFailed, run_ranks
from tests.test_combinations import SAMPLES, assembled, batch, build_plain, local_batch_size, names_for, objective
from torchtitan.initialization import initialize
from torchtitan.optimizers.build import build_optimizers

SHARED = dict(beta1=0.9, beta2=0.95, eps=1e-8)
LOW = dict(rank=4, update_gap=2, scale=1.0)
KINDS = {
    "Adafactor": ("Adafactor", dict(beta1=0.9)),
    "AdamW8bit": ("AdamW8bit", {}),
    "Muon": ("Muon", dict(precision="float32")),
    "GaLore": ("GaLore", LOW),
    "GaLore, right": ("GaLore", LOW | dict(side="right")),
    "GaLore, flipped": ("GaLore", LOW | dict(on_conflict="flip")),
    "GaLore, refused": ("GaLore", LOW | dict(on_conflict="error")),
    "GaLore, other side": ("GaLore", LOW | dict(side="reverse_std", basis="svd", state_on_refresh="rotate")),
    "GaLore, both sides, 8 bits": ("GaLore", LOW | dict(side="full", inner="adamw_8bit", basis="rsvd")),
    "GaLore, Adafactor": ("GaLore", LOW | dict(inner="adafactor", basis="power", stagger=True)),
    "Fira": ("GaLore", LOW | dict(residual="fira")),
    "APOLLO": ("APOLLO", LOW),
    "APOLLO-Mini": ("APOLLO", dict(rank=1, per="tensor", scale=11.3)),
}
TOLERANCE = {"Muon": 1e-4}
"""Of what computes in float32; else 1e-8: sums of another order, behind a division by roots of small squares."""
PLANS = {name: LAYOUTS[name] for name in ("FSDP 2", "DDP 2")} | {name: COMPOSED[name] for name in ("TP 2", "PP 2")}
LARGER = {name: LAYOUTS[name] for name in ("FSDP 4", "HSDP 2x2")} | {"FSDP 2 x TP 2": COMPOSED["FSDP 2 x TP 2"]}
ANYWHERE = [kind for kind in KINDS if kind not in ("GaLore, flipped", "GaLore, refused")]
STEPS = 3


def optimizers_of(parts, kind):
    name, options = KINDS[kind]
    shared = SHARED if name != "Adafactor" else {}
    return build_optimizers(parts, name=name, lr=0.01, weight_decay=0.1, shared=shared, options=options)


def trained(row: Combination, kind: str) -> dict[str, np.ndarray]:
    """On every rank: this rank's weights, whole."""
    model = assembled(row)
    optimizers = optimizers_of(model.parts, kind)
    everything, size = batch(), local_batch_size(row, model.dims)
    mine = {name: everything[name][model.dims.dp_rank(model.mesh) :: model.dims.dp] for name in names_for(row, False)}
    valid = objective(row).count(everything)
    for _ in range(STEPS):
        for index in range(row.accumulation):
            part = {name: tensor[index * size : (index + 1) * size] for name, tensor in mine.items()}
            model.forward_backward(part, valid, is_last=index == row.accumulation - 1)
        model.clip_gradients(1.0)
        optimizers.step()
        optimizers.zero_grad()
    return {name: full(parameter.detach()).numpy() for name, parameter in model.named_parameters()}


@cache
def on_one_device(row: Combination, kind: str) -> dict[str, torch.Tensor]:
    model = build_plain(row)
    initialize(model, 7, model.init_rule)
    optimizers = optimizers_of([model], kind)
    everything = batch()
    for _ in range(STEPS):
        (
            model(**{name: everything[name] for name in names_for(row, False)}) / objective(row).count(everything)
        ).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step()
        optimizers.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def same_as_one_device(layout, kind, reference=None, **options):
    row = Combination(**layout, precision="float64", **options)
    expected = on_one_device(Combination(precision="float64", pp=row.pp), reference or kind)
    found, tolerance = set(), TOLERANCE.get(KINDS[kind][0], 1e-8)
    for weights in run_ranks(row.ranks, trained, row, kind):
        for name, weight in weights.items():
            torch.testing.assert_close(torch.from_numpy(weight), expected[name], rtol=tolerance, atol=tolerance)
        found |= weights.keys()
    assert found == expected.keys()


@pytest.mark.parametrize("kind", ANYWHERE)
@pytest.mark.parametrize("plan", PLANS)
def test_weights_are_those_of_one_device(plan, kind):
    same_as_one_device(PLANS[plan], kind)


@pytest.mark.parametrize("kind", ["AdamW8bit", "Muon", "GaLore", "GaLore, both sides, 8 bits", "Fira"])
@pytest.mark.parametrize("plan", LARGER)
def test_weights_are_those_of_one_device_on_more_ranks(plan, kind):
    same_as_one_device(LARGER[plan], kind)


def test_bases_are_found_once_for_all_microbatches():
    assert SAMPLES == 8
    same_as_one_device(PLANS["FSDP 2"], "GaLore", accumulation=4)


def test_a_flipped_side_is_the_other_side_of_one_device():
    """FSDP shards rows: matrices whose rows would become short have their columns projected instead."""
    same_as_one_device(PLANS["FSDP 2"], "GaLore, flipped", reference="GaLore, right")


def test_a_side_that_is_sharded_can_be_an_error():
    with pytest.raises(RankFailed, match="JobError.*for layers.0.attention.wk.weight, whose left side"):
        run_ranks(2, trained, Combination(**PLANS["FSDP 2"], precision="float64"), "GaLore, refused")
    same_as_one_device(PLANS["DDP 2"], "GaLore, refused")
