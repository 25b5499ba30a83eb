"""FSDP2: its units, each with parameters that are gathered and reduced together, and their collectives."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_common,
    _fsdp_init,
    _fsdp_param,
    _fsdp_param_group,
)

Unit = _fsdp_param_group.FSDPParamGroup
"""torch 2.13: a unit, which data_parallel.py changes by `replace`."""
Parameter = _fsdp_param.FSDPParam
"""torch 2.13: a parameter of a unit."""
HSDPMeshInfo = _fsdp_common.HSDPMeshInfo
"""torch 2.13: the mesh of a unit with replicas, whose process group data_parallel.py replaces."""
DefaultAllGather = _fsdp_collectives.DefaultAllGather
"""torch 2.13: the gather of a unit's parameters, to subclass."""
DefaultReduceScatter = _fsdp_collectives.DefaultReduceScatter
"""torch 2.13: the reduction of a unit's gradients, to subclass."""
alloc_storage = _fsdp_param.alloc_storage
"""torch 2.13: gives a gathered parameter its memory."""
get_post_forward_mesh_info = _fsdp_init._get_post_forward_mesh_info
"""torch 2.13: creates the groups of a number of neighboring ranks that share a second copy of parameters."""


def fsdp_units(module: FSDPModule) -> list[Unit]:
    """torch 2.13: the units of a module; none, if all its parameters are in other modules' units.

    torch 2.11 has at most one. Later versions may have several, and then raise on the attribute of 2.11.
    """
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    unit = state._fsdp_param_group
    return [] if unit is None else [unit]


def in_pre_backward(unit: Unit) -> bool:
    """torch 2.13: whether the unit is gathered for backward, or prefetches another."""
    return unit._training_state == _fsdp_common.TrainingState.PRE_BACKWARD


def end_forward_with(first: nn.Module, last: nn.Module) -> None:
    """torch 2.13: let the forward of the unit of `first` begin with this module and end with `last`, run once or often.

    torch's hooks for a unit of several modules end the forward after one call of each, and take a further call for the
    next forward.
    """
    state = first._get_fsdp_state()
    state._pre_forward_hook_handle.remove()  # the hooks of all modules of the unit
    state._pre_forward_hook_handle = first.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True)

    def leave(module: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        # further losses of a model run after this; the unit has ended its forward and stays gathered until backward
        in_forward = state._training_state == _fsdp_common.TrainingState.FORWARD
        return state._post_forward(module, inputs, output) if in_forward else output

    state._post_forward_hook_handle = last.register_forward_hook(leave)


def initialize(module: FSDPModule) -> None:
    """torch 2.13: do what the first forward of the root does, for a part that is run without it."""
    module._get_fsdp_state()._lazy_init()


def finish_backward(module: FSDPModule) -> None:
    """torch 2.13: end a step's backward of a root, which autograd does only where gradients are reduced in backward."""
    module._get_fsdp_state()._root_post_backward_final_callback()


def local_shard(parameter: Parameter) -> torch.Tensor:
    """torch 2.13: this rank's shard, flat and padded [N]."""
    return parameter._sharded_param_data


def local_rows(parameter: Parameter) -> torch.Tensor:
    """torch 2.13: this rank's shard in its shape, without padding [rows, ...]."""
    return parameter._sharded_local_tensor


def owner_and_name(parameter: Parameter) -> tuple[nn.Module, str]:
    """torch 2.13: the module that has the parameter, and its name there."""
    return parameter._module_info.module, parameter._module_info.param_name


def full_shape(parameter: Parameter) -> torch.Size:
    """torch 2.13: the shape of the parameter before this unit sharded it."""
    return parameter._orig_size


def share_after_forward(unit: Unit, mesh_info: Any) -> None:
    """torch 2.13: let the ranks of `mesh_info` share a second copy of the unit's parameters after its forward."""
    unit.post_forward_mesh_info = mesh_info
    for parameter in unit.fsdp_params:
        parameter.post_forward_mesh_info = mesh_info
        parameter._init_sharded_post_forward_param_metadata(torch.empty(full_shape(parameter), device="meta"))


def gather_by(parameter: Parameter, pack: Callable, expand: Callable) -> None:
    """torch 2.13: gather the parameter by two functions, which FSDP looks up on its local rows when it is created."""
    rows = local_rows(parameter)
    rows.fsdp_pre_all_gather, rows.fsdp_post_all_gather = pack, expand
    parameter._init_extensions()
