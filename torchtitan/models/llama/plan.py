"""Which modules of a Llama each parallelism takes hold of."""

from torchtitan.parallelisms.plan import ParallelPlan

PLAN = ParallelPlan(blocks="layers.*", embedding="tok_embeddings", head=("norm", "output"))
