"""Which modules of a GPT-2, OPT or RoBERTa each parallelism takes hold of."""

from torchtitan.parallelisms.plan import ParallelPlan

PLAN = ParallelPlan(
    blocks="layers.*",
    embedding="tok_embeddings",
    with_embedding=("entrance",),
    head=("norm", "output"),
    gathered=("attention", "feed_forward"),
    column=("attention.w[qkv]", "feed_forward.w1"),
    row=("attention.wo", "feed_forward.w2"),
    sequence=("attention_norm", "ffn_norm"),
    indexed=("attention_dropout", "ffn_dropout"),
    may_lack=("attention_dropout", "ffn_dropout"),
)
