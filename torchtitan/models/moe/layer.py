"""A mixture-of-experts layer and the transformer block around it.

The layer is three steps without communication: route and dispatch (sort the tokens by expert), experts, combine (back
to the tokens). Expert parallel wraps the second step with its all-to-alls. The block runs the layer's steps between
attention and the residual sum. All shapes are known in advance, so nothing synchronizes with the device.

Letters of the shapes: B samples, S tokens, N = B S, D width, E experts, k experts per token.

The experts of a layer are gated feed-forwards with stacked matrices, [experts, in, out]. Rows are sorted by expert, and
each expert's matrix is multiplied with its rows, without dropping or padding. torch's grouped matrix product does this
in one kernel if it supports the case; otherwise a loop over the experts does.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import register_flop_formula

from torchtitan.models.decoder import ResidualBlock
from torchtitan.models.layers import MLP, GeGLU, SwiGLU, autocast_dtype, autocast_off, squared_relu
from torchtitan.models.moe import MoEArgs
from torchtitan.models.moe.router import Gate, Router, count
from torchtitan.models.sizes import NormOrder
from torchtitan.parallelisms.steps import Notes, RoutedExperts, Segment, Stepwise

_native = getattr(F, "grouped_mm", None)
NATIVE_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Gated(nn.Module):
    """The activation between an expert's matrices. It is a module so that it can be compiled by itself."""

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """[R, F], [R, F] -> [R, F]"""
        return F.silu(gate) * up


class GeluGated(Gated):
    """The same with the approximation of gelu by tanh."""

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """[R, F], [R, F] -> [R, F]"""
        return F.gelu(gate, approximate="tanh") * up


class SquaredReLU(nn.Module):
    """The square of relu (arXiv:2109.08668), between the two matrices of an expert without a gate."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., F] -> [..., F]"""
        return squared_relu(x)


class ClampedGated(nn.Module):
    """The activation of gpt-oss: (up + 1) gate sigmoid(alpha gate), with both clamped (arXiv:2508.10925, 2.2)."""

    def __init__(self, limit: float, alpha: float):
        super().__init__()
        self.limit, self.alpha = limit, alpha

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """[R, F], [R, F] -> [R, F]"""
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


class Experts(nn.Module):
    """Feed-forwards w2[e] (silu(w1[e] x) * w3[e] x) of all experts e.

    With `biases` each product adds w1_bias[e] and so on. `gated`: the activation between them in place of the above; if
    it is a SquaredReLU, there is no w3.
    """

    def __init__(self, dim: int, hidden_dim: int, n_experts: int, biases: bool = False, gated: nn.Module | None = None):
        super().__init__()
        self.matrix_names = ("w1", "w2") if isinstance(gated, SquaredReLU) else ("w1", "w2", "w3")
        for name in ("w1", "w2", "w3"):
            inputs, outputs = (hidden_dim, dim) if name == "w2" else (dim, hidden_dim)
            exists = name in self.matrix_names
            self.register_parameter(name, nn.Parameter(torch.empty(n_experts, inputs, outputs)) if exists else None)
            has_bias = biases and exists
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(n_experts, outputs)) if has_bias else None)
        self.gated = gated or Gated()

    def forward(self, xs: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """xs [R, D] sorted by expert, and sizes [E], the integer number of rows of each expert with sum R -> [R, D]."""
        ends = sizes.cumsum(0).to(torch.int32)
        shared: dict[str, torch.Tensor] = {}

        def product(name: str, x: torch.Tensor) -> torch.Tensor:
            y, bias = self.product(self, name, x, ends, shared), getattr(self, f"{name}_bias")
            return y if bias is None else _AddBias.apply(y, bias.to(y.dtype), ends)

        inner = [product(name, xs) for name in ("w1", "w3") if name in self.matrix_names]
        return product("w2", self.gated(*inner))

    @staticmethod  # `experts` may be a stand-in with a rank's weights; the compiler cannot bind methods to it
    def product(
        experts: Any, name: str, x: torch.Tensor, ends: torch.Tensor, shared: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Multiply x [R, I] by the matrices of that name -> [R, O], split into experts by `ends` [E], int32.

        `shared`: what the products of one forward share, by name; empty at first.
        """
        w = getattr(experts, name)
        dtype = autocast_dtype(x.device.type)  # autocast covers matrix products, but not grouped ones
        return grouped_mm(x, w, ends) if dtype is None else grouped_mm(x.to(dtype), w.to(dtype), ends)


def grouped_mm(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x [R, I], w [E, I, O] and ends [E], int32, where each expert's rows end (the last is R) -> [R, O]."""
    if x.dtype != torch.bfloat16 and (torch.compiler.is_compiling() or x.is_meta or type(x) is not torch.Tensor):
        return _opaque(x, w, ends)  # without values, torch supports the native product in bfloat16 only
    if _runs_natively(x.dtype, w.shape[1:]):
        return _native(x, w, offs=ends)
    if torch.compiler.is_compiling() or x.is_meta:
        return _opaque(x, w, ends)
    return _loop(x, w, ends)


def _runs_natively(dtype: torch.dtype, sizes: Sequence[int]) -> bool:
    """Return True if torch's kernel runs: rows of all matrices, including gradients, start at multiples of 16 bytes."""
    return _native is not None and dtype in NATIVE_TYPES and all(size * dtype.itemsize % 16 == 0 for size in sizes)


def _loop(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Compute grouped_mm, [R, I] x [E, I, O] -> [R, O], by one product per expert; synchronizes for the sizes."""
    # unbind, and not w[e]: its backward stacks the gradients, where each w[e] would make zeros of w's size and add
    return torch.cat([rows @ matrix for rows, matrix in zip(_split(x, ends), w.unbind(), strict=True)])


class _AddBias(torch.autograd.Function):
    """Add the bias of its expert to each row: x [R, O], bias [E, O] -> [R, O], split into experts by `ends` [E].

    Its backward is a product with zeros and ones, which adds in one order and in float32. That of an index would add
    rows in an order that varies on a GPU, and in the dtype of the rows.
    """

    @staticmethod
    def forward(ctx, x, bias, ends):
        experts = torch.bucketize(torch.arange(len(x), device=x.device), ends, right=True)
        ctx.save_for_backward(experts)
        ctx.experts = len(bias)
        return x + bias[experts]

    @staticmethod
    def backward(ctx, grad):
        (experts,) = ctx.saved_tensors
        of_expert = (torch.arange(ctx.experts, device=grad.device)[:, None] == experts).to(grad.dtype)  # [E, R]
        with autocast_off(grad.device.type):
            return grad, of_expert @ grad, None


def _split(x: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split x [R, I] into the rows of each expert."""
    return x.tensor_split(ends.tolist()[:-1])


# Under the compiler

# Custom operators, because the loop's sizes would break the compiler's graph. Not used in eager: schedules with split
# backward ask for one of the two gradients alone, which operators written in Python do not support.


@torch.library.custom_op("torchtitan::grouped_mm", mutates_args=())
def _opaque(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if _runs_natively(x.dtype, w.shape[1:]):
        return _native(x, w, offs=ends)
    return _loop(x, w, ends)


@torch.library.custom_op("torchtitan::grouped_mm_weight", mutates_args=())
def _opaque_weight(x: torch.Tensor, grad: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the gradient [E, I, O] of w from x [R, I] and grad [R, O]."""
    if _runs_natively(x.dtype, (x.shape[1], grad.shape[1])):
        return _native(x.t(), grad, offs=ends)
    return torch.stack([rows.t() @ g for rows, g in zip(_split(x, ends), _split(grad, ends), strict=True)])


@_opaque.register_fake
def _(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


@_opaque_weight.register_fake
def _(x: torch.Tensor, grad: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], grad.shape[1])


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _gradients(ctx, grad):
    x, w, ends = ctx.saved_tensors
    grad = grad.contiguous()
    x_grad = _opaque(grad, w.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    w_grad = _opaque_weight(x, grad, ends) if ctx.needs_input_grad[1] else None
    return x_grad, w_grad, None


_opaque.register_autograd(_gradients, setup_context=_keep)


@register_flop_formula(torch.ops.torchtitan.grouped_mm)
def _flops(x_shape: Sequence[int], w_shape: Sequence[int], *_, **__) -> int:
    return 2 * x_shape[0] * w_shape[1] * w_shape[2]


@register_flop_formula(torch.ops.torchtitan.grouped_mm_weight)
def _weight_flops(x_shape: Sequence[int], grad_shape: Sequence[int], *_, **__) -> int:
    return 2 * x_shape[0] * x_shape[1] * grad_shape[1]


# The layer


class ExpertOrder(NamedTuple):
    """The sorted order, by expert, of N k copies of tokens. Copy j of token n has number n k + j. All int64."""

    copies: torch.Tensor  # [N k], the copy in each row
    rows: torch.Tensor  # [N k], the row of each copy
    sizes: torch.Tensor  # [E], rows of each expert


class MoE(Stepwise):
    """A mixture-of-experts layer: router, experts and, optionally, shared experts."""

    build_router: type[Router] = Router

    def __init__(self, args: MoEArgs):
        super().__init__()
        self.args = args
        self.router = self.build_router(args)
        activation = ClampedGated(args.swiglu_limit, args.swiglu_alpha) if args.swiglu_limit else None
        activation = GeluGated() if args.gelu_experts else activation
        activation = activation if args.gated_experts else SquaredReLU()
        self.experts = Experts(args.dim, args.expert_dim, args.n_experts, args.moe_biases, activation)
        self.shared_experts = self.shared_gate = None
        if args.n_shared_experts:
            width = args.n_shared_experts * args.expert_dim
            gated = GeGLU if args.gelu_experts else SwiGLU
            ungated = partial(MLP, activation=SquaredReLU(), bias=False)
            self.shared_experts = (gated if args.gated_experts else ungated)(args.dim, width)
            self.shared_gate = Gate(args.dim, 1, bias=False) if args.shared_gate else None

    def steps(self) -> tuple[Segment | RoutedExperts, ...]:
        """Return the steps of x [B, S, D] -> out [B, S, D]. Shared experts may run during communication."""
        shared = () if self.shared_experts is None else ("s",)
        return (
            Segment("route", self._to_experts, ("x",), ("w", "xs"), light=True),
            RoutedExperts("experts", self.experts, "xs", "ys"),
            *(Segment("shared_experts", self._share, ("x",), (name,)) for name in shared),
            Segment("rest", self._to_tokens, ("w", "ys", *shared), ("out",), light=True),
        )

    def _share(self, notes: Notes, x: torch.Tensor) -> torch.Tensor:
        """Apply the shared experts and their gate: [B, S, D] -> [B, S, D]."""
        y = self.shared_experts(x)
        return y if self.shared_gate is None else y * self.shared_gate(x).sigmoid().to(y.dtype)

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

    build_moe: type[MoE] = MoE

    def __init__(
        self,
        args: MoEArgs,
        attention: nn.Module,
        norm: Callable[[], nn.Module] | None = None,
        order: NormOrder = "pre",
        dropout: float = 0.0,
    ):
        super().__init__(args, attention, norm, order, dropout)
        self.moe = self.build_moe(args)

    def steps(self) -> tuple[Segment | RoutedExperts, ...]:
        """Return the block's steps.

        The layer's first step also normalizes its input n, and its last step adds to the residual.
        """
        attention = Segment("attention", self.attention_residual, ("x",), ("h",))
        return attention, *routed_steps(self.moe, self.ffn_input, self.ffn_residual, "h")


Enter = Callable[[torch.Tensor], torch.Tensor]
Leave = Callable[[torch.Tensor, torch.Tensor, Notes], torch.Tensor]


def routed_steps(moe: MoE, enter: Enter, leave: Leave, source: str) -> tuple[Segment | RoutedExperts, ...]:
    """Return the steps of a layer in a block, of a tensor h [B, S, D] that is called `source`.

    `enter` makes the layer's input of h, and `leave` adds its output to h.
    """
    first, *between, last = moe.steps()

    def route(notes: Notes, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n = enter(h)
        return n, *first.run(notes, n)

    def combine(notes: Notes, h: torch.Tensor, *step_inputs: torch.Tensor) -> torch.Tensor:
        return leave(h, last.run(notes, *step_inputs), notes)

    return (
        first._replace(run=route, inputs=(source,), outputs=("n", *first.outputs)),
        *(_reading(step, x="n") for step in between),
        last._replace(run=combine, inputs=(source, *last.inputs)),
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
