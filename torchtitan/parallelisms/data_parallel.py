"""FSDP2, HSDP and DDP, all three by fully_shard: over [dp_shard], [dp_replicate, dp_shard] or [dp_replicate, 1].

Gradients are summed over ranks, never averaged: the loss is already divided by the global number of valid tokens.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from torchtitan.parallelisms.plan import ParallelPlan, match


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
) -> None:
    """Shard each block by itself and the rest (embedding, norm, head) with the root, in place.

    The root stays gathered between forward and backward: its parameters are needed first thing in backward, and the
    chunked loss uses the head several times.
    """
    # pinned memory needs an accelerator; without one, torch raises on the default
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy()
    # inputs stay as they are: rotary angles must reach the blocks in float32, and activations have the right type
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    blocks = [block for _, block in match(model, plan.blocks)]
    for block in blocks:
        fully_shard(
            block, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=reshard_after_forward
        )
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=False)
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM, which a factor would use otherwise
    if prefetch:
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + prefetch])
            block.set_modules_to_backward_prefetch(blocks[max(0, index - prefetch) : index][::-1])


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def set_last_microbatch(model: nn.Module, is_last: bool, replicas: bool) -> None:
    """Before each backward of an accumulated step: replicas exchange gradients once per step, not per microbatch."""
    if isinstance(model, FSDPModule) and replicas:
        model.set_requires_all_reduce(is_last)
