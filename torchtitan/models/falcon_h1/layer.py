"""The layer of Falcon-H1: attention and a mixer of Mamba 2 of the same input, side by side.

Letters of the shapes: B samples, S tokens, W width of the model.
"""

from typing import Any

import torch
import torch.nn.functional as F

from torchtitan.models.attention import GroupedQueryAttention, SharedInputs
from torchtitan.models.layers import SwiGLU
from torchtitan.models.linear_attention import HybridKernel
from torchtitan.models.mamba2.layer import Mamba2Mixer, scaled


class HybridAttention(GroupedQueryAttention):
    """Grouped-query attention and a mixer of the same input, whose outputs are added."""

    def __init__(self, args: Any, kernel: HybridKernel):
        super().__init__(args, kernel, bias=args.attention_bias, query_scale=args.query_scale)
        self.args, self.mixer = args, Mamba2Mixer(args)

    def forward(self, x: torch.Tensor, shared: SharedInputs) -> torch.Tensor:
        """[B, S, W] -> [B, S, W]"""
        y = scaled(self.mixer(x, self.kernel.state, shared.mask[1]), self.args.ssm_out_multiplier)
        attended = super().forward(scaled(x, self.args.attention_in_multiplier), shared)
        return y + scaled(attended, self.args.attention_out_multiplier)


class ScaledSwiGLU(SwiGLU):
    """A gated feed-forward with factors of its gates and of its outputs."""

    def __init__(self, args: Any):
        super().__init__(args.dim, args.ffn_dim, args.mlp_bias)
        self.factors = args.gate_multiplier, args.down_multiplier

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., W] -> [..., W]"""
        gate, down = self.factors
        return scaled(self.w2(F.silu(scaled(self.w1(x), gate)) * self.w3(x)), down)
