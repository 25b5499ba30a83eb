"""Qwen 2 and 2.5 without experts: the model and its names in the Hugging Face format.

A Llama with biases of queries, keys and values (arXiv:2407.10671); head and embedding may be tied. As in Llama, the
order of a head's features differs from transformers, and so does that of the biases of queries and keys.
"""

from torchtitan.models.attention import GroupedQueryAttention
from torchtitan.models.decoder import DECODER_PLAN, AttentionKind, Block, Decoder
from torchtitan.models.flops import flops_per_token
from torchtitan.models.hf.names import ATTENTION, FEED_FORWARD, REORDERED, TensorMap
from torchtitan.models.layers import Rotary
from torchtitan.models.qwen2 import BIASES, CONFIG, Qwen2Args
from torchtitan.models.spec import HuggingFace, ModelSpec


class Qwen2(Decoder):
    def __init__(self, args: Qwen2Args, attention_backend: str = "auto"):
        super().__init__(
            args,
            AttentionKind(Rotary(args.head_dim, args.rope_theta, args.rope_scaling)),
            lambda layer, kernel: Block(args, GroupedQueryAttention(args, kernel, bias=True, output_bias=False)),
            attention_backend,
        )


PARTS = ATTENTION | dict(zip(BIASES, (f"self_attn.{x}_proj.bias" for x in "qkv"), strict=True)) | FEED_FORWARD


def tensor_map(args: Qwen2Args) -> TensorMap:
    return TensorMap(
        layer_names=PARTS,
        reordered=REORDERED.union(BIASES[:2]),
        head_dim=args.head_dim,
        tied=args.tied_embeddings,
    )


HF = HuggingFace(build=Qwen2, tensor_map=tensor_map, config=CONFIG)


SPEC = ModelSpec(build=Qwen2, plan=DECODER_PLAN, hf=HF, flops_per_token=flops_per_token)
