"""A mixer of Mamba 2 (arXiv:2405.21060).

Letters of the shapes: B samples, S tokens, W width of the model, R rows of T tokens that the kernel sets, G groups, H
heads of the mixer, K vectors of a head's state, V features of a head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.models.attention import SharedInputs
from torchtitan.models.linear_attention import CausalConvolution, Decay, StateKernel


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return x, of any shape, times the factor."""
    return x if factor == 1 else x * factor


class GroupedRMSNorm(nn.RMSNorm):
    """An RMS norm of each group of adjacent features."""

    def __init__(self, width: int, eps: float, groups: int):
        super().__init__(width, eps)
        self.groups = groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., W] -> [..., W]"""
        wide = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (self.groups, -1))
        r = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return ((wide * r).flatten(-2) * self.weight).to(x.dtype)


class HeadScale(nn.Module):
    """A learned factor of each head."""

    def __init__(self, heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H, V] -> [..., H, V]"""
        return x * self.weight.to(x.dtype)[:, None]


class Mamba2Mixer(nn.Module):
    """A Mamba-2 layer: linear attention with a decay that follows from a step, and a learned share of its values.

    Values, keys (B) and queries (C) are convolved over the last tokens. Outputs are gated, and perhaps normed.
    """

    def __init__(self, args: Any):
        super().__init__()
        self.args = args
        for name, (outputs, inputs) in args.mixer_linears.items():
            self.add_module(name.rpartition(".")[2], nn.Linear(inputs, outputs, bias=name in args.biases))
        widths = (args.ssm_widths[part] for part in "xbc")
        self.conv_x, self.conv_b, self.conv_c = (CausalConvolution(w, args.conv_taps, args.conv_bias) for w in widths)
        self.decay, self.skip = Decay(args.ssm_heads, args.min_step), HeadScale(args.ssm_heads)
        norm = GroupedRMSNorm(args.ssm_widths["x"], args.norm_eps, args.ssm_groups) if args.ssm_norm else None
        self.ssm_norm = norm

    def forward(self, x: torch.Tensor, kernel: StateKernel, before: torch.Tensor | None) -> torch.Tensor:
        """[B, S, W] -> [B, S, W]; `before`: the kernel's mask."""
        gate, *inputs, steps = self.project(x)
        rows = kernel.with_earlier(torch.cat(inputs, dim=-1), self.conv_x.taps - 1)
        parts = rows.split([part.shape[-1] for part in inputs], dim=-1)
        convolutions = (self.conv_x, self.conv_b, self.conv_c)
        v, k, q = (F.silu(conv(part, before)) for conv, part in zip(convolutions, parts, strict=True))
        v = v.unflatten(-1, (-1, self.args.ssm_head_dim))  # [R, T, H, V]
        k, q = (self.read_groups(y, v.shape[2], kernel.head_shard) for y in (k, q))
        y = kernel(q, k, v, *self.decay(steps), before)  # [B, S, H, V]
        y = (y + kernel.to_samples(self.skip(v))).flatten(-2)
        if self.ssm_norm is None or not self.args.norm_before_gate:
            y = y * F.silu(gate)
        if self.ssm_norm is not None:
            y = self.ssm_norm(y)
            y = y * F.silu(gate) if self.args.norm_before_gate else y
        return self.ssm_out(y)

    def project(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return gates and values [B, S, H V], keys and queries [B, S, G K] and steps [B, S, H] of x [B, S, W]."""
        x = scaled(x, self.args.ssm_in_multiplier)
        layers = {part: getattr(self, f"ssm_{part}") for part in self.args.ssm_widths}
        return [scaled(layer(x), getattr(self.args, f"ssm_{part}_multiplier")) for part, layer in layers.items()]

    def read_groups(self, x: torch.Tensor, heads: int, shard: int) -> torch.Tensor:
        """Return the groups of this rank's `heads`, the `shard`-th of all: [R, T, G K] -> [R, T, groups, K].

        A tensor-parallel rank has all groups, which are few, and heads of some of them, or of a part of one.
        """
        groups, heads_of_group = (
            x.unflatten(-1, (self.args.ssm_groups, -1)),
            self.args.ssm_heads // self.args.ssm_groups,
        )
        first = shard * heads // heads_of_group
        return groups[:, :, first : first + max(heads // heads_of_group, 1)]


class Mamba2Layer(nn.Module):
    """A mixer in place of attention."""

    def __init__(self, args: Any, kernel: StateKernel):
        super().__init__()
        self.mixer, self.kernel = Mamba2Mixer(args), kernel

    def forward(self, x: torch.Tensor, shared: SharedInputs) -> torch.Tensor:
        """[B, S, W] -> [B, S, W]"""
        return self.mixer(x, self.kernel, shared.mask)
