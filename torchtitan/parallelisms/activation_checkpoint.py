"""Activation checkpointing (torch.utils.checkpoint): recompute full blocks, or selected operators, in backward."""

from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, create_selective_checkpoint_contexts

from torchtitan.parallelisms.pipeline.overlap.segments import Policy
from torchtitan.parallelisms.plan import ParallelPlan, match_blocks
from torchtitan.parallelisms.steps import same_notes

# Expensive to recompute: matrix products, attention kernels and collectives.
SAVED_OPS = {
    op.default
    for op in (
        torch.ops.aten.topk,  # a router's choice, which must not change in the recomputation
        torch.ops.aten._grouped_mm,
        torch.ops.aten.mm,
        torch.ops.aten.addmm,
        torch.ops.aten.bmm,
        torch.ops.aten._scaled_dot_product_flash_attention,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.aten._scaled_dot_product_efficient_attention,
        torch.ops.aten._scaled_dot_product_cudnn_attention,
        torch.ops._c10d_functional.reduce_scatter_tensor,
        torch.ops._c10d_functional.all_gather_into_tensor,
        torch.ops._c10d_functional.all_reduce,
        torch.ops._c10d_functional.all_to_all_single,
    )
} | {torch.ops.higher_order.flex_attention}

# Profiler markers compute nothing. FSDP adds one if a module inside a block is the first FSDP module to run, as in
# recomputation.
SAC_IGNORED_OPS |= {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}


def _keep_dear_ops(context, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def segment_policy(mode: str, selective_option: str, preserve_rng_state: bool) -> Policy:
    """Return the equivalent policy for parts that run by segments, which do not use torch's checkpoint."""
    if mode != "selective":
        return Policy(mode, preserve_rng_state=preserve_rng_state)
    if selective_option == "op":
        return Policy("selective", save_op=SAVED_OPS.__contains__, preserve_rng_state=preserve_rng_state)
    if selective_option == "1":
        return Policy("full_keep_comm", preserve_rng_state=preserve_rng_state)
    return Policy("selective", every=int(selective_option), preserve_rng_state=preserve_rng_state)


def apply_activation_checkpoint(
    model: nn.Module,
    plan: ParallelPlan,
    mode: str,
    selective_option: str = "2",
    preserve_rng_state: bool = True,
    early_stop: bool = False,
    same_sizes: bool = False,
) -> None:
    """Wrap the plan's blocks in place. Mode `memory_budget` wraps none, as the compiler implements it (parallelize).

    `same_sizes`: a recomputed block reuses the notes of its forward, such as the split sizes of expert parallel.
    """
    if mode in ("none", "memory_budget"):
        return
    wrap = partial(checkpoint_wrapper, preserve_rng_state=preserve_rng_state, early_stop=early_stop)
    every = 1
    if mode == "selective" and selective_option == "op":
        wrap = partial(wrap, context_fn=partial(create_selective_checkpoint_contexts, _keep_dear_ops))
    elif same_sizes:
        wrap = partial(wrap, context_fn=same_notes)
    if mode == "selective" and selective_option != "op":
        every = int(selective_option)
    for index, (name, block) in enumerate(match_blocks(model, plan)):
        if index % every == 0:
            parent, _, child = name.rpartition(".")
            model.get_submodule(parent).register_module(child, wrap(block))
