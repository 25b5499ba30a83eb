"""Mistral without experts as a plain torch model: it knows nothing of meshes, process groups or the job.

Notable: a Llama whose tokens see only a window of those before them (arXiv:2310.06825), in the sizes that have one, and
whose width of heads need not follow from the model's.

Which modules of a Mistral each parallelism takes hold of.

Mistral in the form of Hugging Face: names and order of rows, as a Llama's. config.json: hf_config.py.

Mistral without experts as the trainer builds it.
"""

from torchtitan.models.attention import GroupedQueryAttention
from torchtitan.models.decoder import Block, Decoder
from torchtitan.models.flops import flops_per_token
from torchtitan.models.hf.names import ATTENTION, FEED_FORWARD, TURNED, Form
from torchtitan.models.layers import Rotary
from torchtitan.models.mistral import MistralArgs
from torchtitan.models.mistral.hf_config import CONFIG
from torchtitan.models.spec import HuggingFace, ModelSpec
from torchtitan.parallelisms.plan import ParallelPlan


class Mistral(Decoder):
    def __init__(self, args: MistralArgs, attention_backend: str = "auto"):
        super().__init__(
            args,
            Rotary(args.head_dim, args.rope_theta, args.rope_scaling),
            lambda layer, kernel: Block(args, GroupedQueryAttention(args, kernel)),
            attention_backend,
            window=args.sliding_window,
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


def form(args: MistralArgs) -> Form:
    return Form(parts=ATTENTION | FEED_FORWARD, turned=TURNED, head_dim=args.head_dim, tied=args.tied_embeddings)


HF = HuggingFace(build=Mistral, form=form, config=CONFIG)


SPEC = ModelSpec(build=Mistral, plan=PLAN, hf=HF, flops_per_token=flops_per_token)
