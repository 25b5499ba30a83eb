"""The one order in which a model is made parallel: expert, tensor, context, recompute, compile, data parallel.

The model, or a pipeline part of it, comes on the meta device and leaves with its parameters sharded but still without
values. Recompute wraps what is already tensor parallel, so that it repeats (or keeps) the collectives too; the compiler
sees both; FSDP comes last, because its parameters are then those shards.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch._functorch.config
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.parallelisms.activation_checkpoint import apply_activation_checkpoint
from torchtitan.parallelisms.context.context_parallel import apply_context_parallel
from torchtitan.parallelisms.data_parallel import apply_data_parallel
from torchtitan.parallelisms.expert_parallel import apply_expert_parallel
from torchtitan.parallelisms.parallel_dims import ParallelDims
from torchtitan.parallelisms.plan import ParallelPlan, match_blocks
from torchtitan.parallelisms.tensor_parallel import apply_tensor_parallel, enable_async_tensor_parallel


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """Everything but the mesh and the model. Defaults are those of a plain float32 run."""

    param_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    reshard_after_forward: bool = True
    prefetch: int = 0
    cpu_offload: bool = False
    sequence_parallel: bool = True
    loss_parallel: bool = True
    async_tp: bool = False
    cp_method: str = "allgather"
    cp_load_balance: bool = True
    overlap: bool = False  # of expert parallelism's all-to-alls, in a pipeline
    recompute: str = "none"
    selective_option: str = "2"
    memory_budget: float = 1.0
    preserve_rng_state: bool = True
    early_stop: bool = False
    compile_model: bool = False
    compile_loss: bool = False
    compile_scope: str = "block"
    compile_backend: str = "inductor"


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    dims: ParallelDims,
    plan: ParallelPlan,
    options: ParallelOptions,
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Apply `options` to `model`, whole or a pipeline part, in place. `expert_mesh`: of dims, with expert parallel."""
    dtype = dtype_of(model)
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
        same_sizes=expert_mesh is not None,
    )
    apply_compile(model, plan, options, tensor_parallel=dims.tp > 1, experts_travel=expert_mesh is not None)
    if uses_fully_shard(dims, options, dtype):
        apply_data_parallel(
            model,
            dims.dp_mesh(mesh),
            plan,
            param_dtype=options.param_dtype,
            reduce_dtype=options.reduce_dtype,
            reshard_after_forward=options.reshard_after_forward and dims.fsdp > 1,
            prefetch=options.prefetch,
            cpu_offload=options.cpu_offload,
            expert_mesh=None if expert_mesh is None else dims.expert_dp_mesh(expert_mesh),
        )


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's parameters. Weights packed into integers do not count."""
    return next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())


def uses_fully_shard(dims: ParallelDims, options: ParallelOptions, dtype: torch.dtype = torch.float32) -> bool:
    """Return True if fully_shard is needed: for gradients to sum over data, sequence or copies of experts, parameters
    on the host, or, on several ranks, parameters of a `dtype` other than the compute dtype. (One rank has autocast for
    that, which a pipeline could not use.)
    """
    mixed = dims.world_size > 1 and options.param_dtype != dtype
    several_copies_of_experts = 1 < dims.ep < dims.lenders
    return dims.dp * dims.cp > 1 or several_copies_of_experts or options.cpu_offload or mixed


def apply_compile(
    model: nn.Module, plan: ParallelPlan, options: ParallelOptions, tensor_parallel: bool, experts_travel: bool = False
) -> None:
    """Compile in place, which keeps parameter names. All blocks share one graph, so compile time is flat in depth.
    Where `experts_travel` the host has to know how many tokens go where, in the middle of the block: so its parts are
    compiled, and what runs between them, recompute among it, is not.

    The compiler plans recompute itself, except for whole blocks under tensor parallel: there it puts a random state
    (attention may have dropout) behind the DTensors' mesh among what backward needs, and takes one for the other (torch
    2.13: "expected all tensors_saved_with_vc_check to be Tensors"). So then the recompute is outside what is compiled.
    """
    # a process-wide setting of torch's; 1.0 is its default and keeps everything
    budget = options.memory_budget if options.recompute == "memory_budget" else 1.0
    torch._functorch.config.activation_memory_budget = budget
    # the compiler else refuses a recompute inside what it compiles that sets anything outside, as steps.running() does,
    # which puts it back before the step ends
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    if options.compile_model and options.compile_scope == "model":
        model.compile(backend=options.compile_backend)
        return
    if options.compile_model:
        outside = tensor_parallel and not (options.recompute == "selective" and options.selective_option == "op")
        travelling = {experts for _, experts in match_blocks(model, plan, plan.experts)} if experts_travel else set()
        for _, block in match_blocks(model, plan):
            if (outside or experts_travel) and isinstance(block, CheckpointWrapper):
                block = block._checkpoint_wrapped_module
            for part in _compiled_parts(block, travelling):
                part.compile(backend=options.compile_backend, fullgraph=True)
                part._compiled_call_impl = _refuse_unfinished(part._compiled_call_impl)
    if options.compile_loss and model.loss is not None:
        model.loss.compile(backend=options.compile_backend)


def _compiled_parts(module: nn.Module, travelling: set[nn.Module]) -> list[nn.Module]:
    """The module, or where it holds experts whose tokens travel, its largest parts that do not: attention, shared
    experts. Of the experts what stands between their products; no lone norm, which is one kernel as it is, and nothing
    whose class says that it is not `compiled_apart`.
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


def _refuse_unfinished(compiled: Callable) -> Callable:
    """A compiled block that is handed a tensor still on its way waits for it and forgets that it requires a gradient:
    none comes back (pytorch #179849). So whoever makes the block's input has to wait for it.
    """

    def call(*args: object, **kwargs: object) -> object:
        unfinished = [value for value in (*args, *kwargs.values()) if isinstance(value, AsyncCollectiveTensor)]
        if unfinished:
            raise RuntimeError(
                "a compiled block was handed an AsyncCollectiveTensor and would give it no gradient; "
                "redistribute synchronously (async_op=False) what makes the block's input"
            )
        return compiled(*args, **kwargs)

    return call
