"""Replaced functions of torch have the parameters of those that they replace."""

import functools
import re
from types import SimpleNamespace

import pytest
import torch

from torchtitan.torch_internals.replacement import replace, replaced


class Unit:
    factor = 1

    def gather(self, wait: bool = False) -> str:
        return f"torch's, {wait}"

    @staticmethod
    def scale(x: int) -> int:
        return x


def test_an_object_runs_the_replacement_and_may_call_what_it_replaces():
    unit = Unit()
    before = replace(unit, "gather", lambda wait=False: before(wait).replace("torch's", "ours"))
    assert unit.gather(True) == "ours, True" and Unit().gather() == "torch's, False"
    assert replace(unit, "factor", None) == 1 and unit.factor is None


@pytest.mark.parametrize(
    "function",
    [lambda self: "", lambda self, wait, more: "", lambda self, waits=False: "", lambda wait=False: ""],
)
def test_other_parameters_are_refused(function):
    expected = re.escape(
        f"torch {torch.__version__} has Unit.gather(self, wait), and its replacement was written for ("
    )
    with pytest.raises(RuntimeError, match=expected):
        replace(Unit, "gather", function)
    assert Unit().gather() == "torch's, False"


def test_a_missing_name_is_refused():
    with pytest.raises(RuntimeError, match=rf"torch {re.escape(torch.__version__)} has no Unit.reduce, which is to be"):
        replace(Unit(), "reduce", lambda: None)


def test_functions_that_take_anything_and_functions_in_c_are_accepted(monkeypatch):
    owner = SimpleNamespace(gather=Unit.gather, norm=torch._foreach_norm, make=Unit)
    replace(owner, "gather", lambda *args, **kwargs: "any")
    replace(owner, "norm", lambda tensors: "any")
    replace(owner, "make", lambda: "of the class")
    assert owner.gather() == owner.norm([]) == "any" and owner.make() == "of the class"
    partial = SimpleNamespace(gather=Unit().gather)
    replace(partial, "gather", functools.partial(lambda unit, wait: unit, 3))
    assert partial.gather(wait=True) == 3


@pytest.mark.parametrize("owner", [Unit, Unit()])
def test_a_replacement_ends_with_its_block(owner):
    with replaced(owner, "scale", lambda x: 2 * x) as before:
        assert (owner.scale(3), before(3)) == (6, 3)
    assert owner.scale(3) == 3
    with pytest.raises(KeyError), replaced(owner, "factor", 5):
        raise KeyError
    assert owner.factor == 1
