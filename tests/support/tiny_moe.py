"""A tiny MoE layer with random weights, and its input."""

import torch

from torchtitan.models.moe import MoEArgs
from torchtitan.models.moe.layer import MoE

ARGS = MoEArgs(dim=16, expert_dim=24, n_experts=8, top_k=3)


def build_moe(args, seed=0, dtype=torch.float32):
    """Build a MoE layer with weights drawn from a seed."""
    generator = torch.Generator().manual_seed(seed)
    layer = MoE(args)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return layer.to(dtype)


def tokens(batch=2, length=10, dim=16, dtype=torch.float32):
    return torch.randn(batch, length, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
