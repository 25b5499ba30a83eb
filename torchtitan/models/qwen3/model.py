"""Qwen 3 without experts as a plain torch model: it knows nothing of meshes, process groups or the job.

Notable: grouped key/value heads, whose queries and keys are normed; a width of heads that does not follow from the
model's; weights of the head and the embedding may be one.

Which modules of a Qwen 3 without experts each parallelism takes hold of.

Qwen 3 without experts in the form of Hugging Face: names and order of rows. config.json: hf_config.py.

The one numerical difference: the order of a head's features, so that the rows of wq and wk and the weights of their
norms come in another order. Everything else is a renaming.

Qwen 3 without experts as the trainer builds it.
"""

from torchtitan.models.attention import GroupedQueryAttention
from torchtitan.models.decoder import Block, Decoder
from torchtitan.models.flops import flops_per_token
from torchtitan.models.hf.names import ATTENTION, FEED_FORWARD, QK_NORMS, TURNED, Form
from torchtitan.models.layers import Rotary
from torchtitan.models.qwen3 import Qwen3Args
from torchtitan.models.qwen3.hf_config import CONFIG
from torchtitan.models.spec import HuggingFace, ModelSpec
from torchtitan.parallelisms.plan import ParallelPlan


class Qwen3(Decoder):
    def __init__(self, args: Qwen3Args, attention_backend: str = "auto"):
        super().__init__(
            args,
            Rotary(args.head_dim, args.rope_theta, args.rope_scaling),
            lambda layer, kernel: Block(args, GroupedQueryAttention(args, kernel, qk_norm=True)),
            attention_backend,
        )


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


def form(args: Qwen3Args) -> Form:
    parts = ATTENTION | QK_NORMS | FEED_FORWARD
    return Form(parts=parts, turned=TURNED.union(QK_NORMS), head_dim=args.head_dim, tied=args.tied_embeddings)


HF = HuggingFace(build=Qwen3, form=form, config=CONFIG)


SPEC = ModelSpec(build=Qwen3, plan=PLAN, hf=HF, flops_per_token=flops_per_token)
