"""Mistral without experts: the model, its parallel plan, and its names in the Hugging Face format.

A Llama with sliding-window attention (arXiv:2310.06825) in some sizes, and a head width that is independent of the
model's width. Names and order of rows are as in Llama.
"""

from torchtitan.models.attention import GroupedQueryAttention
from torchtitan.models.decoder import DECODER_PLAN, AttentionKind, Block, Decoder
from torchtitan.models.flops import flops_per_token
from torchtitan.models.hf.names import ATTENTION, FEED_FORWARD, REORDERED, TensorMap
from torchtitan.models.layers import Rotary
from torchtitan.models.mistral import CONFIG, MistralArgs
from torchtitan.models.spec import HuggingFace, ModelSpec


class Mistral(Decoder):
    def __init__(self, args: MistralArgs, attention_backend: str = "auto"):
        super().__init__(
            args,
            AttentionKind(Rotary(args.head_dim, args.rope_theta, args.rope_scaling), args.sliding_window),
            lambda layer, kernel: Block(args, GroupedQueryAttention(args, kernel)),
            attention_backend,
        )


def tensor_map(args: MistralArgs) -> TensorMap:
    return TensorMap(
        layer_names=ATTENTION | FEED_FORWARD, reordered=REORDERED, head_dim=args.head_dim, tied=args.tied_embeddings
    )


HF = HuggingFace(build=Mistral, tensor_map=tensor_map, config=CONFIG)


SPEC = ModelSpec(build=Mistral, plan=DECODER_PLAN, hf=HF, flops_per_token=flops_per_token)
