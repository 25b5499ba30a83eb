"""FSDP2, HSDP and DDP, all three by fully_shard: over [dp_shard], [dp_replicate, dp_shard] or [dp_replicate, 1].

Gradients are summed over ranks, never averaged: the loss is already divided by the global number of valid tokens.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import _disable_current_modes

from torchtitan.parallelisms.plan import ParallelPlan, match_blocks


def apply_data_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: ParallelPlan,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool = True,
    prefetch: int = 0,
    cpu_offload: bool = False,
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Shard each block by itself and the rest (embedding, norm, head) with the root, in place. Experts that are split
    by expert parallel are sharded over what is left of the ranks, `expert_mesh`. `prefetch`: blocks that are gathered
    ahead, their experts too; one at least where there are such, since FSDP gathers ahead only as far as the host is,
    and that waits in each block to know which tokens go where.

    The root stays gathered between forward and backward: its parameters are needed first thing in backward, and the
    chunked loss uses the head several times.
    """
    # pinned memory needs an accelerator; without one, torch raises on the default
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy()
    # inputs stay as they are: rotary angles must reach the blocks in float32, and activations have the right type
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    blocks = [block for _, block in match_blocks(model, plan)]
    travelling = [experts for _, experts in match_blocks(model, plan, plan.experts)] if expert_mesh is not None else []
    for experts in travelling:
        fully_shard(
            experts,
            mesh=expert_mesh,
            mp_policy=precision,
            offload_policy=offload,
            reshard_after_forward=reshard_after_forward and expert_mesh.size() > 1,
            shard_placement_fn=partial(_shard_experts, expert_mesh.size(expert_mesh.ndim - 1)),
        )
        _hide_from_selective_recompute(experts)
    for block in blocks:
        fully_shard(
            block, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=reshard_after_forward
        )
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=False)
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM, which a factor would use otherwise
    if travelling and reshard_after_forward:
        prefetch = max(prefetch, 1)
    if prefetch:
        _gather_ahead(blocks, prefetch, set(travelling))


def _gather_ahead(blocks: list[nn.Module], prefetch: int, travelling: set[nn.Module]) -> None:
    def units(near: list[nn.Module]) -> list[nn.Module]:
        return [unit for block in near for unit in (block, *(m for m in block.modules() if m in travelling))]

    for index, block in enumerate(blocks):
        ahead = blocks[index + 1 : index + 1 + prefetch]
        if not _in_training_only(block):  # in evaluation nothing would run, and so free, what is gathered
            ahead = [each for each in ahead if not _in_training_only(each)]
        block.set_modules_to_forward_prefetch(units(ahead))
        block.set_modules_to_backward_prefetch(units(blocks[max(0, index - prefetch) : index][::-1]))


def _in_training_only(block: nn.Module) -> bool:
    """Whether evaluation leaves the block out, which its class then says."""
    return getattr(block, "in_training_only", False)


def _shard_experts(shards: int, parameter: nn.Parameter) -> Shard:
    """Whole experts to each rank, or, where a rank has too few of them, a part of every one."""
    shape = parameter.to_local().shape
    return Shard(next((dim for dim, size in enumerate(shape) if size % shards == 0), 0))


def _hide_from_selective_recompute(module: FSDPModule) -> None:
    """Recompute by operator counts what runs inside a block and wants the same again. FSDP gathers the parameters of a
    module inside the block there, but not always both times.
    """
    group = module._get_fsdp_state()._fsdp_param_group
    for name in ("pre_forward", "post_forward"):
        setattr(group, name, _without_modes(getattr(group, name)))


def _without_modes(function: Callable) -> Callable:
    def run(*args: object, **kwargs: object) -> object:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def set_last_microbatch(model: nn.Module, is_last: bool, replicas: bool) -> None:
    """Before each backward of an accumulated step: replicas exchange gradients once per step, not per microbatch."""
    if isinstance(model, FSDPModule) and replicas:
        model.set_requires_all_reduce(is_last)
