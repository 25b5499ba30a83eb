"""The block of Nemotron-H: attention, a mixer, a feed-forward or experts, each with a norm and a residual connection.

Letters of the shapes: B samples, S tokens, D width.
"""

import torch
from torch import nn

from torchtitan.models.moe.layer import MoE, routed_steps
from torchtitan.parallelisms.steps import Notes, RoutedExperts, Segment, Stepwise


class SoloBlock(Stepwise):
    """A block of one part: `attention` (or what takes its place), `feed_forward` or `moe`."""

    def __init__(self, norm: nn.Module, **part: nn.Module):
        super().__init__()
        self.norm = norm
        self.attention, self.feed_forward = part.get("attention"), part.get("feed_forward")
        self.moe: MoE | None = part.get("moe")

    def steps(self) -> tuple[Segment | RoutedExperts, ...]:
        if self.moe is not None:
            return routed_steps(self.moe, self.norm, self.add, "x")
        return (Segment("block", self.residual, ("x",), ("out",)),)

    def residual(self, notes: Notes, x: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]"""
        n = self.norm(x)
        return x + (self.feed_forward(n) if self.attention is None else self.attention(n, notes.shared))

    @staticmethod
    def add(x: torch.Tensor, y: torch.Tensor, notes: Notes) -> torch.Tensor:
        """Add the experts' output y to the block's input x; both [B, S, D]."""
        return x + y
