"""Llama 2, 3, 3.1 and 3.2 as a plain torch model: it knows nothing of meshes, process groups or the job.

Notable: grouped key/value heads; rotary positions in float32; a gated feed-forward; norms before, not after; no biases;
weights of the head and the embedding may be one. All of it is of the parts that decoders share.

Which modules of a Llama each parallelism takes hold of.

Llama weights and sizes in the form of Hugging Face: names and order of rows. config.json: hf_config.py.

The one numerical difference: we turn neighbouring pairs of a head's features (Meta's order), transformers turns feature
i with i + head_dim / 2, so the rows of wq and wk come in another order. Everything else is a renaming.

The Llamas as the trainer builds them.
"""

from torchtitan.models.attention import GroupedQueryAttention
from torchtitan.models.decoder import Block, Decoder
from torchtitan.models.flops import flops_per_token
from torchtitan.models.hf.names import ATTENTION, FEED_FORWARD, TURNED, Form
from torchtitan.models.layers import Rotary
from torchtitan.models.llama import LlamaArgs
from torchtitan.models.llama.hf_config import CONFIG
from torchtitan.models.spec import HuggingFace, ModelSpec
from torchtitan.parallelisms.plan import ParallelPlan


class Llama(Decoder):
    def __init__(self, args: LlamaArgs, attention_backend: str = "auto"):
        super().__init__(
            args,
            Rotary(args.head_dim, args.rope_theta, args.rope_scaling),
            lambda layer, kernel: Block(args, GroupedQueryAttention(args, kernel)),
            attention_backend,
        )


PLAN = ParallelPlan(
    blocks="layers.*",
    embedding="tok_embeddings",
    head=("norm", "output"),
    gathered=("attention", "feed_forward"),
    column=("attention.w[qkv]", "feed_forward.w[13]"),
    row=("attention.wo", "feed_forward.w2"),
    sequence=("attention_norm", "ffn_norm"),
)


def form(args: LlamaArgs) -> Form:
    return Form(parts=ATTENTION | FEED_FORWARD, turned=TURNED, head_dim=args.head_dim, tied=args.tied_embeddings)


HF = HuggingFace(build=Llama, form=form, config=CONFIG)


SPEC = ModelSpec(build=Llama, plan=PLAN, hf=HF, flops_per_token=flops_per_token)
