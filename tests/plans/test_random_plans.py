"""Fifty random legal plans have the loss and gradients of one device; `scripts/fuzz_plans.py` tests further ones."""

from functools import cache

import pytest

from tests.support.pool import run_ranks
from tests.support.random_plans import differences, on_ranks, plans, precision_of
from torchtitan.config.manager import load

SEED, COUNT = 19, 50


def test_a_seed_gives_the_same_plans():
    assert list(plans(SEED, 3)) == list(plans(SEED, 3)) != list(plans(SEED + 1, 3))


def test_plans_have_every_precision():
    """Exact ones, products in float8 with either scale, gathers in int8, reductions in int4, and both of these."""
    jobs = [load(options) for _, options in random_jobs()]
    assert {job.training.float8 for job in jobs} == {"none", "tensorwise", "rowwise"}
    messages = {(job.parallelism.fsdp_quantized_gather, job.parallelism.fsdp_quantized_reduce) for job in jobs}
    assert messages == {("none", "none"), ("int8", "none"), ("none", "int4"), ("int8", "int4")}


@pytest.mark.parametrize("number", range(COUNT))
def test_equal_to_one_device(number):
    ranks, options = random_jobs()[number]
    assert not (mismatches := differences(options, ranks, run_ranks(ranks, on_ranks, options))), (
        f"{mismatches}: {' '.join(options)}"
    )


def test_small_differences_are_detected():
    """One entry or the loss is off by a millionth, or a gradient is missing."""
    ranks, options = next(
        (ranks, options) for ranks, options in random_jobs() if ranks == 2 and precision_of(load(options)) == "exact"
    )
    (loss, grads), *other_ranks = run_ranks(ranks, on_ranks, options)
    name = max(grads, key=lambda name: abs(grads[name]).max())
    changed = {**grads, name: grads[name] * 1.000001}
    assert any(name in text for text in differences(options, ranks, [(loss, changed), *other_ranks]))
    assert differences(options, ranks, [(1.000001 * loss, grads), *other_ranks])[0].startswith("loss")
    assert f"{name} has no gradient on any rank" in differences(options, ranks, [(loss, {})])


@cache
def random_jobs():
    return list(plans(SEED, COUNT))
