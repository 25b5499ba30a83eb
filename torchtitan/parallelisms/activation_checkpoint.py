"""Activation checkpointing: which blocks, or which operators, are computed again in backward instead of kept."""

from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchtitan.parallelisms.plan import ParallelPlan, match

# Dear to recompute: matrix products, attention kernels, and anything that would communicate a second time.
SAVED_OPS = {
    op.default
    for op in (
        torch.ops.aten.mm,
        torch.ops.aten.addmm,
        torch.ops.aten.bmm,
        torch.ops.aten._scaled_dot_product_flash_attention,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.aten._scaled_dot_product_efficient_attention,
        torch.ops.aten._scaled_dot_product_cudnn_attention,
        torch.ops._c10d_functional.reduce_scatter_tensor,
        torch.ops._c10d_functional.all_gather_into_tensor,
        torch.ops._c10d_functional.all_to_all_single,
    )
} | {torch.ops.higher_order.flex_attention}


def _keep_dear_ops(context, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def apply_activation_checkpoint(
    model: nn.Module,
    plan: ParallelPlan,
    mode: str,
    selective_option: str = "2",
    preserve_rng_state: bool = True,
    early_stop: bool = False,
) -> None:
    """Wrap the plan's blocks in place. `memory_budget` is the compiler's business (see parallelize) and wraps none."""
    if mode in ("none", "memory_budget"):
        return
    wrap = partial(checkpoint_wrapper, preserve_rng_state=preserve_rng_state, early_stop=early_stop)
    every = 1
    if mode == "selective" and selective_option == "op":
        wrap = partial(wrap, context_fn=partial(create_selective_checkpoint_contexts, _keep_dear_ops))
    elif mode == "selective":
        every = int(selective_option)
    for index, (name, block) in enumerate(match(model, plan.blocks)):
        if index % every == 0:
            parent, _, child = name.rpartition(".")
            model.get_submodule(parent).register_module(child, wrap(block))
