"""The units of FSDP2, each with parameters that are gathered and reduced together, under the names of any torch."""

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def fsdp_units(module: FSDPModule) -> list[FSDPParamGroup]:
    """Return the units of a module: none, if all its parameters are in other modules' units.

    torch 2.11 has at most one. Later versions may have several, and then raise on the attribute of 2.11.
    """
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    unit = state._fsdp_param_group
    return [] if unit is None else [unit]
