"""Apply all parallelisms but the pipeline, in this order: expert, tensor, context, recompute, compile, data parallel.

The model (or pipeline part) is on the meta device; its parameters become sharded and stay without storage. Recompute
(activation checkpointing) wraps tensor-parallel modules, so that it repeats or saves their collectives. Compile
follows, so that the compiler sees both. FSDP comes last and shards the local shards again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchtitan.parallelisms.capped_attention import capped_attention
from torchtitan.parallelisms.context_parallel import apply_context_parallel
from torchtitan.parallelisms.data_parallel import apply_data_parallel
from torchtitan.parallelisms.degrees import ParallelDims
from torchtitan.parallelisms.expert_parallel import apply_expert_parallel
from torchtitan.parallelisms.fsdp_messages import may_gather_float8
from torchtitan.parallelisms.pipeline.overlap.segments import RecomputePolicy
from torchtitan.parallelisms.plan import ParallelPlan, match_blocks
from torchtitan.parallelisms.region_attention import attend_by_regions
from torchtitan.parallelisms.steps import same_notes
from torchtitan.parallelisms.tensor_parallel import apply_tensor_parallel, enable_async_tensor_parallel
from torchtitan.torch_internals import collectives, dispatch
from torchtitan.torch_internals.compiler import (
    allow_side_effects_in_recomputation,
    set_memory_budget,
    wrap_compiled_call,
)
from torchtitan.torch_internals.recompute import checkpoint_wrapper, ignore_profiler_markers, operator_of, unwrapped


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """The options of `parallelize`. The defaults describe a plain float32 run."""

    param_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    reshard_after_forward: bool | int = True
    prefetch: int = 0
    cpu_offload: bool = False
    gather_int8: bool = False
    reduce_bits: int = 0
    for_gloo: bool = True  # False: a CPU takes a GPU's place in an estimate
    sequence_parallel: bool = True
    loss_parallel: bool = True
    async_tp: bool = False
    cp_method: str = "allgather"
    cp_load_balance: bool = True
    overlap: bool = False  # overlap the all-to-alls of expert parallel, in a pipeline
    recompute: str = "none"
    selective_option: str = "2"
    memory_budget: float = 1.0
    preserve_rng_state: bool = True
    early_stop: bool = False
    compile_model: bool = False
    compile_loss: bool = False
    compile_scope: str = "block"
    compile_backend: str = "inductor"

    @property
    def gathers_float8(self) -> bool:
        return may_gather_float8(self.reshard_after_forward, self.cpu_offload, self.gather_int8)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    dims: ParallelDims,
    plan: ParallelPlan,
    options: ParallelOptions,
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Apply `options` in place to `model`, full or a pipeline part. `expert_mesh`: given with expert parallel."""
    if expert_mesh is not None:
        apply_expert_parallel(model, expert_mesh["ep"], plan)
    if dims.tp > 1:
        if options.async_tp:
            enable_async_tensor_parallel(mesh["tp"], options.compile_model, options.sequence_parallel)
        apply_tensor_parallel(
            model,
            mesh["tp"],
            plan,
            sequence_parallel=options.sequence_parallel,
            loss_parallel=options.loss_parallel,
        )
    if dims.cp > 1:
        apply_context_parallel(model, mesh["cp"], options.cp_method, options.cp_load_balance)
    apply_activation_checkpoint(
        model,
        plan,
        options.recompute,
        options.selective_option,
        preserve_rng_state=options.preserve_rng_state,
        early_stop=options.early_stop,
        reuse_routing=expert_mesh is not None,
    )
    apply_compile(model, plan, options, tensor_parallel=dims.tp > 1, experts_travel=expert_mesh is not None)
    if uses_fully_shard(model, dims, options):
        apply_data_parallel(
            model,
            dims.dp_mesh(mesh),
            plan,
            param_dtype=options.param_dtype,
            reduce_dtype=options.reduce_dtype,
            reshard_after_forward=dims.fsdp > 1 and options.reshard_after_forward,
            prefetch=options.prefetch,
            cpu_offload=options.cpu_offload,
            gather_int8=options.gather_int8,
            reduce_bits=options.reduce_bits,
            for_gloo=options.for_gloo,
            expert_mesh=None if expert_mesh is None else dims.expert_dp_mesh(expert_mesh),
        )


def needs_casts(model: nn.Module, dtype: torch.dtype) -> bool:
    """Return True if a parameter has another dtype than this compute dtype, except for weights packed into integers."""
    return any(parameter.is_floating_point() and parameter.dtype != dtype for parameter in model.parameters())


def uses_fully_shard(model: nn.Module, dims: ParallelDims, options: ParallelOptions) -> bool:
    """Return True if fully_shard is needed for a model, full or a pipeline part.

    Reasons: gradients to sum over dp, cp or replicas of experts; CPU offload; or, on several ranks, parameters of
    another dtype than the compute dtype. (A single rank uses autocast for this; a pipeline cannot.)
    """
    mixed = dims.world_size > 1 and needs_casts(model, options.param_dtype)
    several_copies_of_experts = 1 < dims.ep < dims.expert_pool_size
    return dims.dp * dims.cp > 1 or several_copies_of_experts or options.cpu_offload or mixed


# Activation checkpointing (torch.utils.checkpoint)

# Expensive to recompute: matrix products, attention kernels and collectives.
SAVED_OPS = {
    op.default
    for op in (
        torch.ops.aten.topk,  # a router's choice, which must not change in the recomputation
        dispatch.grouped_mm,
        torch.ops.aten.mm,
        torch.ops.aten.addmm,
        torch.ops.aten.bmm,
        dispatch.scaled_mm_operator,
        dispatch.flash_attention,
        dispatch.attention_for_cpu,
        dispatch.efficient_attention,
        dispatch.cudnn_attention,
        collectives.reduce_scatter_tensor,
        collectives.all_gather_into_tensor,
        collectives.all_reduce,
        collectives.all_to_all_single,
    )
} | {operator_of(attend_by_regions), operator_of(capped_attention), torch.ops.higher_order.flex_attention}


def _save_expensive_ops(context, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_policy(mode: str, selective_option: str, preserve_rng_state: bool) -> RecomputePolicy:
    """Return the equivalent policy for parts that run by segments, which do not use torch's checkpoint."""
    if mode != "selective":
        return RecomputePolicy(mode, preserve_rng_state=preserve_rng_state)
    if selective_option == "op":
        ignore_profiler_markers()
        return RecomputePolicy("selective", save_op=SAVED_OPS.__contains__, preserve_rng_state=preserve_rng_state)
    if selective_option == "1":
        return RecomputePolicy("full_keep_comm", preserve_rng_state=preserve_rng_state)
    return RecomputePolicy("selective", every=int(selective_option), preserve_rng_state=preserve_rng_state)


def apply_activation_checkpoint(
    model: nn.Module,
    plan: ParallelPlan,
    mode: str,
    selective_option: str = "2",
    preserve_rng_state: bool = True,
    early_stop: bool = False,
    reuse_routing: bool = False,
) -> None:
    """Wrap the plan's blocks in place. Mode `memory_budget` wraps none, as the compiler implements it (parallelize).

    `reuse_routing`: a recomputed block reuses the notes of its forward: the choice of experts and the split sizes.
    """
    if mode in ("none", "memory_budget"):
        return
    assert mode in ("selective", "full", "full_keep_comm"), mode  # a new one says here what it wraps
    wrap = partial(checkpoint_wrapper, preserve_rng_state=preserve_rng_state, early_stop=early_stop)
    every = 1
    if mode == "selective" and selective_option == "op":
        ignore_profiler_markers()
        wrap = partial(wrap, context_fn=partial(create_selective_checkpoint_contexts, _save_expensive_ops))
    elif reuse_routing:
        wrap = partial(wrap, context_fn=same_notes)
    if mode == "selective" and selective_option != "op":
        every = int(selective_option)
    for index, (name, block) in enumerate(match_blocks(model, plan)):
        if index % every == 0:
            parent, _, child = name.rpartition(".")
            model.get_submodule(parent).register_module(child, wrap(block))


# Compile


def apply_compile(
    model: nn.Module, plan: ParallelPlan, options: ParallelOptions, tensor_parallel: bool, experts_travel: bool = False
) -> None:
    """Compile in place, which keeps parameter names.

    All blocks share one graph, so compile time does not grow with depth. With `experts_travel` (expert parallel), the
    host needs the split sizes in the middle of a block. So only the block's submodules are compiled; the code between
    them, with the recompute wrapper, is not.

    The recompute wrapper is compiled together with its block, except with full-block recompute under tensor parallel.
    There the compiler confuses a random state (attention may have dropout) with the DTensors' mesh among the tensors
    saved for backward (torch 2.13: "expected all tensors_saved_with_vc_check to be Tensors"). So the wrapper stays
    outside.
    """
    # a process-wide setting of torch; the default 1.0 recomputes nothing
    budget = options.memory_budget if options.recompute == "memory_budget" else 1.0
    set_memory_budget(budget)
    # otherwise the compiler rejects a compiled recompute with side effects; steps.running() has one, which it reverts
    # before the step ends
    allow_side_effects_in_recomputation()
    if options.compile_model and options.compile_scope == "model":
        model.compile(backend=options.compile_backend)
        return
    if options.compile_model:
        outside = tensor_parallel and not (options.recompute == "selective" and options.selective_option == "op")
        travelling = {experts for _, experts in match_blocks(model, plan, plan.experts)} if experts_travel else set()
        for _, block in match_blocks(model, plan):
            if outside or experts_travel:
                block = unwrapped(block)
            for part in _compiled_parts(block, travelling):
                part.compile(backend=options.compile_backend, fullgraph=True)
                wrap_compiled_call(part, _reject_async_inputs)
    if options.compile_loss and model.loss is not None:
        model.loss.compile(backend=options.compile_backend)


def _compiled_parts(module: nn.Module, travelling: set[nn.Module]) -> list[nn.Module]:
    """Return the modules to compile: `module` itself or, if it contains `travelling` experts, its largest submodules
    without them (attention, shared experts).

    Of the experts themselves, it returns the children (the activation between their matrix products). It omits modules
    without children, such as norms, which are a single kernel anyway, and classes with `compiled_apart` = False.
    """
    if module in travelling:
        return list(module.children())
    if travelling.isdisjoint(module.modules()):
        return [module]
    children = [
        submodule
        for submodule in module.children()
        if list(submodule.children()) and getattr(submodule, "compiled_apart", True)
    ]
    return [part for child in children for part in _compiled_parts(child, travelling)]


def _reject_async_inputs(compiled: Callable) -> Callable:
    """Wrap a compiled block so that it raises if an input is an AsyncCollectiveTensor.

    The compiled block would wait for it but drop its requires_grad, so the input would get no gradient
    (pytorch #179849). The module that produces the input has to wait instead.
    """

    def call(*args: object, **kwargs: object) -> object:
        inputs = (*args, *kwargs.values())
        unfinished = [value for value in inputs if isinstance(value, collectives.AsyncCollectiveTensor)]
        if unfinished:
            raise RuntimeError(
                "a compiled block was handed an AsyncCollectiveTensor and would give it no gradient; "
                "redistribute synchronously (async_op=False) what makes the block's input"
            )
        return compiled(*args, **kwargs)

    return call
