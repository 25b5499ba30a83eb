"""Key/value caching for generation, so that each new token costs only its own forward.

It works for any causal decoder: the blocks get a kernel that caches keys and values, and the model itself does not
change.
"""

from collections.abc import Iterator

import torch
from torch import nn

from torchtitan.models.attention import AttentionKernel
from torchtitan.models.decoder import Decoder
from torchtitan.parallelisms.attention_kernel import Tokens


class RememberingKernel(nn.Module):
    """Attention of new queries to all cached keys, subject to the model's own kernel. `forget` empties the cache."""

    def __init__(self, own: AttentionKernel):
        super().__init__()
        self.own, self.to_everything = own, AttentionKernel("sdpa", causal=False)
        self.forget()

    def forget(self) -> None:
        self.held = self.end = 0  # number of cached tokens, and the end of the last one in the tensors
        self.kept: list[torch.Tensor] = []  # tensors [B, H / n, capacity, D] of keys and of values

    def prepare(self, new: Tokens, keys: Tokens | None = None) -> torch.Tensor | None:
        """Return the mask of the new tokens, which follow the cached ones, as AttentionKernel's [1, 1, Q, S].

        None means that nothing is masked, or only later tokens if the cache is empty.
        """
        assert new.documents is None and keys is None, "documents are not told apart"
        places = torch.arange(self.held + len(new.places), device=new.places.device)
        if self.held == 0:
            return self.own.prepare(Tokens(places, None))
        return (
            None if len(new.places) == 1 else self.own.prepare(Tokens(places[self.held :], None), Tokens(places, None))
        )

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Attend as AttentionKernel does: q [B, H, Q, D] of the new tokens, with their k and v -> [B, H, Q, V]."""
        kernel = self.to_everything if mask is None and self.held else self.own
        return kernel(q, *self._remember(k, v), mask)

    def _remember(self, *new: torch.Tensor) -> list[torch.Tensor]:
        """Append new keys and values [B, H / n, Q, D] to the cache and return all cached ones.

        With a window, the cache keeps only tokens that the next one can attend to.
        """
        first, length = self.end - self.held, self.held + new[0].shape[2]
        if not self.kept or first + length > self.kept[0].shape[2]:
            room = 2 * length  # so that the tensors are rarely copied
            grown = [tensor.new_empty(*tensor.shape[:2], room, tensor.shape[3]) for tensor in new]
            for old, tensor in zip(self.kept, grown, strict=False):
                tensor[:, :, : self.held] = old[:, :, first : self.end]
            self.kept, first = grown, 0
        self.end = first + length
        for tensor, kept in zip(new, self.kept, strict=True):
            kept[:, :, first + self.held : self.end] = tensor
        self.held = min(length, self.own.window - 1) if self.own.window else length
        return [kept[:, :, first : self.end] for kept in self.kept]


class Remembering:
    """A decoder that is called with growing sequences and reads only the tokens added since the last call.

    It reads any other sequence from the start, for example a shifted window (its positions start again at 0).
    """

    def __init__(self, model: Decoder):
        self.model = model
        base_kernel = model.kernel.with_backend("sdpa")
        self.kernels = [RememberingKernel(base_kernel) for _ in model.layers]
        model.kernel = self.kernels[0]  # all cache the same tokens, so its mask holds for every layer
        for block, kernel in zip(model.layers.values(), self.kernels, strict=True):
            block.attention.kernel = kernel
        self.seen: torch.Tensor | None = None  # [1, S]

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [1, S] -> logits [1, number of tokens read in this call, V] of the last tokens."""
        num_cached = 0 if self.seen is None else self.seen.shape[1]
        if not 0 < num_cached < ids.shape[1] or not torch.equal(ids[:, :num_cached], self.seen):
            num_cached = 0
            self.forget()
        self.seen = ids
        return self.read(ids, num_cached)

    def forget(self) -> None:
        for kernel in self.kernels:
            kernel.forget()

    def read(self, ids: torch.Tensor, num_cached: int) -> torch.Tensor:
        """Read ids [1, S] after the first `num_cached`, which are cached -> logits [1, S - num_cached, V]."""
        positions = torch.arange(num_cached, ids.shape[1], device=ids.device)[None]
        return self.model(ids[:, num_cached:], positions=positions)
