"""A mixture-of-experts layer and the transformer block around it.

The layer is steps that know no communication: route and dispatch (order the tokens by expert), experts, combine (back
to the tokens). What sends tokens to the ranks of their experts goes around the second; the block is the layer's steps
between attention and the residual. All shapes are known before the values are, and nothing waits for the device.

Letters of the shapes: B samples, S tokens, N = B S, D width, E experts, k experts of a token.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import nn

from torchtitan.models.decoder import Residual
from torchtitan.models.layers import SwiGLU, autocast_off
from torchtitan.models.moe import MoEArgs
from torchtitan.models.moe.experts import Experts
from torchtitan.models.moe.router import Router, count
from torchtitan.parallelisms.steps import Notes, RoutedExperts, Segment, Stepwise


class Order(NamedTuple):
    """How N k copies of tokens, copy j of token n being number n k + j, are sorted by expert. All int64."""

    copies: torch.Tensor  # [N k], which copy stands in each row
    rows: torch.Tensor  # [N k], in which row each copy stands
    sizes: torch.Tensor  # [E], rows of each expert


class MoE(Stepwise):
    def __init__(self, args: MoEArgs):
        super().__init__()
        self.args = args
        self.router = Router(args)
        self.experts = Experts(args.dim, args.expert_dim, args.n_experts)
        self.shared_experts = None
        if args.n_shared_experts:
            self.shared_experts = SwiGLU(args.dim, args.n_shared_experts * args.expert_dim)

    def steps(self) -> tuple[Segment | RoutedExperts, ...]:
        """x [B, S, D] -> out [B, S, D]. Shared experts need nothing of the others, and can run while tokens travel."""
        shared = () if self.shared_experts is None else ("s",)
        return (
            Segment("route", self._to_experts, ("x",), ("w", "xs"), light=True),
            RoutedExperts("experts", self.experts, "xs", "ys"),
            *(Segment("shared_experts", lambda _, x: self.shared_experts(x), ("x",), (name,)) for name in shared),
            Segment("rest", self._to_tokens, ("w", "ys", *shared), ("out",), light=True),
        )

    def _to_experts(self, notes: Notes, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B, S, D] -> weights [N, k], rows sorted by expert [N k, D]"""
        ids, weights = self.route(x, notes.get("ids"))
        notes.once("ids", lambda: ids)
        xs, order = self.dispatch(x, ids, weights)
        notes.once("order", lambda: order)
        notes.once("counts", lambda: order.sizes)
        notes["shape"] = x.shape
        return weights, xs

    def _to_tokens(self, notes: Notes, weights: torch.Tensor, ys: torch.Tensor, *shared: torch.Tensor) -> torch.Tensor:
        """weights [N, k], rows of experts [N k, D], and perhaps what shared experts made [B, S, D] -> [B, S, D]"""
        y = self.combine(ys, weights, notes["order"]).view(notes["shape"])
        return y + shared[0] if shared else y

    def route(self, x: torch.Tensor, ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B, S, D] -> ids and weights [N, k]. The weights carry the gradient, of an auxiliary loss too. `ids` that
        were chosen before are kept, and not counted again.
        """
        return self.router(x, ids)

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, Order]:
        """x [B, S, D] -> its rows sorted by expert, [N k, D], and their order."""
        order = sort_by_expert(ids, self.args.n_experts)
        xs = _ToExperts.apply(x.flatten(0, 1), order.copies, order.rows)
        if self.args.score_before_experts:
            xs = (xs * weights.flatten()[order.copies, None]).to(xs.dtype)
        return xs, order

    def combine(self, ys: torch.Tensor, weights: torch.Tensor, order: Order) -> torch.Tensor:
        """ys [N k, D] sorted by expert -> the weighted sum of each token's, [N, D]."""
        copies = _ToTokens.apply(ys, order.copies, order.rows).unflatten(0, weights.shape)  # [N, k, D]
        if self.args.score_before_experts:
            return copies.sum(1)
        with autocast_off(ys.device.type):
            return torch.bmm(weights[:, None], copies.to(weights.dtype)).squeeze(1).to(ys.dtype)


class MoEBlock(Residual):
    """A transformer block, with experts where others have a feed-forward."""

    def __init__(
        self,
        args: MoEArgs,
        attention: nn.Module,
        norm: Callable[[], nn.Module] | None = None,
        order: Literal["pre", "post"] = "pre",
        dropout: float = 0.0,
    ):
        super().__init__(args, attention, norm, order, dropout)
        self.moe = MoE(args)

    def steps(self) -> tuple[Segment | RoutedExperts, ...]:
        """What the layer reads, n, is of one segment with its first step, and the sum with what it makes is of one with
        its last.
        """
        first, *between, last = self.moe.steps()

        def route(notes: Notes, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
            n = self.to_feed(h)
            return n, *first.run(notes, n)

        def rest(notes: Notes, h: torch.Tensor, *made: torch.Tensor) -> torch.Tensor:
            return self.fed(h, last.run(notes, *made), notes)

        return (
            Segment("attention", self.attend, ("x",), ("h",)),
            first._replace(run=route, inputs=("h",), outputs=("n", *first.outputs)),
            *(_reading(step, x="n") for step in between),
            last._replace(run=rest, inputs=("h", *last.inputs)),
        )


def _reading(step: Segment | RoutedExperts, x: str) -> Segment | RoutedExperts:
    """The step, with `x` where it reads x."""
    if isinstance(step, RoutedExperts):
        return step
    return step._replace(inputs=tuple(x if name == "x" else name for name in step.inputs))


def sort_by_expert(ids: torch.Tensor, n_experts: int) -> Order:
    """ids [N, k] -> the order of their N k copies; those of one expert stay in the order of the tokens."""
    copies = ids.flatten().argsort(stable=True)
    rows = torch.empty_like(copies).scatter_(0, copies, torch.arange(copies.numel(), device=ids.device))
    return Order(copies, rows, count(ids.flatten(), n_experts))


class _ToExperts(torch.autograd.Function):
    """x [N, D] -> [N k, D]. torch's backward of an index adds rows one after the other, in an order that a GPU does not
    keep to; knowing the way back, it is an index and a sum.
    """

    @staticmethod
    def forward(ctx, x, copies, rows):
        ctx.save_for_backward(rows)
        ctx.tokens = x.shape[0]
        return x[copies // (copies.numel() // max(x.shape[0], 1))]

    @staticmethod
    def backward(ctx, grad):
        (rows,) = ctx.saved_tensors
        return grad[rows].view(ctx.tokens, -1, grad.shape[-1]).sum(1), None, None


class _ToTokens(torch.autograd.Function):
    """ys [N k, D], sorted by expert -> the same rows as copies of tokens."""

    @staticmethod
    def forward(ctx, ys, copies, rows):
        ctx.save_for_backward(copies)
        return ys[rows]

    @staticmethod
    def backward(ctx, grad):
        (copies,) = ctx.saved_tensors
        return grad[copies], None, None
