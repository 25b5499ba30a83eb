"""Which modules of a Qwen 3 with experts each parallelism takes hold of."""

from torchtitan.parallelisms.plan import ParallelPlan

PLAN = ParallelPlan(
    blocks="layers.*",
    embedding="tok_embeddings",
    head=("norm", "output"),
    gathered=("attention",),
    column=("attention.w[qkv]",),
    row=("attention.wo",),
    replicated=("attention.[qk]_norm",),  # each rank norms its own heads
    # whole on every rank: expert parallel splits experts, and what is shared is narrow
    sequence=("attention_norm", "ffn_norm", "moe.router.gate", "moe.experts", "moe.shared_experts.w*"),
    experts="moe.experts",
    may_lack=("moe.shared_experts.w*",),  # the published sizes have none
)
