"""Layers that decoder models share, except attention: norms, rotary positions, feed-forward.

ZeroedBuffers and add_once are for buffers that accumulate sums during forward.

Linears may multiply in float8, by torchao's recipes of the same names with round_scales_to_power_of_2=True.
"tensorwise": one scale for each operand of a product; activations and weights in e4m3, gradients in e5m2. "rowwise": a
scale for each row of the left operand and each column of the right one, all in e4m3. Scales follow from the magnitudes
in each product. Weights, gradients and optimizer state keep their types.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.core.errors import FLOAT8_MULTIPLE
from torchtitan.core.float8 import E4M3, E5M2, Scaled, product, quantize
from torchtitan.models.sizes import LongRope, PartialRope, RopeScaling
from torchtitan.parallelisms.plan import ParallelPlan, match_blocks
from torchtitan.torch_internals.dispatch import graph_task_id, will_execute


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return autocast's compute dtype; None if it is off or does not support the device (meta)."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocast_off(device_type: str) -> AbstractContextManager:
    """Return a context that makes operations compute in the dtype of their inputs."""
    return nullcontext() if autocast_dtype(device_type) is None else torch.autocast(device_type, enabled=False)


class Rotary(nn.Module):
    """Rotary position embeddings (arXiv:2104.09864): positions -> rotations of queries and keys, in float32.

    It has no buffers: one would have to survive the meta device, casts and checkpoints, and the angles of one forward
    cost less than one norm. `scaling` is a RopeScaling, a LongRope or None.
    """

    def __init__(self, head_dim: int, theta: float, scaling: Any = None):
        super().__init__()
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """positions [B or 1, S] -> (cos, sin) of the angles, float32 [B or 1, S, 1, head_dim / 2, 2].

        They are pairs of real numbers because the compiler does not generate code for complex ones. The 1 broadcasts
        over heads.
        """
        angles = positions[..., None, None].float() * self.frequencies(positions.device)
        rotation = torch.stack((angles.cos(), angles.sin()), dim=-1)
        return rotation if self.magnitude == 1 else rotation * self.magnitude

    @property
    def magnitude(self) -> float:
        """Factor applied to rotated features."""
        if getattr(self.scaling, "kind", None) not in ("yarn", "longrope"):
            return 1.0
        factor = self.scaling.attention_factor
        return yarn_magnitude(self.scaling.factor) if factor is None else factor

    def frequencies(self, device: torch.device) -> torch.Tensor:
        """Return the radians per position, [head_dim / 2]."""
        return frequencies(self.head_dim, self.theta, self.scaling, device)


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate adjacent features (2i, 2i + 1) of x [B, S, H, head_dim] by their angles, as in Meta's checkpoints.

    Features beyond those that have angles stay.

    transformers pairs i with i + head_dim / 2; the two differ by the order of the rows of wq and wk. One complex
    product is 2 to 6 times faster in eager than real arithmetic, but the compiler fuses only real arithmetic.
    """
    if (rotated := 2 * rotation.shape[-2]) < x.shape[-1]:
        first, plain = x.split((rotated, x.shape[-1] - rotated), dim=-1)
        return torch.cat((rotate(first, rotation), plain), dim=-1)
    pairs = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))  # [B, S, H, head_dim / 2, 2]
    if torch.compiler.is_compiling():
        (a, b), (cos, sin) = pairs.unbind(-1), rotation.unbind(-1)
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rotation))
    return turned.flatten(-2).type_as(x)


class SwiGLU(nn.Module):
    """Feed-forward with a gate: w2(silu(w1 x) * w3 x) (arXiv:2002.05202)."""

    def __init__(self, dim: int, hidden_dim: int, bias: bool = False):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias)
        self.w2 = nn.Linear(hidden_dim, dim, bias)
        self.w3 = nn.Linear(dim, hidden_dim, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]"""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class GeGLU(SwiGLU):
    """Feed-forward with a gate: w2(gelu(w1 x) * w3 x), with the approximation of gelu by tanh (arXiv:2002.05202)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]"""
        return self.w2(F.gelu(self.w1(x), approximate="tanh") * self.w3(x))


class MLP(nn.Module):
    """Feed-forward without a gate: w2(activation(w1 x)). `activation` preserves the shape."""

    def __init__(
        self, dim: int, hidden_dim: int, activation: Callable[[torch.Tensor], torch.Tensor], bias: bool = True
    ):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias)
        self.w2 = nn.Linear(hidden_dim, dim, bias)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]"""
        return self.w2(self.activation(self.w1(x)))


class _SquaredReLU(torch.autograd.Function):
    """max(x, 0)^2 (arXiv:2109.08668). Backward computes one tensor, where that of a power computes three."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        r = F.relu(x)
        ctx.save_for_backward(r)
        return r.square()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient of x, 2 g max(x, 0)."""
        (r,) = ctx.saved_tensors
        return (grad * r).mul_(2)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Return the square of relu: [...] -> [...]."""
    return _SquaredReLU.apply(x)


class ZeroedBuffers(nn.Module):
    """A module that starts its own buffers at zero, or at `first_values`, and keeps their dtype."""

    first_values: Mapping[str, float] = MappingProxyType({})

    def _apply(self, fn: Callable, recurse: bool = True) -> "ZeroedBuffers":
        """Fill the buffers when they leave the meta device, since they have no init rule, and keep their dtype.

        In bfloat16, steps of a thousandth would be rounded away.
        """
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            if old.is_meta and not new.is_meta:
                value = self.first_values.get(name, 0.0)
                setattr(self, name, torch.full_like(old, value, device=new.device))
            elif new.dtype != old.dtype:
                setattr(self, name, old.to(new.device))
        return self


class XIELU(ZeroedBuffers):
    """An activation with two parameters (arXiv:2411.13010), which transformers keeps with its two constants in folders.

    With p = softplus(alpha_p) and n = beta + softplus(alpha_n) it is p x^2 + beta x for x > 0, and else
    n (exp(min(x, eps)) - 1 - x) + beta x.
    """

    first_values = MappingProxyType({"beta": 0.5, "eps": -1e-6})
    init_values = MappingProxyType({"alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.3))})
    """Of the parameters, for p = n = 0.8."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
        for name, value in self.first_values.items():
            self.register_buffer(name, torch.tensor(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., N] -> [..., N]"""
        wide = torch.promote_types(self.alpha_p.dtype, torch.float32)
        p, n = (F.softplus(alpha.to(wide)).squeeze() for alpha in (self.alpha_p, self.alpha_n))
        return _XIELU.apply(x, p, self.beta + n, self.beta, self.eps)


class _XIELU(torch.autograd.Function):
    """XIELU of x and the scalars p, n, beta and eps. It stores x alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *scalars: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *scalars)
        p, n, beta, eps = scalars
        y = x.clamp(max=eps).expm1_().sub_(x).mul_(n)
        return torch.where(x > 0, (x * x).mul_(p), y).addcmul_(x, beta)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x [..., N], p and n.

        With g the gradient of the result they are g (2 p x + beta) for x > 0, else g (n (exp(x) - 1) + beta), without
        exp(x) above eps; and the sums of g x^2 over x > 0, and of g (exp(min(x, eps)) - 1 - x) over the others.
        """
        x, p, n, beta, eps = ctx.saved_tensors
        positive, of_p, of_n = x > 0, None, None
        if ctx.needs_input_grad[1]:
            of_p = (x * grad).mul_(x).masked_fill_(~positive, 0).sum(dtype=p.dtype)
        if ctx.needs_input_grad[2]:
            of_n = x.clamp(max=eps).expm1_().sub_(x).mul_(grad).masked_fill_(positive, 0).sum(dtype=p.dtype)
        slope = x.expm1().masked_fill_(x > eps, -1).mul_(n)
        of_x = torch.where(positive, x * (2 * p), slope).add_(beta).mul_(grad)
        return of_x, of_p, of_n, None, None


@torch.library.custom_op("torchtitan::add_once", mutates_args=("total",))
def add_once(total: torch.Tensor, amount: torch.Tensor) -> None:
    """Add `amount` to `total`, of the same shape, unless this forward is a recomputation inside a backward.

    It is a custom operator, one node of a compiled graph, because the compiler cannot ask which of the two it is.
    """
    if graph_task_id() == -1:
        total += amount


@add_once.register_fake
def _(total: torch.Tensor, amount: torch.Tensor) -> None:
    pass


def frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | LongRope | PartialRope | None, device: torch.device
) -> torch.Tensor:
    """Return the radians per position, [head_dim / 2], from 1 down to about 1 / theta, with scaling applied."""
    exponents = torch.arange(0, head_dim, 2, device=device).float() / head_dim
    if scaling is None:
        return 1.0 / theta**exponents
    if isinstance(scaling, LongRope):
        return 1.0 / (torch.tensor(scaling.short_factors, device=device) * theta**exponents)
    if isinstance(scaling, PartialRope):
        return 1.0 / theta ** exponents[: scaling.rotated // 2]
    plain = 1.0 / scaling.theta(theta, head_dim) ** exponents
    if scaling.kind == "ntk":
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    return yarn(plain, theta, scaling) if scaling.kind == "yarn" else llama3(plain, scaling)


def llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Scale frequencies [F] -> [F] by how often each wave turns within the original context.

    Below low_freq_factor turns it is stretched, above high_freq_factor it stays, between them the two are blended.
    """
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_seq_len * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / scaling.factor


def yarn(plain: torch.Tensor, theta: float, scaling: Any) -> torch.Tensor:
    """Scale frequencies [F] -> [F] as YaRN (arXiv:2309.00071).

    It differs from llama3 in blending linearly in the index of the pair of features, between the pairs that turn
    beta_fast and beta_slow times, or the integer indices around them unless `truncate` is false.
    """
    head_dim = 2 * len(plain)

    def pair(turns: float) -> float:
        """Return the fractional index of the pair of features that turns `turns` times within the original context."""
        wavelength = scaling.original_max_seq_len / (2 * math.pi * turns)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    ends = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if getattr(scaling, "truncate", True):
        ends = math.floor(ends[0]), math.ceil(ends[1])
    first, last = max(ends[0], 0), min(ends[1], head_dim - 1)
    steps = torch.arange(len(plain), device=plain.device).float() - first
    stretch = (steps / (max(last - first, 0) or 0.001)).clamp(0, 1)
    return plain / scaling.factor * stretch + plain * (1 - stretch)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Return the factor of rotated features that compensates for the flatter attention of longer contexts."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm, computed with the weight cast to the dtype of the input, as under FSDP's mixed precision.

    With float32 weights and a bfloat16 input, which autocast does not cast, torch would use its unfused path and return
    float32.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]"""
        return rms_norm(x, self.weight.to(x.dtype), self.eps)


class UnitNorm(nn.Module):
    """An RMS norm without weights."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]"""
        return rms_norm(x, x.new_ones(x.shape[-1]), self.eps)


class ZeroCenteredRMSNorm(RMSNorm):
    """An RMS norm that multiplies by 1 + weight, in float32 or wider, so that a weight of 0 changes nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]"""
        weight = self.weight.to(x.dtype)  # as RMSNorm; bfloat16 cannot represent 1 plus a small weight
        return rms_norm(x, 1 + weight.to(torch.promote_types(x.dtype, torch.float32)), self.eps)


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm, with weight and bias, if any, cast to the dtype of the input (see RMSNorm)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]"""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps)


class ZeroCenteredLayerNorm(LayerNorm):
    """A LayerNorm that multiplies by 1 + weight, so that a weight of 0 changes nothing (arXiv:2402.16819).

    It adds two norms, as bfloat16 cannot represent 1 plus a small weight.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]"""
        return LayerNorm.forward(self, x) + F.layer_norm(x, self.normalized_shape, eps=self.eps)


class HeadNorm(nn.Module):
    """A LayerNorm of each head, with weights for each, [heads x head_dim], and without biases."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H, E] -> [..., H, E]"""
        return F.layer_norm(x, x.shape[-1:], eps=self.eps) * self.weight.view(x.shape[-2:]).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float | None) -> torch.Tensor:
    """Return the RMS norm of x [..., D] in the dtype of x; the dtype of weight [D] is the same or wider.

    The compiler fuses torch's version. Without it torch has a fused kernel on GPUs and for equal dtypes only.
    """
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    if torch.compiler.is_compiling() or (x.device.type != "cpu" and weight.dtype == x.dtype):
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, eps)
    return _rms_norm(x, weight, eps)[0]  # half of the time for one row


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y [..., D] and r [..., 1] of _RMSNorm for x [..., D] and weight [D]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    r = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * r).mul_(weight).to(x.dtype), r


class _RMSNorm(torch.autograd.Function):
    """RMS norm y = w x r with r = (mean(x^2) + eps)^-1/2 (arXiv:1910.07467, equation 4), computed at least in float32.

    Without a fused kernel torch differentiates the composed operations. Forward and backward of 2048 tokens of width
    256 on a CPU take it 7 to 9 ms in float32, and this function 3 ms (torch 2.13, 1 core). It stores x in its dtype.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y, r = _rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, r)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        """Return the gradients of x [..., D] and w [D].

        With g the gradient of y they are r g w - x r^3 mean(g w x), and the sum over rows of g x r.
        """
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
        if is_wanted(ctx, 0):
            of_x = product(rows, quantize(weight, E4M3, rowwise, transposed=True), x.dtype, use_kernel)
        if is_wanted(ctx, 1):
            if rowwise:
                columns = quantize(grad, dtype, rowwise, transposed=True)
            else:
                columns = Scaled(rows.values.t(), rows.inverse)
            of_weight = product(columns, quantize(x, E4M3, rowwise, transposed=True), x.dtype, use_kernel)
        return of_x, of_weight, None, None


def is_wanted(ctx: Any, index: int) -> bool:
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
        # views, because is_wanted cannot ask about leaves in autograd.grad
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
