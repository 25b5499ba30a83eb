"""Linears that multiply in float8, by torchao's recipes of the same names with round_scales_to_power_of_2=True.

"tensorwise": one scale for each operand of a product; activations and weights in e4m3, gradients in e5m2. "rowwise": a
scale for each row of the left operand and each column of the right one, all in e4m3. Scales follow from the magnitudes
in each product. Weights, gradients and optimizer state keep their types.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from torchtitan.core.constraints import FLOAT8_MULTIPLE
from torchtitan.core.float8 import E4M3, E5M2, Scaled, product, quantize
from torchtitan.models.layers import autocast_dtype
from torchtitan.parallelisms.plan import ParallelPlan, match_blocks
from torchtitan.torch_internals.autograd import will_execute


class _Float8Matmul(torch.autograd.Function):
    """Compute x W^T and both gradients with operands in float8. It saves x and W as they are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, rowwise: bool, use_kernel: bool) -> torch.Tensor:
        """[T, K], [N, K] -> [T, N]"""
        ctx.save_for_backward(x, weight)
        ctx.settings = rowwise, use_kernel
        return product(quantize(x, E4M3, rowwise), quantize(weight, E4M3, rowwise), x.dtype, use_kernel, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, g W [T, K], and of W, g^T x [N, K]."""
        x, weight = ctx.saved_tensors
        rowwise, use_kernel = ctx.settings
        dtype = E4M3 if rowwise else E5M2
        rows = quantize(grad, dtype, rowwise)
        of_x = of_weight = None
        if _is_wanted(ctx, 0):
            of_x = product(rows, quantize(weight, E4M3, rowwise, transposed=True), x.dtype, use_kernel)
        if _is_wanted(ctx, 1):
            if rowwise:
                columns = quantize(grad, dtype, rowwise, transposed=True)
            else:
                columns = Scaled(rows.values.t(), rows.inverse)
            of_weight = product(columns, quantize(x, E4M3, rowwise, transposed=True), x.dtype, use_kernel)
        return of_x, of_weight, None, None


def _is_wanted(ctx: Any, index: int) -> bool:
    """Return True if this backward uses the gradient of an input: a split backward asks for one at a time."""
    if torch.compiler.is_compiling() or not ctx.needs_input_grad[index]:
        return ctx.needs_input_grad[index]
    return will_execute(ctx.next_functions[index][0])


class Float8Linear(nn.Linear):
    """A linear that multiplies in float8."""

    rowwise: bool
    use_kernel: bool

    @property
    def gathers_float8(self) -> bool:
        """Return True if FSDP may gather the weight in 8 bits: all its products round it in the same way."""
        return not self.rowwise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N]"""
        dtype = autocast_dtype(x.device.type) or x.dtype
        # views, because _is_wanted cannot ask about leaves in autograd.grad
        operands = (operand.view_as(operand) for operand in (x.flatten(0, -2).to(dtype), self.weight.to(dtype)))
        y = _Float8Matmul.apply(*operands, self.rowwise, self.use_kernel).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias.to(dtype)


def use_float8(model: nn.Module, plan: ParallelPlan, recipe: str, exclude: Sequence[str], use_kernel: bool) -> None:
    """Let the linears in the plan's blocks multiply in float8, in place, except for those with sizes that do not fit.

    Embedding, head, routers and stacks of experts are left. `exclude`: patterns of further names.
    """
    for block_name, block in match_blocks(model, plan):
        for name, module in block.named_modules(prefix=block_name):
            if type(module) is not nn.Linear or any(fnmatchcase(name, pattern) for pattern in exclude):
                continue
            if module.out_features % FLOAT8_MULTIPLE == 0 and module.in_features % FLOAT8_MULTIPLE == 0:
                convert(module, recipe, use_kernel)


def convert(linear: nn.Linear, recipe: str, use_kernel: bool) -> None:
    """Let a linear multiply in float8, in place."""
    linear.__class__ = Float8Linear
    linear.rowwise, linear.use_kernel = recipe == "rowwise", use_kernel
