"""FSDP2, HSDP and DDP, all three by fully_shard: over [dp_shard], [dp_replicate, dp_shard] or [dp_replicate, 1].

Gradients are summed over ranks, never averaged: the loss is already divided by the global number of valid tokens.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from torchtitan.parallelisms.plan import ParallelPlan, is_part, match_blocks, match_end


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
    """Shard each block by itself, last norm and head together, and the rest (the embedding) with the root, in place.
    Experts that are split by expert parallel are sharded over the remaining ranks, `expert_mesh`. `prefetch`: number of
    blocks to prefetch, with their experts; at least one if there are such experts. FSDP prefetches only as far as the
    host has got, and the host waits in each block to learn which tokens go where.

    The head stays gathered between forward and backward, because backward needs its parameters first.
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
    head = _head(model, plan)
    if head:
        fully_shard(head, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=False)
        _until_the_loss(head, model.loss)
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=False)
    for module in fsdp_modules(model):
        if (expert_mesh if module in travelling else mesh).size() > 1:  # over one rank torch would divide into a copy
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM, which a factor would use otherwise
    if travelling and reshard_after_forward:
        prefetch = max(prefetch, 1)
    if prefetch:
        _gather_ahead(blocks, head[:1], prefetch, set(travelling))


def _head(model: nn.Module, plan: ParallelPlan) -> list[nn.Module]:
    """The last norm and the head, whose gradients are summed while blocks go backward, as those of a block are: in the
    root's unit it would be at the very end of the step, with nothing beside it. Empty where the embedding has the same
    matrix, which cannot be in two units, and in a pipeline, which gathers and sums all of a part at once.
    """
    if is_part(model, plan):
        return []
    head = [match_end(model, name) for name in plan.head]
    tied = set(match_end(model, plan.embedding).parameters())
    return [] if any(parameter in tied for module in head for parameter in module.parameters()) else head


def _until_the_loss(head: list[nn.Module], loss: nn.Module | None) -> None:
    """Run the unit of these modules as one from the first's forward to that of the loss, which calls the head, in
    pieces several times. torch's own hooks of several modules wait until each has run once, and take one call more as
    the beginning of the next forward.
    """
    state = head[0]._get_fsdp_state()
    state._pre_forward_hook_handle.remove()  # of all
    state._pre_forward_hook_handle = head[0].register_forward_pre_hook(
        state._pre_forward, prepend=True, with_kwargs=True
    )

    def leave(module: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        # a model's further losses find it left, and gathered until backward
        return state._post_forward(module, inputs, output) if state._training_state == TrainingState.FORWARD else output

    state._post_forward_hook_handle = (loss or head[-1]).register_forward_hook(leave)


def _gather_ahead(blocks: list[nn.Module], head: list[nn.Module], prefetch: int, travelling: set[nn.Module]) -> None:
    """Set which FSDP units each block prefetches. `head`: the modules of the head's unit, if it is one; the first
    stands for it.
    """

    def units(near: list[nn.Module]) -> list[nn.Module]:
        return [unit for block in near for unit in (block, *(m for m in block.modules() if m in travelling))]

    last = next((block for block in reversed(blocks) if not _in_training_only(block)), None)
    for index, block in enumerate(blocks):
        prefetched = blocks[index + 1 : index + 1 + prefetch]
        if not _in_training_only(block):  # in evaluation nothing would run, and so free, what is gathered
            prefetched = [candidate for candidate in prefetched if not _in_training_only(candidate)]
        block.set_modules_to_forward_prefetch([*units(prefetched), *(head if block is last else ())])
        block.set_modules_to_backward_prefetch(units(blocks[max(0, index - prefetch) : index][::-1]))
    for module in head:
        module.set_modules_to_backward_prefetch(units(blocks[-prefetch:][::-1]))


def _in_training_only(block: nn.Module) -> bool:
    """Return True if evaluation skips the block, as its class declares."""
    return getattr(block, "in_training_only", False)


def _shard_experts(shards: int, parameter: nn.Parameter) -> Shard:
    """Return the placement of experts: full experts per rank or, with too few of them, a part of every expert."""
    shape = parameter.to_local().shape
    return Shard(next((dim for dim, size in enumerate(shape) if size % shards == 0), 0))


def _hide_from_selective_recompute(module: FSDPModule) -> None:
    """Hide the gathers of FSDP from selective recompute, which counts the operators inside a block and expects the same
    ones the second time. FSDP gathers the parameters of a module inside the block there, but not always both times.
    """
    group = module._get_fsdp_state()._fsdp_param_group
    for name in ("pre_forward", "post_forward"):
        setattr(group, name, _without_recompute(getattr(group, name)))


def _without_recompute(function: Callable) -> Callable:
    """Return `function` without the recompute modes. All other modes stay: otherwise a rehearsal would gather FSDP's
    parameters with values and would not count them.
    """

    def run(*args: object, **kwargs: object) -> object:
        with _disable_current_modes() as modes, ExitStack() as other_modes:
            for mode in reversed(modes):  # the innermost comes first among them
                if not isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode)):
                    other_modes.enter_context(mode)
            return function(*args, **kwargs)

    return run


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def set_last_microbatch(model: nn.Module, is_last: bool, replicas: bool) -> None:
    """Let replicas exchange gradients once per step, not once per microbatch. Call it before each backward
    of a step.
    """
    if isinstance(model, FSDPModule) and replicas:
        model.set_requires_all_reduce(is_last)
