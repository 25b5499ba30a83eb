"""A mixture-of-experts layer and the transformer block around it.

The layer is three steps without communication: route and dispatch (sort the tokens by expert), experts, combine (back
to the tokens). Expert parallel wraps the second step with its all-to-alls. The block runs the layer's steps between
attention and the residual sum. All shapes are known in advance, so nothing synchronizes with the device.

Letters of the shapes: B samples, S tokens, N = B S, D width, E experts, k experts per token.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import nn

from torchtitan.models.decoder import ResidualBlock
from torchtitan.models.layers import SwiGLU, autocast_off
from torchtitan.models.moe import MoEArgs
from torchtitan.models.moe.experts import Experts
from torchtitan.models.moe.router import Router, count
from torchtitan.parallelisms.steps import Notes, RoutedExperts, Segment, Stepwise


class ExpertOrder(NamedTuple):
    """The sorted order, by expert, of N k copies of tokens. Copy j of token n has number n k + j. All int64."""

    copies: torch.Tensor  # [N k], the copy in each row
    rows: torch.Tensor  # [N k], the row of each copy
    sizes: torch.Tensor  # [E], rows of each expert


class MoE(Stepwise):
    """A mixture-of-experts layer: router, experts and, optionally, shared experts."""

    def __init__(self, args: MoEArgs):
        super().__init__()
        self.args = args
        self.router = Router(args)
        self.experts = Experts(args.dim, args.expert_dim, args.n_experts)
        self.shared_experts = None
        if args.n_shared_experts:
            self.shared_experts = SwiGLU(args.dim, args.n_shared_experts * args.expert_dim)

    def steps(self) -> tuple[Segment | RoutedExperts, ...]:
        """Return the steps of x [B, S, D] -> out [B, S, D]. Shared experts may run during communication."""
        shared = () if self.shared_experts is None else ("s",)
        return (
            Segment("route", self._to_experts, ("x",), ("w", "xs"), light=True),
            RoutedExperts("experts", self.experts, "xs", "ys"),
            *(Segment("shared_experts", lambda _, x: self.shared_experts(x), ("x",), (name,)) for name in shared),
            Segment("rest", self._to_tokens, ("w", "ys", *shared), ("out",), light=True),
        )

    def _to_experts(self, notes: Notes, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose k experts per token: x [B, S, D] -> weights [N, k], copies sorted by expert [N k, D].

        Leaves ids, order, counts and the shape of x in `notes` for `_to_tokens`; ids in `notes` are reused.
        """
        ids, weights = self.route(x, notes.get("ids"))
        notes.once("ids", lambda: ids)
        xs, order = self.dispatch(x, ids, weights)
        notes.once("order", lambda: order)
        notes.once("counts", lambda: order.sizes)
        notes["shape"] = x.shape
        return weights, xs

    def _to_tokens(self, notes: Notes, weights: torch.Tensor, ys: torch.Tensor, *shared: torch.Tensor) -> torch.Tensor:
        """Combine weights [N, k], outputs [N k, D] and, if any, shared experts' outputs [B, S, D] -> [B, S, D]."""
        y = self.combine(ys, weights, notes["order"]).view(notes["shape"])
        return y + shared[0] if shared else y

    def route(self, x: torch.Tensor, ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B, S, D] -> ids and weights [N, k]. The weights carry the gradient, including the auxiliary loss's.

        If `ids` are given they are used, and not counted again.
        """
        return self.router(x, ids)

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ExpertOrder]:
        """x [B, S, D] -> its rows sorted by expert, [N k, D], and their order."""
        order = sort_by_expert(ids, self.args.n_experts)
        xs = _ToExperts.apply(x.flatten(0, 1), order.copies, order.rows)
        if self.args.score_before_experts:
            xs = (xs * weights.flatten()[order.copies, None]).to(xs.dtype)
        return xs, order

    def combine(self, ys: torch.Tensor, weights: torch.Tensor, order: ExpertOrder) -> torch.Tensor:
        """ys [N k, D] sorted by expert -> the weighted sum for each token, [N, D]."""
        copies = _ToTokens.apply(ys, order.copies, order.rows).unflatten(0, weights.shape)  # [N, k, D]
        if self.args.score_before_experts:
            return copies.sum(1)
        with autocast_off(ys.device.type):
            return torch.bmm(weights[:, None], copies.to(weights.dtype)).squeeze(1).to(ys.dtype)


class MoEBlock(ResidualBlock):
    """A transformer block with experts instead of a dense feed-forward."""

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
        """Return the block's steps.

        The layer's first step also normalizes its input n, and its last step adds to the residual.
        """
        first, *between, last = self.moe.steps()

        def route(notes: Notes, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
            n = self.ffn_input(h)
            return n, *first.run(notes, n)

        def combine(notes: Notes, h: torch.Tensor, *step_inputs: torch.Tensor) -> torch.Tensor:
            return self.ffn_residual(h, last.run(notes, *step_inputs), notes)

        return (
            Segment("attention", self.attention_residual, ("x",), ("h",)),
            first._replace(run=route, inputs=("h",), outputs=("n", *first.outputs)),
            *(_reading(step, x="n") for step in between),
            last._replace(run=combine, inputs=("h", *last.inputs)),
        )


def _reading(step: Segment | RoutedExperts, x: str) -> Segment | RoutedExperts:
    """Return the step with `x` in place of its input "x"."""
    if isinstance(step, RoutedExperts):
        return step
    return step._replace(inputs=tuple(x if name == "x" else name for name in step.inputs))


def sort_by_expert(ids: torch.Tensor, n_experts: int) -> ExpertOrder:
    """Return the order of the N k copies of ids [N, k], sorted by expert; copies of one expert stay in token order."""
    copies = ids.flatten().argsort(stable=True)
    rows = torch.empty_like(copies).scatter_(0, copies, torch.arange(copies.numel(), device=ids.device))
    return ExpertOrder(copies, rows, count(ids.flatten(), n_experts))


class _ToExperts(torch.autograd.Function):
    """Gather rows, x [N, D] -> [N k, D], with a deterministic backward.

    torch's backward of an index adds rows in an order that varies on a GPU. With the inverse index it is an index and a
    sum.
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
    """Reorder ys [N k, D], sorted by expert, to the order of the token copies, [N k, D]."""

    @staticmethod
    def forward(ctx, ys, copies, rows):
        ctx.save_for_backward(copies)
        return ys[rows]

    @staticmethod
    def backward(ctx, grad):
        (copies,) = ctx.saved_tensors
        return grad[copies], None, None
