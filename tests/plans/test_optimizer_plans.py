"""Several steps of every optimizer under every kind of plan give the weights of one device."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from tests.plans.combinations import LAYOUTS, Combination
from tests.plans.combinations_optimizers import FLIPPED, KINDS, LOW, optimizers
from tests.support.pool import RankFailed, run_ranks
from tests.support.table_rows import (
    FAMILIES,
    assembled,
    batch,
    build_with_initial_weights,
    model_input_names,
    objective,
    plain_twin,
)
from torchtitan.contract.step import SAMPLES, device_weights, local_batch, rank_weights
from torchtitan.optimizers.build import build_optimizers

SHARED = dict(beta1=0.9, beta2=0.95, eps=1e-8)
TOLERANCE = {"Muon": 1e-4}
"""Of what computes in float32; else 1e-8: sums of another order, behind a division by roots of small squares."""
STEPS = 3


def optimizers_of(parts, name, options):
    shared = {} if name in ("Adafactor", "Lion", "SGD") else SHARED
    return build_optimizers(parts, name=name, lr=0.01, weight_decay=0.1, shared=shared, options=options)


def weights_after_steps(row: Combination, name: str, options: dict) -> dict[str, np.ndarray]:
    """Train on this rank of the row; return the full weights of its part of the model."""
    model = assembled(row)
    stepping = optimizers_of(model.parts, name, options)
    full_batch = batch()
    inputs = local_batch(model, {name: full_batch[name] for name in model_input_names(row, False)})
    return rank_weights(model, stepping, inputs, objective(row).count(full_batch), STEPS, row.accumulation)


@cache
def on_one_device(row: Combination, kind: str) -> dict[str, torch.Tensor]:
    """Return the weights after the same steps on one device."""
    model = build_with_initial_weights(row)
    balance = FAMILIES[row.model].balance_of(model.args)
    stepping = optimizers_of([model], *KINDS[kind])
    full_batch = batch()
    inputs = {name: full_batch[name] for name in model_input_names(row, False)}
    return device_weights(model, stepping, inputs, objective(row).count(full_batch), STEPS, balance)


@pytest.mark.parametrize("row", optimizers(), ids=str)
def test_weights_are_those_of_one_device(row):
    """Weights equal one device's; a flipped side is compared with a projection of the other side on one device.

    FSDP shards rows, so a matrix projected along a sharded side has its other side projected instead.
    """
    assert SAMPLES == 8, "gradients accumulate over 4 passes, and a basis is computed once for all of them"
    expected = on_one_device(plain_twin(row), "GaLore (right)" if row.optimizer == FLIPPED else row.optimizer)
    weight_names, tolerance = set(), TOLERANCE.get(row.optimizer, 1e-8)
    for weights in run_ranks(row.ranks, weights_after_steps, row, *KINDS[row.optimizer]):
        for name, weight in weights.items():
            torch.testing.assert_close(torch.from_numpy(weight), expected[name], rtol=tolerance, atol=tolerance)
        weight_names |= weights.keys()
    assert weight_names == expected.keys()


def test_rows_are_distinct_and_cover_all_optimizers():
    rows = optimizers()
    assert len(set(rows)) == len(rows) and {row.optimizer for row in rows} == KINDS.keys()


def test_projecting_a_sharded_side_can_be_an_error():
    row, options = Combination(**LAYOUTS["FSDP 2"], precision="float64"), LOW | dict(on_conflict="error")
    with pytest.raises(RankFailed, match="JobError.*for layers.0.attention.wk.weight, whose left side"):
        run_ranks(2, weights_after_steps, row, "GaLore", options)
    unsharded = replace(row, **LAYOUTS["DDP 2"] | dict(dp_shard=1))
    expected = on_one_device(plain_twin(unsharded), "GaLore")
    for weights in run_ranks(2, weights_after_steps, unsharded, "GaLore", options):
        assert all(np.allclose(weight, expected[name], rtol=1e-8, atol=1e-8) for name, weight in weights.items())
