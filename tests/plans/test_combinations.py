"""Every row of the table of combinations, loss and every gradient, against the plain model on one device."""

import numpy as np
import pytest
import torch

from tests.plans.combinations import COMPOSED, EXPERT_LAYOUTS, LAYOUTS, Combination, other_models, table
from tests.support.pool import run_ranks
from tests.support.table_rows import TOLERANCE, plain_twin, reference, run_row
from torchtitan.adapters import ADAPTERS
from torchtitan.models import SIZES

# An integer of 8 bits changes a number by at most 1/127.5 of the largest of its block, twice as much as bfloat16, but
# once a pass. One of 4 bits changes a summand by 1/7.5, and a rank's summand may be larger than the sum.
QUANTIZED = {8: 5e-2, 4: 2 / 7.5}
# With float8 magnitudes below 2^-13 of an operand's largest are rounded by up to 2^-17 of it, 8e-6, depending on which
# rows a rank holds. In bfloat16 numbers next to the border of two float8 numbers, 2^-4 apart, round to either.
FLOAT8_TOLERANCE = {"float64": 2e-5, "bfloat16": 2e-1}


def tolerance_of(row: Combination) -> float:
    """Return the largest difference from one device, relative to the loss or to a gradient's largest entry."""
    if row.reduce_bits or row.gather_int8:
        return QUANTIZED[row.reduce_bits or 8]
    return (TOLERANCE if row.float8 == "none" else FLOAT8_TOLERANCE)[row.precision]


@pytest.mark.parametrize("row", table() + other_models(), ids=str)
def test_equal_to_one_device(row):
    loss, norm, grads, peak, further = reference(plain_twin(row))
    tolerance = tolerance_of(row)
    gradient_names = set()
    for got_loss, got_norm, got_grads, evaluated, load in run_ranks(row.ranks, run_row, row):
        assert load.get("expert_load_max", 0.0) == pytest.approx(peak)
        assert load.get("mtp_loss", 0.0) == pytest.approx(further, rel=tolerance)
        assert got_loss == pytest.approx(loss, rel=tolerance)
        assert not row.evaluated or evaluated == pytest.approx(loss, rel=tolerance)
        assert got_norm == pytest.approx(norm, rel=tolerance)
        for name, grad in got_grads.items():
            # a pipeline's last stage names a tied head separately
            expected = grads[name if name in grads else "tok_embeddings.weight"]
            # without rotation a bias of all keys does not change the softmax, so its gradient is only rounding
            largest = norm if name.endswith("wk.bias") and row.model != "qwen2" else expected.abs().max()
            error = (torch.from_numpy(grad) - expected).abs().max() / largest
            assert error <= tolerance, f"{name}: gradient differs by {error:.2e} of its largest entry"
        gradient_names |= got_grads.keys()
    assert grads.keys() <= gradient_names


STORED_TWICE = [
    Combination(**layout, precision="bfloat16", **options)
    for layout, options in (
        (LAYOUTS["one rank"], dict(adapter="lora")),
        (LAYOUTS["one rank"], dict(adapter="unfrozen", model="gpt2")),
        (LAYOUTS["FSDP 2"], dict(adapter="lora", accumulation=2, recompute="full")),
        (COMPOSED["TP 2"], dict(adapter="lora")),
        (COMPOSED["PP 2"], dict(adapter="unfrozen, last", microbatch_size=1)),
        (EXPERT_LAYOUTS["FSDP 2"], dict(adapter="lora", model="deepseek")),
        (EXPERT_LAYOUTS["PP 2 x FSDP 2"], dict(adapter="lora", model="deepseek", schedule="DualPipeV", overlap=True)),
    )
]


@pytest.mark.parametrize("row", STORED_TWICE, ids=str)
def test_frozen_weights_in_the_compute_type_change_no_bit(row):
    """Every weight is computed with in bfloat16, whether frozen ones are stored so or cast in each step."""
    narrow, wide = (run_ranks(row.ranks, run_row, row, dtype) for dtype in (None, torch.float32))
    for (loss, norm, grads, *_), (wide_loss, wide_norm, wide_grads, *_) in zip(narrow, wide, strict=True):
        assert (loss, norm) == (wide_loss, wide_norm)
        assert all(np.array_equal(grad, wide_grads[name]) for name, grad in grads.items())


def test_rows_are_distinct_and_legal():
    rows = table() + other_models()
    assert len(set(rows)) == len(rows)
    assert all(row.dp_replicate * row.dp_shard * row.cp * row.tp * row.pp == row.ranks for row in rows)


def test_every_family_and_adapter_has_rows():
    """Every family and adapter has a row, families at least with shards and replicas; otherwise they are untested."""
    rows = table() + other_models()
    sharded = {row.model for row in rows if row.dp_shard > 1}
    replicated = {row.model for row in rows if row.dp_replicate > 1}
    assert SIZES.keys() <= sharded & replicated
    assert set(ADAPTERS) <= {kind for row in rows for kind in row.adapter.split(", ")}
