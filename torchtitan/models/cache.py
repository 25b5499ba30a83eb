"""Keys and values of what a model has read, kept for the tokens that follow: each new one then costs one token's work.

Any causal decoder can be read so: its blocks get a kernel of their own that remembers, and the model stays as it is.
"""

from collections.abc import Iterator

import torch
from torch import nn

from torchtitan.models.decoder import Decoder
from torchtitan.models.layers import AttentionKernel


class RememberingKernel(AttentionKernel):
    """Attention of the new queries to all keys since the last `forget`."""

    def __init__(self) -> None:
        super().__init__("sdpa")
        self.to_everything = AttentionKernel("sdpa", causal=False)
        self.forget()

    def forget(self) -> None:
        self.length = 0
        self.kept: list[torch.Tensor] = []  # [B, H / n, room, D] of keys, and of values

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object) -> torch.Tensor:
        """As AttentionKernel's, without documents: the new tokens stand behind those that are remembered."""
        assert mask is None, "documents are not told apart"
        k, v = self._remember(k, v)
        new = q.shape[2]
        if new == self.length:
            return super().forward(q, k, v, None)
        if new == 1:
            return self.to_everything(q, k, v, None)
        places = torch.arange(self.length, device=q.device)
        return super().forward(q, k, v, (places[-new:, None] >= places)[None, None])

    def _remember(self, *new: torch.Tensor) -> list[torch.Tensor]:
        start, self.length = self.length, self.length + new[0].shape[2]
        if not self.kept or self.length > self.kept[0].shape[2]:
            room = 2 * self.length  # so that everything is moved seldom
            grown = [each.new_empty(*each.shape[:2], room, each.shape[3]) for each in new]
            for old, each in zip(self.kept, grown, strict=False):
                each[:, :, :start] = old[:, :, :start]
            self.kept = grown
        for each, kept in zip(new, self.kept, strict=True):
            kept[:, :, start : self.length] = each
        return [kept[:, :, : self.length] for kept in self.kept]


class Remembering:
    """A decoder called with growing sequences: of what it was called with last, only the rest is read. Of any other
    sequence (a window that has moved on, whose positions begin anew) everything is.
    """

    def __init__(self, model: Decoder):
        self.model = model
        self.kernels = [RememberingKernel() for _ in model.layers]
        for block, kernel in zip(model.layers.values(), self.kernels, strict=True):
            block.attention.kernel = kernel
        self.seen: torch.Tensor | None = None  # [1, S]

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [1, S] -> the logits of the last tokens, [1, those that were read, V]."""
        known = 0 if self.seen is None else self.seen.shape[1]
        if not 0 < known < ids.shape[1] or not torch.equal(ids[:, :known], self.seen):
            known = 0
            for kernel in self.kernels:
                kernel.forget()
        self.seen = ids
        positions = torch.arange(known, ids.shape[1], device=ids.device)[None]
        return self.model(ids[:, known:], positions=positions)
