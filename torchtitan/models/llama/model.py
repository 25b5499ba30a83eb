"""Llama 2, 3, 3.1 and 3.2: the model, its parallel plan, and its names in the Hugging Face format.

Features: grouped key/value heads, rotary positions in float32, gated feed-forward, pre-norm, no biases; head and
embedding may be tied. It uses only parts that all decoders share.

The one difference from transformers beyond names: heads rotate adjacent pairs of features (Meta's order), transformers
rotates feature i with i + head_dim / 2, so the rows of wq and wk are in another order.
"""

from torchtitan.models.attention import GroupedQueryAttention
from torchtitan.models.decoder import DECODER_PLAN, AttentionKind, Block, Decoder
from torchtitan.models.flops import flops_per_token
from torchtitan.models.hf.names import ATTENTION, FEED_FORWARD, REORDERED, TensorMap
from torchtitan.models.layers import Rotary
from torchtitan.models.llama import CONFIG, LlamaArgs
from torchtitan.models.spec import HuggingFace, ModelSpec


class Llama(Decoder):
    def __init__(self, args: LlamaArgs, attention_backend: str = "auto"):
        super().__init__(
            args,
            AttentionKind(Rotary(args.head_dim, args.rope_theta, args.rope_scaling)),
            lambda layer, kernel: Block(args, GroupedQueryAttention(args, kernel)),
            attention_backend,
        )


def tensor_map(args: LlamaArgs) -> TensorMap:
    return TensorMap(
        layer_names=ATTENTION | FEED_FORWARD, reordered=REORDERED, head_dim=args.head_dim, tied=args.tied_embeddings
    )


HF = HuggingFace(build=Llama, tensor_map=tensor_map, config=CONFIG)


SPEC = ModelSpec(build=Llama, plan=DECODER_PLAN, hf=HF, flops_per_token=flops_per_token)
