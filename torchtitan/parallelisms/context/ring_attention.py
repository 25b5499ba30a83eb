"""Ring attention (arXiv:2310.01889): keys and values travel from rank to rank, and no rank ever holds them all.

Each of `ranks` steps attends to the share that is here while the next one arrives; the parts are joined (see
block_attention). Backward sends keys and values round again, and behind each share its gradient, to which every rank
adds: from the first rank it visits, ranks - 1 messages until it is home. Gradients travel in float32 or wider. A share
of which causality hides all is passed on unread.
"""

from typing import Any

import torch
import torch.distributed as dist

from torchtitan.parallelisms.context.block_attention import JoinedAttention, JoinedGradients, accumulation_type
from torchtitan.parallelisms.context.sequence_layout import SequenceLayout


class Ring:
    """Messages to the next rank of a group and from the one before, all ranks at the same time.

    With `by_all_to_all` as a collective, which the compiler and selective recompute know; else point to point.
    """

    def __init__(self, group: dist.ProcessGroup, by_all_to_all: bool):
        self.group, self.by_all_to_all = group, by_all_to_all
        self.ranks, self.rank = group.size(), group.rank()
        self.next, self.previous = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks

    def start(self, x: torch.Tensor) -> tuple[Any, ...]:
        """Send x, contiguous and the same shape on all ranks; what it returns goes to `finish`."""
        if self.by_all_to_all:
            sent, received = [0] * self.ranks, [0] * self.ranks
            sent[self.next] = received[self.previous] = x.shape[0]
            arriving = torch.ops._c10d_functional.all_to_all_single(x, received, sent, self.group.group_name)
            return arriving, [], x
        arriving = torch.empty_like(x)
        messages = [
            dist.P2POp(dist.isend, x, dist.get_global_rank(self.group, self.next), self.group),
            dist.P2POp(dist.irecv, arriving, dist.get_global_rank(self.group, self.previous), self.group),
        ]
        return arriving, dist.batch_isend_irecv(messages), x  # x must live until it is sent

    def finish(self, started: tuple[Any, ...]) -> torch.Tensor:
        """What the rank before has sent, of the shape of what was sent from here."""
        arriving, messages, _ = started
        for message in messages:
            message.wait()
        return torch.ops._c10d_functional.wait_tensor(arriving) if self.by_all_to_all else arriving


class RingAttention(torch.autograd.Function):
    """q [B, H, s, E], k [B, K, s, E], v [B, K, s, V], this rank's shares -> [B, H, s, V]. documents: [ranks, B, s]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        documents: torch.Tensor | None,
        ring: Ring,
        layout: SequenceLayout,
        causal: bool,
    ) -> torch.Tensor:
        share, widths = torch.cat((k, v), dim=-1), (k.shape[-1], v.shape[-1])
        attention = JoinedAttention(q, v.shape[-1])
        for step in range(ring.ranks):
            source = (ring.rank - step) % ring.ranks
            arriving = ring.start(share) if step < ring.ranks - 1 else None
            region = layout.seen_in_share(ring.rank, source, q.shape[2], causal)
            if region is not None:
                attention.add(*share.split(widths, dim=-1), region, _pair(documents, ring.rank, source))
            if arriving is not None:
                share = ring.finish(arriving)
        results = attention.results()
        ctx.save_for_backward(q, k, v, documents, *results)
        ctx.ring, ctx.layout, ctx.causal = ring, layout, causal
        return results[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, documents, *results = ctx.saved_tensors
        ring, layout = ctx.ring, ctx.layout
        gradients = JoinedGradients(q, grad, results)
        share, widths = torch.cat((k, v), dim=-1), (k.shape[-1], v.shape[-1])
        grad_own = torch.zeros(share.shape, dtype=accumulation_type(k.dtype), device=k.device)
        travelling = None
        for step in range(ring.ranks):
            source = (ring.rank - step) % ring.ranks
            arriving = ring.start(share) if step < ring.ranks - 1 else None
            grad_share = grad_own if step == 0 else torch.zeros_like(grad_own)
            region = layout.seen_in_share(ring.rank, source, q.shape[2], ctx.causal)
            if region is not None:
                pair = _pair(documents, ring.rank, source)
                gradients.add(*share.split(widths, -1), region, pair, *grad_share.split(widths, -1))
            if travelling is not None:
                grad_share += ring.finish(travelling)
            if step > 0:
                travelling = ring.start(grad_share)
            if arriving is not None:
                share = ring.finish(arriving)
        if travelling is not None:
            grad_own += ring.finish(travelling)
        grad_k, grad_v = grad_own.to(k.dtype).split(widths, dim=-1)
        return gradients.grad_q.to(q.dtype), grad_k, grad_v, None, None, None, None


def _pair(documents: torch.Tensor | None, rank: int, source: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    return None if documents is None else (documents[rank], documents[source])
