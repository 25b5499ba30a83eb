"""FSDP2, HSDP and DDP, all three by fully_shard: over [dp_shard], [dp_replicate, dp_shard] or [dp_replicate, 1].

Gradients are summed over ranks, never averaged: the loss is already divided by the global number of valid tokens.

Over replicas on a CPU gradients are summed while backward computes, without copies of gradients and parameters. On a
GPU FSDP2 issues the all-reduce of a unit's gradients on a second stream, next to backward. A CPU has no streams,
so with gloo the host would wait for each sum. Here it waits for all of them at the end of backward.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from torchtitan.parallelisms.degrees import splits_features
from torchtitan.parallelisms.plan import ParallelPlan, get_end_module, is_pipeline_part, match_blocks
from torchtitan.parallelisms.quantized_collectives import quantize_collectives
from torchtitan.torch_internals.dispatch import preserve_version_counter, tree_leaves
from torchtitan.torch_internals.fsdp import (
    DefaultReduceScatter,
    HSDPMeshInfo,
    Unit,
    alloc_storage,
    end_forward_with,
    fsdp_units,
    get_post_forward_mesh_info,
    in_pre_backward,
    local_shard,
    share_after_forward,
)
from torchtitan.torch_internals.recompute import without_selective_recompute
from torchtitan.torch_internals.replacement import replace


class DeferredGroup:
    """The replicas of an FSDP unit: its process group, with all-reduces that `wait` waits for.

    It equals the group, because torch looks up the group of an all-reduce that fails, and would raise another error.
    """

    def __init__(self, unit: Any) -> None:
        self.unit, self.group = unit, unit.mesh_info.replicate_process_group
        self.pending: list[dist.Work] = []

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.group

    def __hash__(self) -> int:
        return hash(self.group)

    def size(self) -> int:
        """Return 1: FSDP divides gradients by it if no factor is set."""
        return 1

    def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions) -> dist.Work | None:
        """Start the sum of tensors of any shape. Return it if its result is read at once.

        That is by a cast, by a hook, or by the addition to the gradient of an earlier step.
        """
        options.asyncOp = True
        work = self.group.allreduce(tensors, options)
        parameters = [parameter.sharded_param for parameter in self.unit.fsdp_params]
        awaited = any(p.grad is not None or p._post_accumulate_grad_hooks for p in parameters)
        if awaited or tensors[0].dtype != self.unit._orig_dtype:
            return work
        self.pending.append(work)
        return None

    def wait(self) -> None:
        for work in self.pending:
            work.wait()
        self.pending.clear()


class SingleBuffer(DefaultReduceScatter):
    """The reduction over one shard, which copies its input: to itself, if both buffers are the same tensor."""

    def __init__(self) -> None:
        self.input: torch.Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a new buffer, flat [size], for the input, and the same one for the output that is asked for next."""
        buffer, self.input = self.input, None
        if buffer is None:
            buffer = self.input = super().allocate(size, dtype=dtype, device=device)
        return buffer


class ExchangeAndSum(DefaultReduceScatter):
    """The reduction over shards on gloo: an all-to-all, and the sum on the rank that keeps it, in rank order.

    gloo sums all parts on all ranks. For 64 MB of two ranks it takes 86 ms of CPU time, and this 26 (torch 2.13).
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill `output_tensor`, flat [N], with this rank's part of the sum of `input_tensor`, flat [ranks x N]."""
        assert op == dist.ReduceOp.SUM, "others divide or scale what they sum"
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        first, second, *later = received.view(group.size(), -1)
        torch.add(first, second, out=output_tensor)
        for part in later:
            output_tensor += part
        return None


def _unshard(unit: Any) -> None:
    """Make the parameters of a unit with one shard ready for computation, in place of FSDP's `wait_for_unshard`.

    FSDP copies the shard, which is the full parameter, in each forward. Here a parameter of the shard's type shares its
    storage, and another type is cast to without a temporary copy.
    """
    if unit._all_gather_result is None:
        return
    unit._all_gather_result = None
    for parameter in unit.fsdp_params:
        shard = local_shard(parameter)
        if parameter.param_dtype is not None or shard.storage_offset():  # FSDP views a storage from its start
            if parameter.__dict__.pop("shared_storage", None) is not None:
                parameter.__dict__.pop("_unsharded_param", None)
            dtype = parameter.param_dtype or shard.dtype
            parameter.init_all_gather_outputs([shard.numel()], [dtype], 1, unit.device)
            (output,) = parameter.all_gather_outputs
            alloc_storage(output)
            with preserve_version_counter(output):  # as FSDP does
                output.copy_(shard)
            parameter.init_unsharded_param()
        elif getattr(parameter, "shared_storage", None) is not shard:  # FSDP replaces it if the parameter's moves
            parameter.__dict__.pop("_unsharded_param", None)
            parameter.all_gather_outputs = [shard]
            parameter.init_unsharded_param()
            parameter.all_gather_outputs = []  # which FSDP frees
            parameter.shared_storage = shard
    unit._to_unsharded()


def adapt_to_gloo(module: FSDPModule) -> None:
    """Let the sums over replicas of one FSDP unit end with backward, and its only shard be used in place, on a CPU.
    Over several shards they are by ExchangeAndSum.

    A gradient is a view of its sum, and further microbatches are added before the sum, so nothing reads it earlier.
    """
    for unit in fsdp_units(module):
        info = unit.mesh_info
        if unit.device.type != "cpu":
            continue
        if info.shard_mesh_size == 1:
            replace(unit, "wait_for_unshard", partial(_unshard, unit))
        else:
            module.set_custom_reduce_scatter(ExchangeAndSum())
        if not isinstance(info, HSDPMeshInfo):
            continue
        if info.shard_mesh_size == 1:
            replace(unit, "gradient_divide_factor", None)  # torch would divide by 1 into a copy
            module.set_custom_reduce_scatter(SingleBuffer())
        if not isinstance(info.replicate_process_group, DeferredGroup):  # set by another module of the unit
            replicas = DeferredGroup(unit)
            replace(info, "replicate_process_group", replicas)
            replace(unit, "finalize_backward", _chain(unit.finalize_backward, replicas.wait))


def _chain(*functions: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for function in functions:
            function()

    return run


def apply_data_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: ParallelPlan,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool | int = True,
    prefetch: int = 0,
    cpu_offload: bool = False,
    gather_int8: bool = False,
    reduce_bits: int = 0,
    for_gloo: bool = True,  # on a CPU; False for an estimate of a GPU's memory on a CPU mesh
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Apply fully_shard in place. FSDP units: each block, last norm and head together, and the root with the rest.

    Experts under expert parallel are further units, sharded over the remaining ranks (`expert_mesh`). `prefetch`: the
    number of blocks to prefetch, with their experts. It is at least 1 if there are such experts, as FSDP's implicit
    prefetch cannot run ahead of the host, which waits for the split sizes in each block.

    `reshard_after_forward`: True, False, or the number of neighboring ranks of `mesh` that share a second copy of a
    block's parameters, from which backward gathers them (hpZ of ZeRO++, arXiv 2306.10209, section 3.2). The head stays
    gathered between forward and backward, because backward needs its parameters first. `gather_int8`, `reduce_bits`:
    quantize gathers and reductions (quantized_collectives), the latter in two hops with a second copy.
    """
    # pinned memory needs an accelerator; without one, torch raises on the default
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy()
    # do not cast inputs: blocks need rotary angles in float32, and activations already have the compute dtype
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    second_shards = 1 if isinstance(reshard_after_forward, bool) else reshard_after_forward
    blocks = [block for _, block in match_blocks(model, plan)]
    travelling = [experts for _, experts in match_blocks(model, plan, plan.experts)] if expert_mesh is not None else []
    shard, reshards = partial(fully_shard, mp_policy=precision, offload_policy=offload), bool(reshard_after_forward)
    for experts in travelling:
        _shard_travelling(experts, shard, expert_mesh, reshards)
    of_stacks = partial(_shard_few_experts, mesh.size(mesh.ndim - 1)) if second_shards == 1 else None
    for block in blocks:
        shard(block, mesh=mesh, reshard_after_forward=reshards, shard_placement_fn=of_stacks)
    if second_shards > 1:
        _share_second_shards(blocks, second_shards)
    _prefetch_only_blocks_that_backward_reaches(model, [*blocks, *travelling])
    if head := _head(model, plan):
        shard(head, mesh=mesh, reshard_after_forward=False)
        end_forward_with(head[0], model.loss or head[-1])  # the loss calls the output matrix once per chunk
    shard(model, mesh=mesh, reshard_after_forward=False)
    for module in fsdp_modules(model):
        if (expert_mesh if module in travelling else mesh).size() > 1:  # on one rank torch would make a divided copy
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # a divide factor would need PREMUL_SUM, which gloo lacks
        if for_gloo:
            adapt_to_gloo(module)
    quantize_collectives(fsdp_modules(model), mesh, second_shards, gather_int8, reduce_bits)
    if prefetch := max(prefetch, 1) if travelling and reshard_after_forward else prefetch:
        _set_prefetch(blocks, head[:1], prefetch, set(travelling))


def _shard_travelling(experts: nn.Module, shard: Callable, mesh: DeviceMesh, reshards: bool) -> None:
    """Make experts under expert parallel a unit of FSDP over the ranks of `mesh`."""
    placement = partial(_shard_experts, mesh.size(mesh.ndim - 1))
    shard(experts, mesh=mesh, reshard_after_forward=reshards and mesh.size() > 1, shard_placement_fn=placement)
    _hide_from_selective_recompute(experts)


def _head(model: nn.Module, plan: ParallelPlan) -> list[nn.Module]:
    """Return the last norm and the head, for a separate FSDP unit.

    Their gradients are then reduced during the backward of the blocks. In the root's unit the reduction would come at
    the end of the step, with nothing to overlap. The result is empty with tied embeddings, as one matrix cannot be in
    two units, and for a pipeline part, which reduces all its gradients at once anyway.
    """
    if is_pipeline_part(model, plan):
        return []
    head = [get_end_module(model, name) for name in plan.head]
    tied = set(get_end_module(model, plan.embedding).parameters())
    return [] if any(parameter in tied for module in head for parameter in module.parameters()) else head


def _share_second_shards(blocks: list[nn.Module], size: int) -> None:
    """Let `size` neighboring ranks share a second copy of each block's parameters between forward and backward.

    Given a number, fully_shard creates process groups for each block; here all blocks use the same.
    """
    units = [unit for block in blocks for unit in fsdp_units(block)]
    second_mesh = get_post_forward_mesh_info(size, units[0].mesh_info)
    for unit in units:
        share_after_forward(unit, second_mesh)


def _set_prefetch(blocks: list[nn.Module], head: list[nn.Module], prefetch: int, travelling: set[nn.Module]) -> None:
    """Set the FSDP units that each block prefetches. `head`: the first module of the head's unit, if that exists."""

    def units(near: list[nn.Module]) -> list[nn.Module]:
        return [unit for block in near for unit in (block, *(m for m in block.modules() if m in travelling))]

    last = next((block for block in reversed(blocks) if not _is_training_only(block)), None)
    for index, block in enumerate(blocks):
        prefetched = blocks[index + 1 : index + 1 + prefetch]
        if not _is_training_only(block):  # evaluation would gather such a block but neither run nor reshard it
            prefetched = [candidate for candidate in prefetched if not _is_training_only(candidate)]
        block.set_modules_to_forward_prefetch([*units(prefetched), *(head if block is last else ())])
        block.set_modules_to_backward_prefetch(units(blocks[max(0, index - prefetch) : index][::-1]))
    for module in head:
        module.set_modules_to_backward_prefetch(units(blocks[-prefetch:][::-1]))


def _prefetch_only_blocks_that_backward_reaches(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Let backward prefetch a block of a partly frozen model only if its last output required a gradient.

    Prefetches follow the order of the forward. Frozen blocks below everything that is trained, which backward never
    reaches, would be gathered for nothing.
    """
    if any(not parameter.requires_grad for parameter in model.parameters()):
        for unit in (unit for block in blocks for unit in fsdp_units(block)):
            _skip_prefetch_unless_reached(unit)


def _skip_prefetch_unless_reached(unit: Unit) -> None:
    reached = True

    def leave(module: nn.Module, input: object, output: object) -> object:
        nonlocal reached
        reached = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(output))
        return post_forward(module, input, output)

    def enter_backward(default_prefetch: bool, *unused: object) -> None:
        nonlocal reached
        reached = True  # also after a later forward without gradients
        pre_backward(default_prefetch, *unused)

    def unshard_if_reached(async_op: bool = False) -> None:
        if reached or not in_pre_backward(unit):
            unshard(async_op)

    post_forward = replace(unit, "post_forward", leave)
    pre_backward = replace(unit, "pre_backward", enter_backward)
    unshard = replace(unit, "unshard", unshard_if_reached)


def _is_training_only(block: nn.Module) -> bool:
    """Return True if evaluation skips the block, as its class declares."""
    return getattr(block, "in_training_only", False)


def _shard_experts(shards: int, parameter: nn.Parameter) -> Shard:
    """Return the placement of experts: shard a dimension divisible by `shards`, the first one if possible.

    The first dimension counts experts, so ranks get full experts if these divide, and otherwise a part of every expert.
    The parts that a quantized matrix consists of are alike but for the last dimension, which is not sharded.
    """
    shape = _local_shape(parameter)
    shape = shape if parameter.is_floating_point() else shape[:-1]
    return Shard(next((dim for dim, size in enumerate(shape) if size % shards == 0), 0))


def _shard_few_experts(shards: int, parameter: nn.Parameter) -> Shard | None:
    """Return the placement of a stack of experts that would be padded; None, FSDP's own, for other parameters.

    With fewer experts than shards, each shard would be padded to one expert, and a gather take `shards` of them. Second
    shards have to be along the first dimension.
    """
    shape = _local_shape(parameter)
    return _shard_experts(shards, parameter) if len(shape) > 2 and splits_features(shape[0], shards) else None


def _local_shape(parameter: nn.Parameter) -> torch.Size:
    return parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape


def _hide_from_selective_recompute(module: FSDPModule) -> None:
    """Hide FSDP's operators for a module inside a block from selective recompute.

    Selective recompute expects the same operators in the recomputation as in the forward, but FSDP may gather the
    module's parameters in only one of the two.
    """
    for unit in fsdp_units(module):
        for name in ("pre_forward", "post_forward"):
            replace(unit, name, without_selective_recompute(getattr(unit, name)))


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def set_last_microbatch(model: nn.Module, is_last: bool, replicas: bool) -> None:
    """Let HSDP replicas all-reduce gradients once per step, in the last microbatch. Call it before each backward."""
    if isinstance(model, FSDPModule) and replicas:
        model.set_requires_all_reduce(is_last)
