"""Norms of decoder models, in the type of what they norm."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.RMSNorm):
    """torch's, in the type of its input, as under FSDP's mixed precision: float32 weights beside a bfloat16 input,
    which autocast leaves as they are, would take torch's unfused path and hand float32 on.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]"""
        weight = self.weight.to(x.dtype)
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            return _RMSNormOnCPU.apply(x, weight, torch.finfo(x.dtype).eps if self.eps is None else self.eps)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """torch's, with weight and bias, in the type of its input (see RMSNorm)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]"""
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class _RMSNormOnCPU(torch.autograd.Function):
    """y = w x r with r = (mean(x^2) + eps)^-1/2 (arXiv:1910.07467, equation 4), computed in float32 or wider.

    torch has a fused kernel for it on GPUs alone, and on a CPU differentiates its pieces: forward and backward of 2048
    tokens of width 256 take 7 to 9 ms in float32, these 3 (torch 2.13, 1 core). The compiler fuses torch's as well.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        r = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (wide * r).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        """With g the gradient of y: that of w is the sum over rows of g x r, that of x is r g w - x r^3 mean(g w x)."""
        x, weight, r = ctx.saved_tensors
        wide, grad = x.to(r.dtype), grad.to(r.dtype)
        products = (grad * wide).reshape(-1, x.shape[-1])  # [N, D]
        of_weight = of_x = None
        if ctx.needs_input_grad[1]:
            of_weight = products.t().mv(r.view(-1)).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            along = products.mv(weight.to(r.dtype)).view_as(r).mul_(r**3).div_(-x.shape[-1])  # [..., 1]
            of_x = (grad * weight).mul_(r).addcmul_(wide, along).to(x.dtype)
        return of_x, of_weight, None
