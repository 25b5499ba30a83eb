"""The layer of Qwen 3-Next and Qwen 3.5 with the gated delta rule (models/linear_attention.py).

Letters of the shapes: B samples, S tokens, W width of the model, R rows of T tokens that the kernel sets, G key heads,
H value heads, J = H / G, K and V features of a key and of a value.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.models.attention import SharedInputs
from torchtitan.models.layers import rms_norm
from torchtitan.models.linear_attention import CausalConvolution, Decay, StateKernel

EPS = 1e-6
"""Added to the squared length of queries and keys."""


class GateNorm(nn.Module):
    """An RMS norm of each head, multiplied by the silu of a gate."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """[B, S, H, V], [B, S, H, V] -> [B, S, H, V]"""
        wide = torch.promote_types(y.dtype, torch.float32)
        return (rms_norm(y, self.weight.to(y.dtype), self.eps) * F.silu(gate.to(wide))).to(y.dtype)


class GatedDeltaNet(nn.Module):
    """A layer with the gated delta rule in place of attention.

    Queries, keys and values are convolved over the last tokens; queries and keys have length 1, and queries are divided
    by sqrt(K). Each key head serves J value heads.
    """

    def __init__(self, args: Any, kernel: StateKernel):
        super().__init__()
        self.key_dim, self.value_dim = args.delta_key_dim, args.delta_value_dim
        self.heads_per_key = args.delta_value_heads // args.delta_key_heads
        self.joint = args.joint_projections
        for name, (outputs, inputs) in args.attention_linears(0).items():
            self.add_module(name.removeprefix("attention."), nn.Linear(inputs, outputs, bias=False))
        widths = args.delta_widths
        self.conv_q, self.conv_k, self.conv_v = (CausalConvolution(width, args.conv_taps) for width in widths.values())
        self.decay = Decay(args.delta_value_heads)
        self.delta_norm = GateNorm(args.delta_value_dim, args.norm_eps)
        self.kernel = kernel

    def forward(self, x: torch.Tensor, shared: SharedInputs) -> torch.Tensor:
        """[B, S, W] -> [B, S, W]"""
        *inputs, gate, b, a = self.project(x)
        rows = self.kernel.with_earlier(torch.cat(inputs, dim=-1), self.conv_q.taps - 1)
        parts = rows.split([part.shape[-1] for part in inputs], dim=-1)
        convolutions = (self.conv_q, self.conv_k, self.conv_v)
        q, k, v = (F.silu(conv(part, shared.mask)) for conv, part in zip(convolutions, parts, strict=True))
        q, k = (_unit(y.unflatten(-1, (-1, self.key_dim))) for y in (q, k))  # [R, T, G, K]
        v = v.unflatten(-1, (-1, self.value_dim))  # [R, T, H, V]
        strength = b.to(q.dtype).sigmoid()
        y = self.kernel(q * self.key_dim**-0.5, k, v, self.decay(a)[0], strength, shared.mask)  # [B, S, H, V]
        y = self.delta_norm(y, gate.unflatten(-1, (-1, self.value_dim)))
        return self.delta_out(y.flatten(-2))

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries, keys [B, S, G K], values, gates [B, S, H V], strengths and steps [B, S, H] of x [B, S, W]."""
        if not self.joint:
            layers = (self.delta_q, self.delta_k, self.delta_v, self.delta_z, self.delta_b, self.delta_a)
            return tuple(layer(x) for layer in layers)
        values = self.heads_per_key * self.value_dim
        widths = (self.key_dim, self.key_dim, values, values)
        heads = self.delta_qkvz(x).unflatten(-1, (-1, sum(widths))).split(widths, dim=-1)
        numbers = self.delta_ba(x).unflatten(-1, (-1, 2 * self.heads_per_key)).chunk(2, dim=-1)
        return tuple(part.flatten(-2) for part in (*heads, *numbers))


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Return vectors [..., K] of length 1, at least in float32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()
