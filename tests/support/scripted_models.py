"""A model whose tokens are written down."""

import torch


class Scripted(torch.nn.Module):
    """A model with logits [B, S, V] that depend on the last token only; it records its inputs."""

    def __init__(self, logits: torch.Tensor):
        super().__init__()
        self.logits = torch.nn.Parameter(logits)
        self.inputs: list[list[int]] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.inputs.append(ids[0].tolist())
        return self.logits[ids]
