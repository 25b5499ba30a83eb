"""Which modules of a Qwen 3 without experts each parallelism takes hold of."""

from torchtitan.parallelisms.plan import ParallelPlan

PLAN = ParallelPlan(
    blocks="layers.*",
    embedding="tok_embeddings",
    head=("norm", "output"),
    gathered=("attention", "feed_forward"),
    column=("attention.w[qkv]", "feed_forward.w[13]"),
    row=("attention.wo", "feed_forward.w2"),
    replicated=("attention.[qk]_norm",),  # each rank norms its own heads
    sequence=("attention_norm", "ffn_norm"),
)
