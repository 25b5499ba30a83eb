"""Context parallel: every rank holds a part of each sequence, and attention reaches the rest of it.

Three ways, all exact and all with documents and grouped heads, swapped in for the model's attention kernel:

* allgather: every rank gathers all keys and values (arXiv:2407.21783, 3.3.2). One exchange a layer; memory of a whole
  sequence of keys and values.
* ring, alltoall: keys and values travel round (ring_attention). Least memory; ranks - 1 exchanges, behind computation.
* ulysses: heads are dealt out instead of tokens (arXiv:2309.14509), so each rank runs the model's own kernel on whole
  sequences. Two exchanges a layer; heads must divide.

Everything else in a decoder works on single tokens and needs no more than their positions.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from torchtitan.parallelisms.block_attention import RegionAttention, accumulation_type
from torchtitan.parallelisms.ring_attention import Ring, RingAttention
from torchtitan.parallelisms.sequence_layout import SequenceLayout

collectives = torch.ops._c10d_functional
METHODS = ("allgather", "ring", "alltoall", "ulysses")
Mask = Any
"""What a kernel's `prepare` returns and its `forward` takes; None where only causality hides."""


def apply_context_parallel(model: nn.Module, cp_mesh: DeviceMesh, method: str, load_balance: bool) -> None:
    """Swap the attention kernel of `model` in place. It then takes what `shard_sequence` gives, positions included."""
    layout = sequence_layout(cp_mesh.size(), method, load_balance)
    group = cp_mesh.get_group()
    if method == "allgather":
        model.set_attention_kernel(GatheredAttention(model.kernel, group, layout))
    elif method == "ulysses":
        model.set_attention_kernel(HeadwiseAttention(model.kernel, group, layout))
    else:
        ring = Ring(group, by_all_to_all=method == "alltoall")
        model.set_attention_kernel(TravellingAttention(model.kernel, group, layout, ring))


def shard_sequence(
    batch: dict[str, torch.Tensor], cp_rank: int, cp_size: int, method: str, load_balance: bool
) -> dict[str, torch.Tensor]:
    """This rank's tokens of tensors [B, S]: [B, S / cp_size] each. ValueError where S does not divide."""
    layout = sequence_layout(cp_size, method, load_balance)
    for name, x in batch.items():
        if x.shape[1] % layout.pieces:
            multiple = f"2 x {cp_size}, a head and a tail each" if layout.headtail else f"{cp_size} ranks"
            remedy = ", or set parallelism.context_parallel_load_balancer to none" * layout.headtail
            raise ValueError(
                f"{name} has {x.shape[1]} tokens per sequence; context parallel needs a multiple of {layout.pieces} "
                f"({multiple}): change training.seq_len (validation.seq_len){remedy}"
            )
    return {name: layout.share(x, cp_rank) for name, x in batch.items()}


def sequence_layout(ranks: int, method: str, load_balance: bool) -> SequenceLayout:
    """Ulysses keeps the order of the sequence whatever `load_balance` says: with it all ranks have the same work."""
    if method not in METHODS:
        raise ValueError(f"context parallel method {method!r}: choose one of {', '.join(METHODS)}")
    return SequenceLayout(ranks, headtail=load_balance and method != "ulysses")


class ContextParallelAttention(nn.Module):
    """A rank's place in its group, and the model's own kernel.

    `forward` takes and gives this rank's tokens: q [B, H, s, E], k [B, K, s, E], v [B, K, s, V] -> [B, H, s, V].
    """

    def __init__(self, inner: nn.Module, group: dist.ProcessGroup, layout: SequenceLayout):
        super().__init__()
        self.inner, self.layout = inner, layout
        self.rank, self.group_name = group.rank(), group.group_name

    def gather_documents(self, document_ids: torch.Tensor) -> torch.Tensor:
        """[B, s] of each rank -> [ranks, B, s]"""
        return _all_gather(document_ids.contiguous()[None], self.layout.ranks, self.group_name)

    def in_sequence(self, shares: torch.Tensor) -> torch.Tensor:
        """[ranks, B, s] -> [B, S]"""
        pieces = shares.unflatten(2, (self.layout.pieces_per_rank, -1)).transpose(1, 2).flatten(0, 1)
        return torch.cat([pieces[index] for index in self.layout.sequence_order], dim=1)


class GatheredAttention(ContextParallelAttention):
    """This rank's queries, all keys and values."""

    def prepare(self, document_ids: torch.Tensor | None) -> Mask:
        if document_ids is None:
            return None
        everywhere = self.in_sequence(self.gather_documents(document_ids))  # [B, S]
        backend = self.inner.backend
        if backend == "flex" or (backend == "auto" and document_ids.is_cuda):
            return self._block_mask(document_ids, everywhere)
        return document_ids, everywhere

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
        widths = (k.shape[-1], v.shape[-1])
        both = GatherSequence.apply(torch.cat((k, v), dim=-1), self.layout, self.group_name)
        k, v = both.split(widths, dim=-1)  # [B, K, S, E] and [B, K, S, V]
        if isinstance(mask, BlockMask):
            return self.inner(q, k, v, mask)
        regions = self.layout.seen_in_sequence(self.rank, q.shape[2])
        return RegionAttention.apply(q, k, v, regions, *(mask or (None, None)))

    def _block_mask(self, document_ids: torch.Tensor, everywhere: torch.Tensor) -> BlockMask:
        batch, length = document_ids.shape
        positions = self.layout.positions(self.rank, length, document_ids.device)  # [s]

        def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return (positions[q] >= k) & (document_ids[b, q] == everywhere[b, k])

        return create_block_mask(
            visible, batch, None, length, everywhere.shape[1], document_ids.device, _compile=document_ids.is_cuda
        )  # compiled, it never writes down a mask of all pairs


class TravellingAttention(ContextParallelAttention):
    """Keys and values go round the ranks."""

    def __init__(self, inner: nn.Module, group: dist.ProcessGroup, layout: SequenceLayout, ring: Ring):
        super().__init__(inner, group, layout)
        self.ring = ring

    def prepare(self, document_ids: torch.Tensor | None) -> Mask:
        return None if document_ids is None else self.gather_documents(document_ids)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
        return RingAttention.apply(q, k, v, mask, self.ring, self.layout)


class HeadwiseAttention(ContextParallelAttention):
    """All tokens, a share of the heads."""

    def prepare(self, document_ids: torch.Tensor | None) -> Mask:
        if document_ids is None:
            return self.inner.prepare(None)
        return self.inner.prepare(self.in_sequence(self.gather_documents(document_ids)))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
        ranks, heads, key_heads = self.layout.ranks, q.shape[1], k.shape[1]
        if heads % ranks:
            raise ValueError(
                f"{heads} query heads (of this tensor-parallel rank) cannot be dealt out to {ranks} context-parallel "
                f"ranks by ulysses: parallelism.context_parallel_degree must divide them, or set "
                f"parallelism.context_parallel_rotate_method to allgather or ring"
            )
        # too few key/value heads are repeated until they divide; the query heads divide by both, so by their multiple
        repeats = math.lcm(key_heads, ranks) // key_heads
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        shares = [x.transpose(1, 2).unflatten(2, (ranks, -1)).flatten(3).movedim(2, 0) for x in (q, k, v)]
        dealt = Swap.apply(torch.cat(shares, dim=-1), self.group_name)  # [ranks, B, s, this rank's heads x widths]
        whole = dealt.transpose(0, 1).flatten(1, 2).split([x.shape[-1] for x in shares], dim=-1)
        heads_first = [
            x.unflatten(-1, (-1, width)).transpose(1, 2)
            for x, width in zip(whole, (q.shape[-1], k.shape[-1], v.shape[-1]), strict=True)
        ]
        y = self.inner(*heads_first, mask)  # [B, H / ranks, S, V]
        y = y.transpose(1, 2).unflatten(1, (ranks, -1)).movedim(1, 0)  # [ranks, B, s, H / ranks, V]
        return Swap.apply(y, self.group_name).permute(1, 0, 3, 2, 4).flatten(1, 2)


class GatherSequence(torch.autograd.Function):
    """x [..., s, E] of each rank -> [..., S, E] in the sequence's order. Backward sends each rank its gradients.

    They are added up there, in float32 or wider: half of what a reduce-scatter in float32 would send of bfloat16, and
    always in the ranks' order.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: SequenceLayout, group_name: str) -> torch.Tensor:
        ctx.layout, ctx.group_name = layout, group_name
        pieces = torch.stack(x.unflatten(-2, (layout.pieces_per_rank, -1)).unbind(-3))
        everywhere = _all_gather(pieces, layout.ranks, group_name)
        return torch.cat([everywhere[index] for index in layout.sequence_order], dim=-2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layout = ctx.layout
        pieces = grad.unflatten(-2, (layout.pieces, -1)).unbind(-3)
        sent = torch.stack([pieces[piece] for piece in layout.rank_order])
        parts = _all_to_all(sent, layout.ranks, ctx.group_name).unflatten(0, (layout.ranks, -1))
        summed = parts.sum(0, dtype=accumulation_type(grad.dtype)).to(grad.dtype)
        return torch.cat(summed.unbind(0), dim=-2), None, None


class Swap(torch.autograd.Function):
    """x [ranks, ...]: rank r's x[p] becomes rank p's x[r]. Its own inverse, and so its own backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group_name: str) -> torch.Tensor:
        ctx.group_name = group_name
        return _all_to_all(x, x.shape[0], group_name)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _all_to_all(grad, grad.shape[0], ctx.group_name), None


# The functional collectives below autograd: the compiler traces them, and selective recompute keeps their results.


def _all_gather(x: torch.Tensor, ranks: int, group_name: str) -> torch.Tensor:
    """[n, ...] -> [ranks * n, ...]"""
    return collectives.wait_tensor(collectives.all_gather_into_tensor(x.contiguous(), ranks, group_name))


def _all_to_all(x: torch.Tensor, ranks: int, group_name: str) -> torch.Tensor:
    """[ranks * n, ...], of which each rank gets n rows -> [ranks * n, ...], n rows of each rank"""
    rows = [x.shape[0] // ranks] * ranks
    return collectives.wait_tensor(collectives.all_to_all_single(x.contiguous(), rows, rows, group_name))
