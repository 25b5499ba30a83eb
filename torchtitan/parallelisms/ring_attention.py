"""Blockwise attention, and ring attention (arXiv:2310.01889) built on it: the arithmetic of context parallel.

Blockwise: attention over several regions of queries x keys is merged to the exact result by online softmax
(arXiv:1805.02867). Each region gives its output and the logsumexp of its scores, which determines its weight in the
merge. Backward needs no merge: from the full row's output and logsumexp, the kernel computes the region's contribution
to the gradients, and these are added. Both directions call torch's kernels below autograd (attention_kernels.py).

Outputs are merged and gradients accumulated in float32 or wider. On a CPU, narrower types are also computed in float32:
its bfloat16 kernel is slow for few keys (attention_kernels.py) and would round a region before the merge.

Ring: keys and values travel from rank to rank, so no rank ever holds all of them. Each of `ranks` steps attends to the
current shard while the next one arrives. Backward sends keys and values around again. A shard's gradient follows it,
and every rank adds to it: from the first rank that it visits, ranks - 1 messages return it to its owner, in float32 or
wider. A shard that causality hides completely is passed on without computation.

Letters of the shapes: B samples, H query heads, K key/value heads, Q and S tokens of queries and of keys, E width of a
head's query and key, V width of its value, at most E; s tokens of one rank.
"""

import math
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.parallelisms.attention_kernels import (
    accumulation_dtype,
    block_backward,
    block_forward,
    kernel_dtype,
    mask_bias,
)
from torchtitan.parallelisms.attention_sinks import join_sinks, sinks_gradient
from torchtitan.parallelisms.region_attention import (
    RegionTable,
    attend_by_regions,
    attend_by_regions_backward,
    region_table,
)
from torchtitan.parallelisms.sequence_layout import Region, SequenceLayout
from torchtitan.torch_internals import collectives

Documents = tuple[torch.Tensor, torch.Tensor]
"""Document ids of the queries [B, Q] and of the keys [B, S]."""


class RegionAttentionFunction(torch.autograd.Function):
    """Attention over a list of regions: q [B, H, Q, E], k [B, K, S, E], v [B, K, S, V] -> [B, H, Q, V].

    Each query must see at least one key in some region. `device_type`: as in kernel_dtype. `sinks`: [H], or None
    (attention_sinks.py).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        regions: list[Region],
        query_documents: torch.Tensor | None,
        key_documents: torch.Tensor | None,
        device_type: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        documents = None if query_documents is None else (query_documents, key_documents)
        attention = BlockwiseAttention(q, v.shape[-1], device_type)
        for region in regions:
            attention.add(k, v, region, documents)
        results = attention.results(sinks)
        ctx.save_for_backward(q, k, v, query_documents, key_documents, sinks, *results)
        ctx.regions, ctx.device_type = regions, device_type
        return results[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, query_documents, key_documents, sinks, *results = ctx.saved_tensors
        documents = None if query_documents is None else (query_documents, key_documents)
        gradients = BlockwiseGradients(q, grad, results, ctx.device_type)
        wide = accumulation_dtype(k.dtype)
        grad_k, grad_v = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
        for region in ctx.regions:
            gradients.add(k, v, region, documents, grad_k, grad_v)
        of_inputs = gradients.grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)
        return *of_inputs, None, None, None, None, gradients.of_sinks(sinks)


class BlockwiseAttention:
    """An accumulator for the output [B, H, Q, width] of queries q [B, H, Q, E], one region at a time."""

    def __init__(self, q: torch.Tensor, width: int, device_type: str | None = None):
        wide = accumulation_dtype(q.dtype)
        self.dtype, self.q = q.dtype, q.to(kernel_dtype(q, device_type))
        self.out = torch.zeros((*q.shape[:-1], width), dtype=wide, device=q.device)
        self.logsumexp = torch.full(q.shape[:-1], -math.inf, dtype=wide, device=q.device)
        self.extras: tuple[torch.Tensor, ...] = ()

    def add(self, k: torch.Tensor, v: torch.Tensor, region: Region, mask: Documents | RegionTable | None) -> None:
        """Merge in the region of keys k [B, K, S, E] and values v [B, K, S, width], by online softmax.

        The regions of a table are within `region`.
        """
        rows = slice(region.first_query, region.last_query)
        if isinstance(mask, RegionTable):
            keys = (x.to(self.q.dtype) for x in (k, v))
            part, part_logsumexp = (x[:, :, rows] for x in attend_by_regions(self.q, *keys, mask.regions, 0))
        else:
            q, k, v, bias = _select_region(self.q, k, v, region, mask)
            part, part_logsumexp, self.extras = block_forward(q, k, v, region.causal, bias)
        out, logsumexp = self.out[:, :, rows], self.logsumexp[:, :, rows]
        total = torch.logaddexp(logsumexp, part_logsumexp)
        out.mul_((logsumexp - total).exp_()[..., None]).addcmul_(
            part.to(out.dtype), (part_logsumexp - total).exp_()[..., None]
        )
        logsumexp.copy_(total)

    def results(self, sinks: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Return the tensors for backward: the output [B, H, Q, V] in q's dtype, the logsumexp [B, H, Q], and the
        kernel's extra results (random state). Both have `sinks` [H] joined, if there are any.
        """
        out, logsumexp = join_sinks(self.out, self.logsumexp, sinks)
        return (out.to(self.dtype), logsumexp, *self.extras)


class BlockwiseGradients:
    """An accumulator for gradients, one region at a time: `grad_q` for queries q [B, H, Q, E], from the output's
    gradient `grad` [B, H, Q, V].

    `results`: from BlockwiseAttention.results, after all regions.
    """

    def __init__(
        self, q: torch.Tensor, grad: torch.Tensor, results: list[torch.Tensor], device_type: str | None = None
    ):
        self.q = q.to(kernel_dtype(q, device_type))
        self.grad, self.out = grad.to(self.q.dtype), results[0].to(self.q.dtype)
        self.logsumexp, self.extras = results[1], tuple(results[2:])
        self.grad_q = torch.zeros(q.shape, dtype=accumulation_dtype(q.dtype), device=q.device)

    def of_sinks(self, sinks: torch.Tensor | None) -> torch.Tensor | None:
        """Return the gradient of the sinks [H]; None without them."""
        return None if sinks is None else sinks_gradient(self.grad, self.out, self.logsumexp, sinks)

    def add(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        region: Region,
        mask: Documents | RegionTable | None,
        grad_k: torch.Tensor,
        grad_v: torch.Tensor,
    ) -> None:
        """Add the region's gradients to `grad_q`, and to `grad_k` and `grad_v`, of the shapes of k and v."""
        if isinstance(mask, RegionTable):
            inputs = self.grad, self.q, *(x.to(self.q.dtype) for x in (k, v)), self.out, self.logsumexp
            parts = attend_by_regions_backward(*inputs, mask.regions, 0)
            for total, part in zip((self.grad_q, grad_k, grad_v), parts, strict=True):
                total.add_(part)
            return
        q, k, v, bias = _select_region(self.q, k, v, region, mask)
        rows, columns = slice(region.first_query, region.last_query), slice(region.first_key, region.last_key)
        of_row = (x[:, :, rows].contiguous() for x in (self.grad, self.out, self.logsumexp))
        parts = block_backward(q, k, v, region.causal, bias, *of_row, self.extras)
        for total, part in zip(
            (self.grad_q[:, :, rows], grad_k[:, :, columns], grad_v[:, :, columns]), parts, strict=True
        ):
            total.add_(part)


def _select_region(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, region: Region, documents: Documents | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return q, k and v of the region, and its mask as a bias [B, 1, Q, S], or None if no documents are given."""
    rows, columns = slice(region.first_query, region.last_query), slice(region.first_key, region.last_key)
    q, k, v = q[:, :, rows], k[:, :, columns].to(q.dtype), v[:, :, columns].to(q.dtype)
    if documents is None:
        return q, k, v, None
    visible = documents[0][:, rows, None] == documents[1][:, None, columns]
    if region.causal:
        visible = visible.tril()
    return q, k, v, mask_bias(visible, q)[:, None]


class Ring:
    """A ring over the ranks of a group: each sends to the next rank and receives from the previous one.

    `by_all_to_all`: use a functional collective, which the compiler and selective recompute can handle; otherwise
    point-to-point messages.
    """

    def __init__(self, group: dist.ProcessGroup, by_all_to_all: bool):
        self.group, self.by_all_to_all = group, by_all_to_all
        self.ranks, self.rank = group.size(), group.rank()
        self.next, self.previous = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks

    def start(self, x: torch.Tensor) -> tuple[Any, ...]:
        """Start sending x, which is contiguous and has the same shape on all ranks. Pass the result to `finish`."""
        if self.by_all_to_all:
            sent, received = [0] * self.ranks, [0] * self.ranks
            sent[self.next] = received[self.previous] = x.shape[0]
            arriving = collectives.all_to_all_single(x, received, sent, self.group.group_name)
            return arriving, [], x
        arriving = torch.empty_like(x)
        messages = [
            dist.P2POp(dist.isend, x, dist.get_global_rank(self.group, self.next), self.group),
            dist.P2POp(dist.irecv, arriving, dist.get_global_rank(self.group, self.previous), self.group),
        ]
        return arriving, dist.batch_isend_irecv(messages), x  # x must live until it is sent

    def finish(self, started: tuple[Any, ...]) -> torch.Tensor:
        """Wait for the previous rank's tensor and return it, of the same shape as the tensor sent."""
        arriving, messages, _ = started
        for message in messages:
            message.wait()
        return collectives.wait_tensor(arriving) if self.by_all_to_all else arriving


class RingAttentionFunction(torch.autograd.Function):
    """Ring attention on this rank's shards: q [B, H, s, E], k [B, K, s, E], v [B, K, s, V] -> [B, H, s, V].

    `documents`: the document ids of all ranks' tokens, [ranks, B, s], or None. `tables`: from `shard_tables`, in their
    place, or None. `device_type`: as in kernel_dtype.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        documents: torch.Tensor | None,
        tables: torch.Tensor | None,
        ring: Ring,
        layout: SequenceLayout,
        causal: bool,
        device_type: str | None = None,
    ) -> torch.Tensor:
        shard, widths = torch.cat((k, v), dim=-1), (k.shape[-1], v.shape[-1])
        attention = BlockwiseAttention(q, v.shape[-1], device_type)
        for step in range(ring.ranks):
            source = (ring.rank - step) % ring.ranks
            arriving = ring.start(shard) if step < ring.ranks - 1 else None
            region = layout.visible_in_shard(ring.rank, source, q.shape[2], causal)
            if region is not None:
                mask = _mask_of(documents, tables, ring.rank, source)
                attention.add(*shard.split(widths, dim=-1), region, mask)
            if arriving is not None:
                shard = ring.finish(arriving)
        results = attention.results()
        ctx.save_for_backward(q, k, v, documents, tables, *results)
        ctx.ring, ctx.layout, ctx.causal, ctx.device_type = ring, layout, causal, device_type
        return results[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, documents, tables, *results = ctx.saved_tensors
        ring, layout = ctx.ring, ctx.layout
        gradients = BlockwiseGradients(q, grad, results, ctx.device_type)
        shard, widths = torch.cat((k, v), dim=-1), (k.shape[-1], v.shape[-1])
        local_grad = torch.zeros(shard.shape, dtype=accumulation_dtype(k.dtype), device=k.device)
        travelling = None
        for step in range(ring.ranks):
            source = (ring.rank - step) % ring.ranks
            arriving = ring.start(shard) if step < ring.ranks - 1 else None
            grad_shard = local_grad if step == 0 else torch.zeros_like(local_grad)
            region = layout.visible_in_shard(ring.rank, source, q.shape[2], ctx.causal)
            if region is not None:
                mask = _mask_of(documents, tables, ring.rank, source)
                gradients.add(*shard.split(widths, -1), region, mask, *grad_shard.split(widths, -1))
            if travelling is not None:
                grad_shard += ring.finish(travelling)
            if step > 0:
                travelling = ring.start(grad_shard)
            if arriving is not None:
                shard = ring.finish(arriving)
        if travelling is not None:
            local_grad += ring.finish(travelling)
        grad_k, grad_v = local_grad.to(k.dtype).split(widths, dim=-1)
        return gradients.grad_q.to(q.dtype), grad_k, grad_v, None, None, None, None, None, None


def _mask_of(
    documents: torch.Tensor | None, tables: torch.Tensor | None, rank: int, source: int
) -> Documents | RegionTable | None:
    if tables is not None:
        return RegionTable(tables[source])
    return None if documents is None else (documents[rank], documents[source])


def shard_tables(documents: torch.Tensor, rank: int, layout: SequenceLayout, causal: bool) -> RegionTable:
    """Return the regions of the queries of `rank` and the keys of each rank: int32 [ranks, B s, 6].

    `documents`: [ranks, B, s] on a CPU.
    """
    ranks, samples, length = documents.shape
    indices, tables = torch.arange(length), documents.new_zeros(ranks, samples * length, 6, dtype=torch.int32)
    for source in range(ranks):
        region = layout.visible_in_shard(rank, source, length, causal)
        if region is None:
            continue
        sides = (slice(region.first_query, region.last_query), slice(region.first_key, region.last_key))
        segments = [documents[of][:, side] for of, side in zip((rank, source), sides, strict=True)]
        table = region_table(segments[0], indices[sides[0]], segments[1], indices[sides[1]], region.causal, 0)
        shift = [0, region.first_query, region.first_query, region.first_key, region.first_key, 0]
        tables[source, : len(table)] = table + torch.tensor(shift, dtype=torch.int32) * (table[:, 2:3] > 0)
    return RegionTable(tables)
