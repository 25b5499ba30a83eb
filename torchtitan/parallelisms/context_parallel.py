"""Context parallel: every rank holds a part of each sequence, and attention communicates to see all of it.

There are three implementations, all exact, with documents and grouped heads. One of them replaces the model's attention
kernels, which declare the ones that they support (sequence_layout.py):

* allgather: every rank gathers all keys and values (arXiv:2407.21783, 3.3.2). One exchange per layer; memory for keys
  and values of the full sequence.
* ring, alltoall: keys and values travel around the ranks (ring_attention.py). Least memory; ranks - 1 exchanges per
  layer, overlapped with computation.
* ulysses: attention is sharded by heads instead of tokens (arXiv:2309.14509), so each rank runs the model's kernel on
  full sequences. Two exchanges per layer; the number of query heads must be divisible by cp.

All other modules of a decoder work on single tokens and need only their positions.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.core.errors import JobError
from torchtitan.parallelisms.attention_kernels import accumulation_dtype
from torchtitan.parallelisms.degrees import (
    SEQ_LEN,
    check_attention_dropout,
    check_s2_attention,
    check_sequence_length,
    check_ulysses_heads,
    is_load_balanced,
    sequence_multiples,
)
from torchtitan.parallelisms.region_attention import RegionTable
from torchtitan.parallelisms.ring_attention import (
    RegionAttentionFunction,
    Ring,
    RingAttentionFunction,
    shard_tables,
)
from torchtitan.parallelisms.sequence_layout import (
    Kernel,
    SequenceLayout,
    Tokens,
    all_parts,
    declares,
    depends_on_head_index,
    has_dropout,
    replace_parts,
    with_sinks,
)
from torchtitan.torch_internals import collectives

METHODS = ("allgather", "ring", "alltoall", "ulysses")
Mask = Any
"""What a kernel's `prepare` returns and its `forward` takes; None where only causality hides."""


def apply_context_parallel(model: nn.Module, cp_mesh: DeviceMesh, method: str, load_balance: bool) -> None:
    """Replace the attention kernels of `model` in place. The model then takes batches from `shard_sequence`.

    Kernels of layers that are no attention make their own replacement, `context_parallel(group, layout)`. Raises
    JobError if a kernel does not support the method.
    """
    for kernel in all_parts(model.kernels):
        if not hasattr(kernel, "context_parallel"):
            check_kernel_method(kernel, method)
    layout = build_layout(cp_mesh.size(), method, load_balance)
    group = cp_mesh.get_group()
    kinds: dict[str, Callable[..., nn.Module]] = {"allgather": AllGatherAttention, "ulysses": UlyssesAttention}
    kind = kinds.get(method) or partial(RingAttention, ring=Ring(group, by_all_to_all=method == "alltoall"))

    def replacement(kernel: Any) -> Any:
        by_itself = hasattr(kernel, "context_parallel")
        return kernel.context_parallel(group, layout) if by_itself else kind(kernel, group, layout)

    model.set_attention_kernels(replace_parts(kernel, replacement) for kernel in model.kernels)


def check_kernel_method(kernel: Kernel, method: str) -> None:
    """Raise a JobError if the kernel does not declare support for this context-parallel method."""
    if has_dropout(kernel):
        check_attention_dropout(method)
    elif depends_on_head_index(kernel):
        check_s2_attention(method)
    needs = {"ulysses": (), "allgather": ("accepts_query_slices", "plain_attention")}.get(method, ("plain_attention",))
    if needs and not any(declares(kernel, statement) for statement in needs):
        raise JobError(
            f"context_parallel_rotate_method {method!r} with the attention kernel {type(kernel).__name__}, which does "
            f"not declare {' or '.join(needs)}; allowed: ulysses, or a method that the kernel supports. Choose one, or "
            f"declare it in the class (parallelisms/sequence_layout.py)"
        )


def shard_sequence(
    batch: dict[str, torch.Tensor], cp_rank: int, cp_size: int, method: str, load_balance: bool
) -> dict[str, torch.Tensor]:
    """Return this rank's shards [B, S / cp_size] of tensors [B, S]. Tensors [B] of one value per sample stay unchanged.

    Raises JobError if S is not divisible.
    """
    layout = build_layout(cp_size, method, load_balance)
    needs = sequence_multiples(cp_size, 1, load_balanced=layout.headtail, sequence_parallel=False)
    split = {name for name, x in batch.items() if x.dim() > 1}
    for name in split:
        check_sequence_length(SEQ_LEN, batch[name].shape[1], needs)
    return {name: layout.shard(x, cp_rank) if name in split else x for name, x in batch.items()}


def build_layout(ranks: int, method: str, load_balance: bool) -> SequenceLayout:
    if method not in METHODS:
        raise JobError(f"context parallel method {method!r}: choose one of {', '.join(METHODS)}")
    return SequenceLayout(ranks, headtail=is_load_balanced(method, load_balance))


def gather_sequence(x: torch.Tensor, layout: SequenceLayout, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather the full sequence from the shards of all ranks: x [B, s, ...] -> [B, S, ...].

    Differentiable where all ranks compute the same from the result and the gradients of all ranks' shards are those of
    the sum over ranks: a rank then knows its shard's gradient without communication.
    """
    return _GatherSequence.apply(x, layout, group)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: SequenceLayout, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.layout, ctx.rank = layout, group.rank()
        # not every backend sends bool
        sent = x.to(torch.uint8) if x.dtype == torch.bool else x
        return layout.unshard(_all_gather(sent[None], layout.ranks, group.group_name)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.layout.ranks * ctx.layout.shard(grad, ctx.rank), None, None


def gather_documents(document_ids: torch.Tensor, ranks: int, group_name: str) -> torch.Tensor:
    """Gather the document ids [B, s] of all ranks -> [ranks, B, s]."""
    return _all_gather(document_ids.contiguous()[None], ranks, group_name)


class ContextParallelAttention(nn.Module):
    """Base class of context-parallel attention around the model's kernel, `inner`.

    `forward` maps this rank's tokens: q [B, H, s, E], k [B, K, s, E], v [B, K, s, V] -> [B, H, s, V].
    """

    def __init__(self, inner: nn.Module, group: dist.ProcessGroup, layout: SequenceLayout):
        super().__init__()
        self.inner, self.layout, self.has_dropout = inner, layout, has_dropout(inner)
        self.rank, self.group_name = group.rank(), group.group_name
        self.device_type: str | None = None
        """Type of the device to compute as; None: that of the tensors. The planner sets it."""

    def gather_documents(self, document_ids: torch.Tensor) -> torch.Tensor:
        """Gather the document ids [B, s] of all ranks -> [ranks, B, s]."""
        return gather_documents(document_ids, self.layout.ranks, self.group_name)


class KernelMask(NamedTuple):
    """A mask prepared by the model's kernel, so that this kernel computes attention itself."""

    mask: Mask


class AllGatherAttention(ContextParallelAttention):
    """Attention of this rank's queries to gathered keys and values.

    Plain attention is computed by regions, without a mask over all pairs. The model's kernel computes other attention,
    and attention within documents where it does that without such a mask.
    """

    def prepare(self, tokens: Tokens) -> Mask:
        documents = tokens.documents
        all_documents = None if documents is None else self.layout.unshard(self.gather_documents(documents))  # [B, S]
        if declares(self.inner, "plain_attention") and not self._masks_in_kernel(tokens):
            return documents if documents is None else (documents, all_documents)
        length, device = len(tokens.indices), tokens.indices.device
        local_tokens = Tokens(self.layout.positions(self.rank, length, device), documents)
        all_tokens = Tokens(torch.arange(length * self.layout.ranks, device=device), all_documents)
        return KernelMask(self.inner.prepare(local_tokens, all_tokens))

    def _masks_in_kernel(self, tokens: Tokens) -> bool:
        """Return True if the model's kernel attends within documents without a mask over all pairs."""
        if tokens.documents is None or not declares(self.inner, "accepts_query_slices"):
            return False
        return any(uses(tokens) for name in ("uses_flex", "uses_regions") if (uses := getattr(self.inner, name, None)))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Mask,
        *random_keys: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend: q [B, H, s, E] -> [B, H, s, V]. `random_keys` [B, s]: of this rank, for attention dropout."""
        widths = (k.shape[-1], v.shape[-1])
        both = GatherSequence.apply(torch.cat((k, v), dim=-1), self.layout, self.group_name)
        k, v = both.split(widths, dim=-1)  # [B, K, S, E] and [B, K, S, V]
        if isinstance(mask, KernelMask):
            return self.inner(q, k, v, mask.mask, *random_keys, **with_sinks(sinks))
        regions = self.layout.visible_in_sequence(self.rank, q.shape[2], self.inner.causal)
        return RegionAttentionFunction.apply(q, k, v, regions, *(mask or (None, None)), self.device_type, sinks)


class RingAttention(ContextParallelAttention):
    """Ring attention: keys and values travel around the ranks."""

    def __init__(self, inner: nn.Module, group: dist.ProcessGroup, layout: SequenceLayout, ring: Ring):
        super().__init__(inner, group, layout)
        self.ring = ring

    def prepare(self, tokens: Tokens) -> Mask:
        if tokens.documents is None:
            return None
        documents = self.gather_documents(tokens.documents)
        if (self.device_type or documents.device.type) == "cpu":
            return shard_tables(documents, self.rank, self.layout, self.inner.causal)
        return documents

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
        documents, tables = (None, mask.regions) if isinstance(mask, RegionTable) else (mask, None)
        options = self.ring, self.layout, self.inner.causal, self.device_type
        return RingAttentionFunction.apply(q, k, v, documents, tables, *options)


class UlyssesAttention(ContextParallelAttention):
    """Ulysses: attention over all tokens for a share of the heads."""

    def prepare(self, tokens: Tokens) -> Mask:
        indices = torch.arange(len(tokens.indices) * self.layout.ranks, device=tokens.indices.device)
        documents = tokens.documents
        return self.inner.prepare(
            Tokens(indices, None if documents is None else self.layout.unshard(self.gather_documents(documents)))
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Mask,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        ranks, heads, key_heads = self.layout.ranks, q.shape[1], k.shape[1]
        check_ulysses_heads(ranks, heads)
        # repeat key/value heads until `ranks` divides them; the query heads are divisible by both, so by the lcm too
        repeats = math.lcm(key_heads, ranks) // key_heads
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        shards = [x.transpose(1, 2).unflatten(2, (ranks, -1)).flatten(3).movedim(2, 0) for x in (q, k, v)]
        # [ranks, B, s, this rank's heads x widths]
        exchanged = ExchangeShards.apply(torch.cat(shards, dim=-1), self.group_name)
        sequences = exchanged.transpose(0, 1).flatten(1, 2).split([x.shape[-1] for x in shards], dim=-1)
        heads_first = [
            x.unflatten(-1, (-1, width)).transpose(1, 2)
            for x, width in zip(sequences, (q.shape[-1], k.shape[-1], v.shape[-1]), strict=True)
        ]
        local_sinks = None if sinks is None else sinks.chunk(ranks)[self.rank]
        y = self.inner(*heads_first, mask, **with_sinks(local_sinks))  # [B, H / ranks, S, V]
        y = y.transpose(1, 2).unflatten(1, (ranks, -1)).movedim(1, 0)  # [ranks, B, s, H / ranks, V]
        return ExchangeShards.apply(y, self.group_name).permute(1, 0, 3, 2, 4).flatten(1, 2)


class GatherSequence(torch.autograd.Function):
    """Gather x [..., s, E] of all ranks -> [..., S, E] in the sequence's order.

    Backward sends each rank the gradients of its tokens by all-to-all, and sums them there in float32 or wider. For
    bfloat16 this sends half the bytes of a float32 reduce-scatter, and always sums in rank order.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: SequenceLayout, group_name: str) -> torch.Tensor:
        ctx.layout, ctx.group_name = layout, group_name
        pieces = torch.stack(x.unflatten(-2, (layout.pieces_per_rank, -1)).unbind(-3))
        all_pieces = _all_gather(pieces, layout.ranks, group_name)
        return torch.cat([all_pieces[index] for index in layout.sequence_order], dim=-2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layout = ctx.layout
        pieces = grad.unflatten(-2, (layout.pieces, -1)).unbind(-3)
        sent = torch.stack([pieces[piece] for piece in layout.rank_order])
        parts = _all_to_all(sent, layout.ranks, ctx.group_name).unflatten(0, (layout.ranks, -1))
        summed = parts.sum(0, dtype=accumulation_dtype(grad.dtype)).to(grad.dtype)
        return torch.cat(summed.unbind(0), dim=-2), None, None


class ExchangeShards(torch.autograd.Function):
    """All-to-all of x [ranks, ...]: rank r's x[p] becomes rank p's x[r]. It is its own inverse and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group_name: str) -> torch.Tensor:
        ctx.group_name = group_name
        return _all_to_all(x, x.shape[0], group_name)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _all_to_all(grad, grad.shape[0], ctx.group_name), None


# Functional collectives without autograd: the compiler can trace them, and selective recompute can save their results.


def _all_gather(x: torch.Tensor, ranks: int, group_name: str) -> torch.Tensor:
    """Gather the rows of all ranks: [n, ...] -> [ranks * n, ...]."""
    return collectives.wait_tensor(collectives.all_gather_into_tensor(x.contiguous(), ranks, group_name))


def _all_to_all(x: torch.Tensor, ranks: int, group_name: str) -> torch.Tensor:
    """Send n rows to each rank and receive n from each: [ranks * n, ...] -> [ranks * n, ...]."""
    rows = [x.shape[0] // ranks] * ranks
    return collectives.wait_tensor(collectives.all_to_all_single(x.contiguous(), rows, rows, group_name))
