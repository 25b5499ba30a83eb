"""Figures of an answer of `torchtitan plan`."""

import pytest

from torchtitan.planner import answer


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [(0.0001234, 3, "0.000123"), (0.5, 3, "0.500"), (12.345, 3, "12.345"), (1.234, 0, "1.23"), (1234.5, 0, "1,234")],
)
def test_figures_have_three_significant_digits(value, decimals, text):
    assert answer.figure(value, decimals) == text


def test_amounts_have_the_letter_of_their_size():
    assert [answer.amount(count) for count in (15e12, 2.5e9, 3e6, 999)] == ["15 T", "2.5 G", "3 M", "999"]
