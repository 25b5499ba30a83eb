"""Qwen 3 without experts: the model, its parallel plan, and its names in the Hugging Face format.

Features: grouped key/value heads, with norms of queries and keys; a head width that is independent of the model's
width; head and embedding may be tied. The one difference from transformers beyond names is the order of a head's
features: the rows of wq and wk and the weights of their norms are in another order.
"""

from dataclasses import replace

from torchtitan.models.attention import GroupedQueryAttention
from torchtitan.models.decoder import DECODER_PLAN, AttentionKind, Block, Decoder
from torchtitan.models.flops import flops_per_token
from torchtitan.models.hf.names import ATTENTION, FEED_FORWARD, QK_NORMS, REORDERED, TensorMap
from torchtitan.models.layers import RMSNorm, Rotary
from torchtitan.models.qwen3 import CONFIG, Qwen3Args
from torchtitan.models.spec import HuggingFace, ModelSpec


class Qwen3(Decoder):
    def __init__(self, args: Qwen3Args, attention_backend: str = "auto"):
        super().__init__(
            args,
            AttentionKind(Rotary(args.head_dim, args.rope_theta, args.rope_scaling)),
            lambda layer, kernel: Block(args, GroupedQueryAttention(args, kernel, qk_norm=RMSNorm)),
            attention_backend,
        )


PLAN = replace(DECODER_PLAN, replicated=("attention.[qk]_norm",))  # each rank norms its own heads


def tensor_map(args: Qwen3Args) -> TensorMap:
    parts = ATTENTION | QK_NORMS | FEED_FORWARD
    return TensorMap(
        layer_names=parts, reordered=REORDERED.union(QK_NORMS), head_dim=args.head_dim, tied=args.tied_embeddings
    )


HF = HuggingFace(build=Qwen3, tensor_map=tensor_map, config=CONFIG)


SPEC = ModelSpec(build=Qwen3, plan=PLAN, hf=HF, flops_per_token=flops_per_token)
