"""Keys and values of what a model has read, kept for the tokens that follow: each new one then costs one token's work.

Any causal decoder can be read so: its blocks get a kernel of their own that remembers, and the model stays as it is.
"""

from collections.abc import Iterator

import torch
from torch import nn

from torchtitan.models.attention import AttentionKernel
from torchtitan.models.decoder import Decoder
from torchtitan.parallelisms.context.kernel import Tokens


class RememberingKernel(nn.Module):
    """Attention of the new queries to all keys since the last `forget` that the model's own kernel lets them see."""

    def __init__(self, own: AttentionKernel):
        super().__init__()
        self.own, self.to_everything = own, AttentionKernel("sdpa", causal=False)
        self.forget()

    def forget(self) -> None:
        self.held = self.end = 0  # how many tokens are remembered, and where behind the last of them they end
        self.kept: list[torch.Tensor] = []  # [B, H / n, room, D] of keys, and of values

    def prepare(self, new: Tokens, keys: Tokens | None = None) -> torch.Tensor | None:
        """The mask of tokens that stand behind those that are remembered, as AttentionKernel's [1, 1, Q, S]. None:
        nothing is hidden, but what is later where there is nothing to remember yet.
        """
        assert new.documents is None and keys is None, "documents are not told apart"
        places = torch.arange(self.held + len(new.places), device=new.places.device)
        if self.held == 0:
            return self.own.prepare(Tokens(places, None))
        return (
            None if len(new.places) == 1 else self.own.prepare(Tokens(places[self.held :], None), Tokens(places, None))
        )

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """As AttentionKernel's: q [B, H, Q, D] of the new tokens, with their k and v -> [B, H, Q, V]."""
        kernel = self.to_everything if mask is None and self.held else self.own
        return kernel(q, *self._remember(k, v), mask)

    def _remember(self, *new: torch.Tensor) -> list[torch.Tensor]:
        """All that is remembered with what is new. In a window no more stays than the next token can see."""
        first, length = self.end - self.held, self.held + new[0].shape[2]
        if not self.kept or first + length > self.kept[0].shape[2]:
            room = 2 * length  # so that everything is moved seldom
            grown = [each.new_empty(*each.shape[:2], room, each.shape[3]) for each in new]
            for old, each in zip(self.kept, grown, strict=False):
                each[:, :, : self.held] = old[:, :, first : self.end]
            self.kept, first = grown, 0
        self.end = first + length
        for each, kept in zip(new, self.kept, strict=True):
            kept[:, :, first + self.held : self.end] = each
        self.held = min(length, self.own.window - 1) if self.own.window else length
        return [kept[:, :, first : self.end] for kept in self.kept]


class Remembering:
    """A decoder called with growing sequences: of what it was called with last, only the rest is read. Of any other
    sequence (a window that has moved on, whose positions begin anew) everything is.
    """

    def __init__(self, model: Decoder):
        self.model = model
        own = model.kernel.with_backend("sdpa")
        self.kernels = [RememberingKernel(own) for _ in model.layers]
        model.kernel = self.kernels[0]  # all of them remember the same tokens, so that its mask is every layer's
        for block, kernel in zip(model.layers.values(), self.kernels, strict=True):
            block.attention.kernel = kernel
        self.seen: torch.Tensor | None = None  # [1, S]

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [1, S] -> the logits of the last tokens, [1, those that were read together, V]."""
        known = 0 if self.seen is None else self.seen.shape[1]
        if not 0 < known < ids.shape[1] or not torch.equal(ids[:, :known], self.seen):
            known = 0
            self.forget()
        self.seen = ids
        return self.read(ids, known)

    def forget(self) -> None:
        for kernel in self.kernels:
            kernel.forget()

    def read(self, ids: torch.Tensor, known: int) -> torch.Tensor:
        """ids [1, S], of which the first `known` are remembered -> as above."""
        positions = torch.arange(known, ids.shape[1], device=ids.device)[None]
        return self.model(ids[:, known:], positions=positions)
