"""Bytes and kernels of a block's operations that are bound by memory, in forward. Imports no torch.

They are a third of those of forward and backward without compilation, as products are. tests/planner/test_fake_cuda.py
compares them with whole steps. Attention, a norm and the backward of silu are a kernel each.
"""

from typing import NamedTuple

from torchtitan.models.moe import BIASES
from torchtitan.models.sizes import POST_NORMS, QK_NORMS, STACK, split_side
from torchtitan.planner.plan import Plan, Workload

DENSE_KERNELS, LATENT_KERNELS, EXPERT_KERNELS = 15, 8, 26
"""A third of the kernels of a block; the same that latent attention adds, and that experts in place of a dense
feed-forward do: choice, order, exchange of rows and weighted sum."""
FLOAT8_READ = 10
"""Bytes moved for each value of an input or a weight in float8. It is rounded for two products, and each time read for
its largest magnitude, read again and written."""
FLOAT8_GRAD, FLOAT8_GRAD_ROWS = 7, 10
"""The same of an output's gradient: rounded once and then transposed, or twice, by rows and by columns."""
FLOAT8_KERNELS = 11
"""Kernels that round the factors of a linear's three products."""


class MemoryBound(NamedTuple):
    """Operations that are bound by memory."""

    size: float
    """Bytes that they read and write."""
    kernels: float = 1.0


def elementwise(workload: Workload, plan: Plan, kind: int, tokens: float, local_tokens: float) -> MemoryBound:
    """Return the norms, residuals, rotations, gates and, with experts, movements of rows of a block.

    `tokens`: inside regions of tensor parallel; `local_tokens`: outside.
    """
    args, sizes = workload.args, workload.kinds[kind]
    other_names = args.block_others(workload.kind_of_layer.index(kind))
    is_latent = hasattr(args, "kv_lora_rank")
    has_dropout = getattr(args, "residual_dropout", 0) or getattr(args, "dropout", 0)
    heads = (args.n_heads + getattr(args, "num_kv_heads", args.n_heads)) / plan.tp
    head_dim = getattr(args, "head_dim", 0) or args.qk_head_dim
    of_head = 5 if is_latent else 8 + 2 * (QK_NORMS[0] in other_names)  # a part of latent ones is rotated
    # both dropouts read and write in forward and in backward
    of_width = 10 + 2 * len({*POST_NORMS} & {*other_names}) + 8 / 3 * bool(has_dropout)
    values = of_width * args.dim * local_tokens + of_head * heads * head_dim * tokens
    kernels = DENSE_KERNELS + LATENT_KERNELS * is_latent
    if STACK not in sizes:
        width = sizes.get("feed_forward.w1", (4 * args.dim, 0))[0] / plan.tp
        values += (5 if "feed_forward.w3" in sizes else 2) * width * tokens
        return MemoryBound(workload.compute_bytes * values, kernels)
    rows, biases = local_tokens * args.top_k, 2 * (BIASES[1] in other_names)
    gate = (17 if args.swiglu_limit else 5) + 2 * biases
    values += rows * ((8 + biases) * args.dim + gate * args.expert_dim)
    shared = args.n_shared_experts * args.expert_dim
    values += local_tokens * (2 * args.dim + 5 * shared)  # the router reads in float32
    return MemoryBound(workload.compute_bytes * values, kernels + EXPERT_KERNELS)


def rounded(workload: Workload, plan: Plan, kind: int, tokens: float, local_tokens: float) -> MemoryBound:
    """Return the rounding of the factors of a block's products to float8."""
    size = linears = 0.0
    of_gradient = FLOAT8_GRAD_ROWS if workload.rounds_rows else FLOAT8_GRAD
    for name, share in workload.float8_shares[kind].items():
        outputs, inputs = workload.kinds[kind][name]
        side = split_side(name)
        n, k = outputs / (plan.tp if side == 0 else 1), inputs / (plan.tp if side == 1 else 1)
        rows = local_tokens if side is None else tokens
        size += share * (rows * (of_gradient * n + FLOAT8_READ * k) + FLOAT8_READ * n * k)
        linears += share
    return MemoryBound(size / 3, FLOAT8_KERNELS / 3 * linears)
