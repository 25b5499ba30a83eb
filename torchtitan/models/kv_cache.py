"""Key/value caching for generation, so that each new token costs only its own forward.

It works for any causal decoder: the blocks get a kernel that caches keys and values, and the model itself does not
change.

A decoder reads growing sequences, through the cache or as the memory of the model reads them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from torchtitan.models.attention import AttentionKernel, Mask
from torchtitan.models.decoder import Decoder
from torchtitan.parallelisms.sequence_layout import Tokens, replace_parts, with_sinks
from torchtitan.torch_internals.dispatch import local_parameters

TRANSPOSED_ROWS = 512
"""Rows of a matrix that are transposed at once: three times as fast as all together."""


class CachingKernel(nn.Module):
    """Attention of new queries to all cached keys, with the mask of the model's `kernel`. `clear` empties the cache."""

    def __init__(self, kernel: AttentionKernel):
        super().__init__()
        self.kernel, self.full_attention = kernel, kernel.without_causality()
        self.clear()

    def clear(self) -> None:
        self.num_cached = self.end = 0  # number of cached tokens, and the end of the last one in the tensors
        self.cached_tensors: list[torch.Tensor] = []  # tensors [B, H / n, capacity, D] of keys and of values

    def prepare(self, new: Tokens, keys: Tokens | None = None) -> Mask:
        """Return the mask of the new tokens, which follow the cached ones, as AttentionKernel's [1, 1, Q, S].

        None means that nothing is masked, or only later tokens if the cache is empty.
        """
        assert new.documents is None and keys is None, "the cache supports no document masks"
        places = torch.arange(self.num_cached + len(new.indices), device=new.indices.device)
        if self.num_cached == 0:
            return self.kernel.prepare(Tokens(places, None))
        if len(new.indices) == 1:
            return None
        return self.kernel.prepare(Tokens(places[self.num_cached :], None), Tokens(places, None))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend as AttentionKernel does: q [B, H, Q, D] of the new tokens, with their k and v -> [B, H, Q, V]."""
        attention = self.full_attention if mask is None and self.num_cached else self.kernel
        return attention(q, *self._append(k, v), mask, **with_sinks(sinks))

    def _append(self, *new: torch.Tensor) -> list[torch.Tensor]:
        """Append new keys and values [B, H / n, Q, D] to the cache and return all cached ones.

        The cache keeps only tokens that the next one can attend to.
        """
        first, length = self.end - self.num_cached, self.num_cached + new[0].shape[2]
        if not self.cached_tensors or first + length > self.cached_tensors[0].shape[2]:
            capacity = 2 * length  # so that the tensors are rarely copied
            larger = [tensor.new_empty(*tensor.shape[:2], capacity, tensor.shape[3]) for tensor in new]
            for old, tensor in zip(self.cached_tensors, larger, strict=False):
                tensor[:, :, : self.num_cached] = old[:, :, first : self.end]
            self.cached_tensors, first = larger, 0
        self.end = first + length
        for tensor, cached in zip(new, self.cached_tensors, strict=True):
            cached.narrow(2, first + self.num_cached, tensor.shape[2]).copy_(tensor)
        self.num_cached = self.kernel.num_needed(length)
        return [cached.narrow(2, first, length) for cached in self.cached_tensors]


@torch.no_grad()
def store_for_single_rows(model: nn.Module) -> None:
    """Store float32 matrices on a CPU by columns, in place, where products with a single row then take less time.

    MKL reads a matrix [32000, 768] at 13 GB/s as nn.Linear stores it and at 23 by columns, [2048, 2048] at 18 and 21;
    [768, 2048] is faster by rows. Storing 3 GB so takes a second (torch 2.13, 1 thread of an AMD EPYC without AMX).
    """
    for module in model.modules():
        weight = local_parameters(module).get("weight") if isinstance(module, nn.Linear) else None
        if weight is None or weight.dtype != torch.float32 or weight.device.type != "cpu":
            continue
        rows, columns = weight.shape
        if rows >= columns and weight.is_contiguous():
            by_columns = weight.new_empty(columns, rows)
            for start in range(0, rows, TRANSPOSED_ROWS):
                piece = slice(start, start + TRANSPOSED_ROWS)
                by_columns[:, piece] = weight[piece].t().contiguous()
            weight.data = by_columns.t()


@contextmanager
def without_onednn() -> Iterator[None]:
    """Compute matrix products with torch's own kernels on a CPU.

    oneDNN multiplies a bfloat16 matrix [8192, 2048] with one row at 9 GB/s, torch at 16 GB/s: half of the time of a
    token (torch 2.13, 1 thread of an AMD EPYC without AMX). Both add in float32. Float32 goes to MKL in either case.
    """
    was_enabled = torch.backends.mkldnn.set_flags(False)[0]
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(was_enabled)


class CachedDecoder:
    """A decoder that is called with growing sequences and reads only the tokens added since the last call.

    It reads any other sequence from the start, for example a shifted window (its positions start again at 0).
    """

    def __init__(self, model: Decoder):
        self.model = model
        base_kernels = [kernel.with_backend("sdpa") for kernel in model.kernels]
        attending = {layer: block.attention for layer, block in model.layers.items() if block.attention is not None}
        kinds = [model.kind_index(int(layer)) for layer in attending]
        self.kernels = [replace_parts(base_kernels[kind], _caching) for kind in kinds]
        # all layers of a kind cache the same tokens, so the mask of the first holds for every one
        first = dict(zip(reversed(kinds), reversed(self.kernels), strict=True))
        model.set_attention_kernels(first.get(kind, kernel) for kind, kernel in enumerate(base_kernels))
        for attention, kernel in zip(attending.values(), self.kernels, strict=True):
            attention.kernel = kernel
        self.cached_ids: torch.Tensor | None = None  # [1, S]

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [1, S] -> logits [1, number of tokens read in this call, V] of the last tokens."""
        num_cached = 0 if self.cached_ids is None else self.cached_ids.shape[1]
        if not 0 < num_cached < ids.shape[1] or not torch.equal(ids[:, :num_cached], self.cached_ids):
            num_cached = 0
            self.clear()
        self.cached_ids = ids
        if ids.shape[1] - num_cached > 1 or ids.device.type != "cpu":
            return self.read(ids, num_cached)
        with without_onednn():
            return self.read(ids, num_cached)

    def clear(self) -> None:
        for kernel in self.kernels:
            kernel.clear()

    def read(self, ids: torch.Tensor, num_cached: int) -> torch.Tensor:
        """Read ids [1, S] after the first `num_cached`, which are cached -> logits [1, S - num_cached, V]."""
        positions = torch.arange(num_cached, ids.shape[1], device=ids.device)[None]
        return self.model(ids[:, num_cached:], positions=positions)


def _caching(kernel: nn.Module) -> nn.Module:
    """Return a kernel that keeps what it needs of earlier tokens: its own, or attention with a cache."""
    return kernel.caching() if hasattr(kernel, "caching") else CachingKernel(kernel)


def context_of(model: Decoder, seq_len: int) -> int:
    """Return the maximum number of tokens of a sequence that a model reads, in segments if it has a memory."""
    memory = getattr(model, "memory", None)
    return seq_len if memory is None else memory.context


def reader_for(model: Decoder, seq_len: int) -> tuple[CachedDecoder, int]:
    """Return the incremental reader of a model, and the maximum number of tokens that it reads."""
    memory = getattr(model, "memory", None)
    reader = CachedDecoder(model) if memory is None else memory.reader(model, seq_len)
    return reader, context_of(model, seq_len)


@contextmanager
def incremental_reader(model: Decoder, seq_len: int) -> Iterator[tuple[CachedDecoder, int]]:
    """Yield `reader_for`, and afterwards prepare the model for full batches again."""
    kernels = list(model.kernels)
    try:
        yield reader_for(model, seq_len)
    finally:
        model.set_attention_kernels(kernels)
        if model.memory is not None:
            model.memory.end_reading()
