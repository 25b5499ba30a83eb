"""The experts of a layer: gated feed-forwards with stacked matrices, [experts, in, out].

Rows are sorted by expert, and each expert's matrix is multiplied with its rows, without dropping or padding. torch's
grouped matrix product does this in one kernel if it supports the case; otherwise a loop over the experts does.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import register_flop_formula

from torchtitan.models.layers import autocast_dtype

_native = getattr(F, "grouped_mm", None)
NATIVE_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Gated(nn.Module):
    """The activation between an expert's matrices. It is a module so that it can be compiled by itself."""

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """[R, F], [R, F] -> [R, F]"""
        return F.silu(gate) * up


class Experts(nn.Module):
    """Feed-forwards w2[e] (silu(w1[e] x) * w3[e] x) of all experts e."""

    def __init__(self, dim: int, hidden_dim: int, n_experts: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(n_experts, dim, hidden_dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))
        self.w3 = nn.Parameter(torch.empty(n_experts, dim, hidden_dim))
        self.gated = Gated()

    def forward(self, xs: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """xs [R, D] sorted by expert, and sizes [E], the integer number of rows of each expert with sum R -> [R, D]."""
        ends = sizes.cumsum(0).to(torch.int32)
        gate, up = (self.product(self, name, xs, ends) for name in ("w1", "w3"))
        return self.product(self, "w2", self.gated(gate, up), ends)

    @staticmethod  # `experts` may be a stand-in with a rank's weights; the compiler cannot bind methods to it
    def product(experts: Any, name: str, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Multiply x [R, I] by the matrices of that name -> [R, O], split into experts by `ends` [E], int32."""
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


def _split(x: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split x [R, I] into the rows of each expert."""
    return x.tensor_split(ends.tolist()[:-1])


# -- under the compiler -----------------------------------------------------------------------------------------------
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
