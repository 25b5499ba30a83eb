"""Gemma 3 for text (arXiv:2503.19786): the model, its parallel plan, and its names in the Hugging Face format.

Features: layers with a sliding window and layers without, each with a rotary base; norms before and after attention
and feed-forward, and of queries and keys, all multiplying by 1 + weight; embeddings scaled by the square root of the
width; head and embedding are tied. As in Qwen 3, the features of a head are in another order than in transformers.
"""

from dataclasses import replace
from functools import partial

import torch

from torchtitan.core.random_draws import Constant, Init, Normal
from torchtitan.models.attention import AttentionKernel, GroupedQueryAttention
from torchtitan.models.decoder import DECODER_PLAN, AttentionKind, Block, Decoder
from torchtitan.models.flops import flops_per_token
from torchtitan.models.gemma3 import CONFIG, Gemma3Args
from torchtitan.models.hf.names import ATTENTION, FEED_FORWARD, QK_NORMS, REORDERED, TensorMap
from torchtitan.models.layers import GeGLU, Rotary, ZeroCenteredRMSNorm
from torchtitan.models.spec import HuggingFace, ModelSpec
from torchtitan.parallelisms.steps import Notes


class SandwichBlock(Block):
    """A block that normalizes the inputs and the outputs of attention and feed-forward."""

    def __init__(self, args: Gemma3Args, kernel: AttentionKernel):
        norm = partial(ZeroCenteredRMSNorm, args.dim, args.norm_eps)
        query_scale = (args.head_dim / args.query_scalar) ** 0.5
        attention = GroupedQueryAttention(args, kernel, ZeroCenteredRMSNorm, query_scale=query_scale)
        super().__init__(args, attention, GeGLU(args.dim, args.ffn_dim), norm)
        self.attention_post_norm, self.ffn_post_norm = norm(), norm()

    def attention_residual(self, notes: Notes, x: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]"""
        return x + self.attention_post_norm(self.attention(self.attention_norm(x), notes.shared))

    def ffn_residual(self, h: torch.Tensor, y: torch.Tensor, notes: Notes) -> torch.Tensor:
        """[B, S, D] each"""
        return h + self.ffn_post_norm(y)


class Gemma3(Decoder):
    def __init__(self, args: Gemma3Args, attention_backend: str = "auto"):
        window = AttentionKind(Rotary(args.head_dim, args.local_rope_theta), args.sliding_window)
        full = AttentionKind(Rotary(args.head_dim, args.rope_theta, args.rope_scaling))
        super().__init__(
            args,
            [full if args.is_global(layer) else window for layer in range(args.n_layers)],
            lambda layer, kernel: SandwichBlock(args, kernel),
            attention_backend,
            norm=ZeroCenteredRMSNorm(args.dim, args.norm_eps),
        )

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up and scale the embeddings: [B, S] -> [B, S, D]. The scale is rounded to their dtype."""
        x = super().embed(tokens)
        return x * x.new_full((), self.args.dim**0.5)

    def init_rule(self, name: str) -> Init:
        if name.startswith("tok_embeddings."):
            return Normal(self.args.dim**-0.5)  # of standard deviation 1 when they are scaled
        return Constant(0.0) if "norm" in name else super().init_rule(name)


PLAN = replace(
    DECODER_PLAN,
    replicated=("attention.[qk]_norm",),  # each rank norms its own heads
    sequence=(*DECODER_PLAN.sequence, "attention_post_norm", "ffn_post_norm"),
)
SANDWICH_NORMS = {
    "attention_post_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "ffn_post_norm.weight": "post_feedforward_layernorm.weight",
}


def tensor_map(args: Gemma3Args) -> TensorMap:
    return TensorMap(
        layer_names=ATTENTION | QK_NORMS | FEED_FORWARD | SANDWICH_NORMS,
        reordered=REORDERED.union(QK_NORMS),
        head_dim=args.head_dim,
        tied=args.tied_embeddings,
    )


HF = HuggingFace(build=Gemma3, tensor_map=tensor_map, config=CONFIG)


SPEC = ModelSpec(build=Gemma3, plan=PLAN, hf=HF, flops_per_token=flops_per_token)
