"""The one order in which a model is made parallel: activation checkpointing, compile, data parallel.

The model comes on the meta device and leaves with its parameters sharded but still without values.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.parallelisms.activation_checkpoint import apply_activation_checkpoint
from torchtitan.parallelisms.data_parallel import apply_data_parallel
from torchtitan.parallelisms.parallel_dims import ParallelDims
from torchtitan.parallelisms.plan import ParallelPlan, match


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """Everything but the mesh and the model. Defaults are those of a plain float32 run."""

    param_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    reshard_after_forward: bool = True
    prefetch: int = 0
    cpu_offload: bool = False
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
    model: nn.Module, mesh: DeviceMesh, dims: ParallelDims, plan: ParallelPlan, options: ParallelOptions
) -> None:
    """Apply `options` to `model` in place."""
    apply_activation_checkpoint(
        model,
        plan,
        options.recompute,
        options.selective_option,
        preserve_rng_state=options.preserve_rng_state,
        early_stop=options.early_stop,
    )
    apply_compile(model, plan, options)
    if uses_fully_shard(dims, options):
        apply_data_parallel(
            model,
            dims.dp_mesh(mesh),
            plan,
            param_dtype=options.param_dtype,
            reduce_dtype=options.reduce_dtype,
            reshard_after_forward=options.reshard_after_forward and dims.dp_shard > 1,
            prefetch=options.prefetch,
            cpu_offload=options.cpu_offload,
        )


def uses_fully_shard(dims: ParallelDims, options: ParallelOptions) -> bool:
    """One rank needs no wrapper (mixed precision is then autocast's), unless its parameters live on the host."""
    return dims.dp > 1 or options.cpu_offload


def apply_compile(model: nn.Module, plan: ParallelPlan, options: ParallelOptions) -> None:
    """Compile in place, which keeps parameter names. All blocks share one graph, so compile time is flat in depth."""
    # a process-wide setting of torch's; 1.0 is its default and keeps everything
    budget = options.memory_budget if options.recompute == "memory_budget" else 1.0
    torch._functorch.config.activation_memory_budget = budget
    if options.compile_model and options.compile_scope == "model":
        model.compile(backend=options.compile_backend)
        return
    if options.compile_model:
        for _, block in match(model, plan.blocks):
            block.compile(backend=options.compile_backend, fullgraph=True)
    if options.compile_loss and model.loss is not None:
        model.loss.compile(backend=options.compile_backend)
