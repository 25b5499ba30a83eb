"""Gemma 4 for text, without experts and embeddings of layers: the model and its spec."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from torchtitan.models.attention import AttentionKernel, GroupedQueryAttention
from torchtitan.models.decoder import Block, ResidualBlock
from torchtitan.models.flops import flops_by_layer
from torchtitan.models.gated import SANDWICH_NORMS, GatedDecoder, gated_spec, tensor_map
from torchtitan.models.gemma4 import CONFIG
from torchtitan.models.hf.names import QK_NORMS, REORDERED, TensorMap
from torchtitan.models.layers import GeGLU, RMSNorm, ZeroedBuffers
from torchtitan.parallelisms.steps import Notes


class ScaledBlock(Block, ZeroedBuffers):
    """A block whose output is multiplied by a number, which is not trained."""

    first_values = {"layer_scale": 1.0}

    def __init__(self, args: Any, attention: nn.Module):
        feed_forward = GeGLU(args.dim, args.ffn_dim)
        super().__init__(args, attention, feed_forward, partial(RMSNorm, args.dim, args.norm_eps), "sandwich")
        self.register_buffer("layer_scale", torch.ones(1))

    def ffn_residual(self, h: torch.Tensor, y: torch.Tensor, notes: Notes) -> torch.Tensor:
        """Add the feed-forward's output y to the residual stream h, and scale the sum; all [B, S, D]."""
        return super().ffn_residual(h, y, notes) * self.layer_scale.to(h.dtype)


class Gemma4(GatedDecoder):
    """A Gemma 3 whose layers without a window have wider heads, of which few are keys and rotate in part."""

    @staticmethod
    def build_attention(args: Any, layer: int, kernel: AttentionKernel) -> nn.Module:
        sizes = args.attention_sizes(layer)
        shares = "attention.wv" not in args.attention_linears(layer)
        scale = sizes.head_dim**0.5
        return GroupedQueryAttention(sizes, kernel, RMSNorm, query_scale=scale, norms_values=True, shares_keys=shares)

    @staticmethod
    def build_block(args: Any, layer: int, attention: nn.Module) -> ResidualBlock:
        return ScaledBlock(args, attention)


NAMES = {**SANDWICH_NORMS, "layer_scale": "layer_scalar"}


def _tensor_map(args: Any) -> TensorMap:
    layers = [layer for layer in range(args.n_layers) if args.is_global(layer)]
    rows = {f"layers.{layer}.{name}": args.global_head_dim for layer in layers for name in (*REORDERED, *QK_NORMS)}
    return replace(tensor_map(args, NAMES), head_rows=rows, rotary_dim=0, rows={}, _ours={})


SPEC = gated_spec(Gemma4, CONFIG, NAMES)
SPEC = replace(SPEC, hf=replace(SPEC.hf, tensor_map=_tensor_map), flops_per_token=flops_by_layer)
HF = SPEC.hf
