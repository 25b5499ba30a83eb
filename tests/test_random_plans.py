"""Fifty random legal plans have the loss and the gradients of one device; `scripts/fuzz_plans.py` goes on from here."""

from functools import cache

import pytest

from tests.support.pool import run_ranks
from tests.support.random_plans import differences, on_ranks, plans

SEED, COUNT = 16, 50


def test_a_seed_gives_the_same_plans():
    assert list(plans(SEED, 3)) == list(plans(SEED, 3)) != list(plans(SEED + 1, 3))


@pytest.mark.parametrize("number", range(COUNT))
def test_equal_to_one_device(number):
    ranks, words = chosen()[number]
    assert not (wrong := differences(words, ranks, run_ranks(ranks, on_ranks, words))), f"{wrong}: {' '.join(words)}"


def test_what_differs_is_found():
    """By a millionth of one entry, of the loss, or altogether."""
    ranks, words = next((ranks, words) for ranks, words in chosen() if ranks == 2)
    (loss, grads), *others = run_ranks(ranks, on_ranks, words)
    name = max(grads, key=lambda name: abs(grads[name]).max())
    changed = {**grads, name: grads[name] * 1.000001}
    assert any(name in text for text in differences(words, ranks, [(loss, changed), *others]))
    assert differences(words, ranks, [(1.000001 * loss, grads), *others])[0].startswith("loss")
    assert f"{name} has no gradient on any rank" in differences(words, ranks, [(loss, {})])


@cache
def chosen():
    return list(plans(SEED, COUNT))
