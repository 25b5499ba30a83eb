"""Which modules of a DeepSeek each parallelism takes hold of."""

from torchtitan.parallelisms.plan import ParallelPlan

PLAN = ParallelPlan(
    blocks="layers.*",
    embedding="tok_embeddings",
    head=("norm", "output"),
    gathered=("attention", "feed_forward"),
    column=("attention.wq", "attention.wkv_b", "feed_forward.w[13]"),
    row=("attention.wo", "feed_forward.w2"),
    replicated=("attention.w*_a", "attention.*_norm"),  # what is compressed is for all heads
    # whole on every rank: expert parallel splits experts, and what is shared is narrow
    sequence=("attention_norm", "ffn_norm", "moe.router.gate", "moe.experts", "moe.shared_experts.w*"),
    experts="moe.experts",
    # all layers dense, or none; no shared experts
    may_lack=("feed_forward", "feed_forward.w[13]", "feed_forward.w2", "moe.router.gate", "moe.experts")
    + ("moe.shared_experts.w*",),
)
