"""The units of FSDP2, under the names of any torch."""

from types import SimpleNamespace

import pytest

from torchtitan.torch_internals.fsdp import fsdp_units


@pytest.mark.parametrize("units", [[], ["one"], ["one", "two"]])
def test_units_of_any_torch(units):
    class Latest:
        _fsdp_param_groups = units

        @property
        def _fsdp_param_group(self):
            assert len(units) < 2, "as torch raises"

    states = [Latest()]
    if len(units) < 2:
        states.append(SimpleNamespace(_fsdp_param_group=units[0] if units else None))  # torch 2.11
    assert [fsdp_units(SimpleNamespace(_get_fsdp_state=lambda state=state: state)) for state in states] == [
        units for _ in states
    ]
