"""Which modules of a Mistral each parallelism takes hold of."""

from torchtitan.parallelisms.plan import ParallelPlan

PLAN = ParallelPlan(
    blocks="layers.*",
    embedding="tok_embeddings",
    head=("norm", "output"),
    gathered=("attention", "feed_forward"),
    column=("attention.w[qkv]", "feed_forward.w[13]"),
    row=("attention.wo", "feed_forward.w2"),
    sequence=("attention_norm", "ffn_norm"),
)
