"""Matrices rounded to float8 (arXiv:2209.05433) with scales, and their products.

Scales are powers of two, so scaling is exact. Rounding to 3 (e4m3) or 2 bits (e5m2) of mantissa then does not depend on
the scale, except for magnitudes below 2^-13 (e5m2: 2^-28) of the largest, which get a fixed number of places. So ranks
that hold different rows of a matrix round them to the same values, and no scale has to be reduced over ranks.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from torchtitan.core.errors import FLOAT8_MULTIPLE
from torchtitan.core.fused import Fused
from torchtitan.torch_internals.dispatch import scaled_mm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 2.0**-100
"""The smallest magnitude that the scale of a matrix follows, so that no scale is infinite."""
EXPONENT = 0x7F800000
"""The bits of a float32's exponent."""


class Scaled(NamedTuple):
    """A matrix as `values * inverse`."""

    values: torch.Tensor
    """float8 [R, C]."""
    inverse: torch.Tensor
    """Powers of two, float32: [] or [R, 1]."""

    def expand(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix [R, C], exactly."""
        return self.values.to(dtype) * self.inverse.to(dtype)


def power_of_two(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the largest power of two that scales magnitudes up to `largest` into a float8 type, float32 of its shape.

    NaN and infinity are scaled to NaN, so that the results show them.
    """
    factor = torch.finfo(dtype).max / largest.float().clamp(min=SMALLEST)
    return (factor.view(torch.int32) & EXPONENT).view(torch.float32)


def quantize(x: torch.Tensor, dtype: torch.dtype, rowwise: bool, transposed: bool = False) -> Scaled:
    """Round x [R, C], or x^T if `transposed`, to a float8 type, with one scale or one for each row of the result."""
    x = x.t() if transposed else x
    if not x.numel():
        return Scaled(x.to(dtype), x.new_ones((len(x), 1) if rowwise else (), dtype=torch.float32))
    dims = (-1,) if rowwise else (0, 1)
    if x.device.type == "cuda" and not torch.compiler.is_compiling():
        largest = torch.linalg.vector_norm(x, math.inf, dim=dims, keepdim=rowwise)
        return Scaled(*(ROUNDED_COLUMNS if transposed else ROUNDED)(x, largest, dtype))
    return Scaled(*_rounded(x, x.abs().amax(dims, rowwise), dtype))  # on a CPU faster than a norm, and than compiling


def _rounded(x: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the fields of Scaled for x [R, C]; `largest`: the magnitude that fits the type, [] or [R, 1]."""
    factor = power_of_two(largest, dtype)
    return (x * factor.to(x.dtype)).to(dtype), factor.reciprocal()


def _rounded_columns(x: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same for a transposed x, with values in the layout that the kernel of products takes."""
    values, inverse = _rounded(x, largest, dtype)
    return values.contiguous(), inverse


def _row_major(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous()


ROUNDED = Fused(_rounded, dynamic=True)
ROUNDED_COLUMNS = Fused(_rounded_columns, dynamic=True)
CONTIGUOUS = Fused(_row_major, dynamic=True)  # torch's kernel transposes at 0.3 TB/s


def product(a: Scaled, b: Scaled, dtype: torch.dtype, use_kernel: bool, fast: bool = False) -> torch.Tensor:
    """Return a b^T, [M, K] x [N, K] -> [M, N].

    Without the kernel the rounded matrices are multiplied in `dtype`, which holds them exactly. `fast`: keep fewer bits
    of the sums where the kernel can.
    """
    if not use_kernel or not a.values.numel() or b.values.shape[0] % FLOAT8_MULTIPLE:
        return a.expand(dtype) @ b.expand(dtype).t()
    scales = dict(scale_a=a.inverse, scale_b=b.inverse.t())
    values = _padded(_contiguous(a.values)), _padded(_contiguous(b.values)).t()
    return scaled_mm(*values, **scales, out_dtype=dtype, use_fast_accum=fast)


def _contiguous(values: torch.Tensor) -> torch.Tensor:
    if values.is_contiguous() or values.device.type == "cpu":
        return values.contiguous()
    return CONTIGUOUS(values)


def _padded(values: torch.Tensor) -> torch.Tensor:
    """Append zeros to rows [R, C], up to the next multiple that the kernel takes."""
    missing = -values.shape[1] % FLOAT8_MULTIPLE
    return F.pad(values.view(torch.uint8), (0, missing)).view(values.dtype) if missing else values


def has_kernel(device_type: str) -> bool:
    """Return True if this rank's device multiplies 8-bit numbers: GPUs from compute capability 8.9 on."""
    return device_type == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
