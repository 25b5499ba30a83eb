"""Layers that decoder models share, except attention: norms, rotary positions, feed-forward.

Also buffers that training changes: what a forward adds up for the trainer, and biases of experts.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.models.sizes import RopeScaling


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast computes in, None where it is off or not known (meta)."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocast_off(device_type: str) -> AbstractContextManager:
    """For what has to be computed in the type of its inputs."""
    return nullcontext() if autocast_dtype(device_type) is None else torch.autocast(device_type, enabled=False)


class Rotary(nn.Module):
    """Positions -> the turns of queries and keys (rotary embeddings, arXiv:2104.09864), in float32.

    Nothing is stored: a buffer would have to survive the meta device, casts and checkpoints, and the angles of one
    forward cost less than one norm. `scaling` is a model's RopeScaling, see rope.py.
    """

    def __init__(self, head_dim: int, theta: float, scaling: Any = None):
        super().__init__()
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """positions [B or 1, S] -> (cos, sin) of the angles, float32 [B or 1, S, 1, head_dim / 2, 2]; the 1 stands for
        the heads. Pairs of real numbers, because the compiler has no code for complex ones.
        """
        angles = positions[..., None, None].float() * self.frequencies(positions.device)
        rotation = torch.stack((angles.cos(), angles.sin()), dim=-1)
        return rotation if self.magnitude == 1 else rotation * self.magnitude

    @property
    def magnitude(self) -> float:
        """Of turned features."""
        kind = getattr(self.scaling, "kind", None)
        return yarn_magnitude(self.scaling.factor) if kind == "yarn" else 1.0

    def frequencies(self, device: torch.device) -> torch.Tensor:
        """Radians per position, [head_dim / 2]."""
        return frequencies(self.head_dim, self.theta, self.scaling, device)


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turn each pair of neighbours (2i, 2i + 1) of x [B, S, H, head_dim] by its angle, as in Meta's checkpoints.

    (transformers pairs i with i + head_dim / 2; the two differ by the order of the rows of wq and wk.) One complex
    product is 2 to 6 times faster in eager than real arithmetic, but only real arithmetic is fused by the compiler.
    """
    pairs = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))  # [B, S, H, head_dim / 2, 2]
    if torch.compiler.is_compiling():
        (a, b), (cos, sin) = pairs.unbind(-1), rotation.unbind(-1)
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rotation))
    return turned.flatten(-2).type_as(x)


class SwiGLU(nn.Module):
    """Feed-forward with a gate: w2(silu(w1 x) * w3 x) (arXiv:2002.05202)."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]"""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MLP(nn.Module):
    """Feed-forward without a gate: w2(activation(w1 x)), both with biases. `activation` keeps the shape."""

    def __init__(self, dim: int, hidden_dim: int, activation: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim)
        self.w2 = nn.Linear(hidden_dim, dim)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]"""
        return self.w2(self.activation(self.w1(x)))


class ZeroedBuffers(nn.Module):
    """A module whose own buffers start at zero, and keep their type."""

    def _apply(self, fn: Callable, recurse: bool = True) -> "ZeroedBuffers":
        """Buffers have no rule of initial values, so they get theirs on leaving the meta device. They keep their type:
        in bfloat16, steps of a thousandth would be rounded away.
        """
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            if old.is_meta and not new.is_meta:
                setattr(self, name, torch.zeros_like(old, device=new.device))
            elif new.dtype != old.dtype:
                setattr(self, name, old.to(new.device))
        return self


@torch.library.custom_op("torchtitan::add_once", mutates_args=("total",))
def add_once(total: torch.Tensor, amount: torch.Tensor) -> None:
    """total += amount, of the same shape, but not in a forward that runs inside a backward: activation checkpointing,
    the second time.

    An operator, and so one node of a compiled graph, because the compiler could not ask which of the two it is.
    """
    if torch._C._current_graph_task_id() == -1:
        total += amount


@add_once.register_fake
def _(total: torch.Tensor, amount: torch.Tensor) -> None:
    pass


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> torch.Tensor:
    """Radians per position, [head_dim / 2], from 1 down to about 1 / theta. `scaling`: None, or a RopeScaling."""
    exponents = torch.arange(0, head_dim, 2, device=device).float() / head_dim
    if scaling is None:
        return 1.0 / theta**exponents
    plain = 1.0 / scaling.theta(theta, head_dim) ** exponents
    if scaling.kind == "ntk":
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    return yarn(plain, theta, scaling) if scaling.kind == "yarn" else llama3(plain, scaling)


def llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """[F] -> [F]. How often each wave turns within the original context decides: below low_freq_factor stretch, above
    high_freq_factor keep.
    """
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_seq_len * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / scaling.factor


def yarn(plain: torch.Tensor, theta: float, scaling: Any) -> torch.Tensor:
    """[F] -> [F], arXiv:2309.00071: as llama3, but blended evenly over pairs of features, between the whole ones that
    turn beta_fast and beta_slow times.
    """
    head_dim = 2 * len(plain)

    def pair(turns: float) -> float:
        """The pair of features, as a fractional index, that turns so often within the original context."""
        wavelength = scaling.original_max_seq_len / (2 * math.pi * turns)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    first, last = max(math.floor(pair(scaling.beta_fast)), 0), min(math.ceil(pair(scaling.beta_slow)), head_dim - 1)
    steps = torch.arange(len(plain), device=plain.device).float() - first
    stretch = (steps / max(last - first, 0.001)).clamp(0, 1)
    return plain / scaling.factor * stretch + plain * (1 - stretch)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """What turned features are multiplied with, as longer contexts flatten attention."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


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
