"""Fake quantization: numbers rounded to those of a format with few bits, and kept in the type of the computation.

The formats are those that quantization-aware training of torchao 0.18 imitates. Arithmetic is in float32 (float64 for
float64), where torchao rounds some scales to the type of the numbers.

Numbers of a group along a row share a scale. It may depend on more than its group, on the extent of the row or of the
matrix. Ranks that hold parts of a row reduce extents by their maximum, and get the numbers of the full row.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch

FLOAT8 = torch.float8_e4m3fn
LARGEST8 = torch.finfo(FLOAT8).max
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
LARGEST4 = 6.0
"""Of e2m1, the 4-bit numbers 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign."""


class Rounded(NamedTuple):
    """Rounded numbers [R, C]."""

    values: torch.Tensor
    inside: torch.Tensor | None = None
    """False where a number was clipped, and so has no gradient, bool [R, C]; None: nowhere."""

    def masked(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the straight-through gradient [R, C] of the numbers; `grad`: the one of `values`."""
        return grad if self.inside is None else grad * self.inside


@dataclass(frozen=True)
class NumberFormat:
    """Rounds matrices [R, C] in groups of `group` numbers of a row."""

    group: int = 1
    shared: ClassVar[Literal["group", "row", "matrix"]] = "group"
    """The numbers that a scale depends on."""

    def extent(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return what a scale needs of rows or of all, at least 0: x [R, C] -> [R, 1] or [1, 1]; None if nothing."""
        return None if self.shared == "group" else x.abs().amax(-1 if self.shared == "row" else (0, 1), keepdim=True)

    def round(self, x: torch.Tensor, extent: torch.Tensor | None) -> Rounded:
        """Round x [R, C], at least float32. `extent`: from `extent`, the maximum over ranks that share rows."""
        raise NotImplementedError

    def groups(self, x: torch.Tensor) -> torch.Tensor:
        """[R, C] -> [R, C / group, group]"""
        return x.unflatten(-1, (-1, self.group))


@dataclass(frozen=True)
class SymmetricInt(NumberFormat):
    """[R, C] to integers of `bits` bits around 0: IntxFakeQuantizeConfig(is_symmetric=True)."""

    bits: int = 4

    def round(self, x: torch.Tensor, extent: torch.Tensor | None) -> Rounded:
        half, grouped = 2 ** (self.bits - 1), self.groups(x)
        scale = (grouped.abs().amax(-1, keepdim=True) / (half - 0.5)).clamp(min=SMALLEST_SCALE)
        return _integers(grouped, scale, -half, half - 1)


class AffineInt4(NumberFormat):
    """[R, C] to 16 levels from the smallest to the largest of a group: Int4WeightFakeQuantizeConfig for bfloat16."""

    def round(self, x: torch.Tensor, extent: torch.Tensor | None) -> Rounded:
        grouped = self.groups(x)
        smallest = grouped.amin(-1, keepdim=True)
        scale = (grouped.amax(-1, keepdim=True) - smallest).clamp(min=1e-6) / 15
        levels = ((grouped - smallest) / scale).round().clamp(0, 15)
        return Rounded(((levels - 8) * scale + (smallest + 8 * scale)).flatten(-2))


class Float8(NumberFormat):
    """[R, C] to e4m3 with a scale for each row: Float8FakeQuantizeConfig(granularity=PerRow())."""

    shared = "row"

    def round(self, x: torch.Tensor, extent: torch.Tensor | None) -> Rounded:
        assert extent is not None
        scale = (extent / LARGEST8).clamp(min=SMALLEST_SCALE)
        return Rounded((x / scale).clamp(-LARGEST8, LARGEST8).to(FLOAT8).to(x.dtype) * scale)


class Int4OfFloat8(Float8):
    """[R, C] to float8 and then to integers of 4 bits: Int4WeightFakeQuantizeConfig for float8."""

    def round(self, x: torch.Tensor, extent: torch.Tensor | None) -> Rounded:
        grouped = self.groups(super().round(x, extent).values)
        scale = (grouped.abs().amax(-1, keepdim=True) / 8).clamp(min=1e-6)
        return _integers(grouped, scale, -8, 7)


class Int8Rows(NumberFormat):
    """[R, C] to integers of 8 bits from the smallest to the largest of a row: IntxFakeQuantizeConfig("per_token")."""

    shared = "row"

    def extent(self, x: torch.Tensor) -> torch.Tensor:
        """Return how far each row reaches below and above 0, [R, 2]."""
        return torch.stack((-x.amin(-1), x.amax(-1)), -1).clamp(min=0)

    def round(self, x: torch.Tensor, extent: torch.Tensor | None) -> Rounded:
        assert extent is not None
        below, above = extent.split(1, -1)
        scale = ((above + below) / 255).clamp(min=SMALLEST_SCALE)
        zero = ((below / scale).round() - 128).clamp(-128, 127)
        return _integers(x[:, None], scale[:, None], -128, 127, zero[:, None])


class NVFP4(NumberFormat):
    """[R, C] to e2m1 with a scale in e4m3 for each group of 16, relative to the largest number of the matrix:
    NVFP4FakeQuantizeConfig for weights.
    """

    shared: ClassVar[Literal["group", "row", "matrix"]] = "matrix"

    def round(self, x: torch.Tensor, extent: torch.Tensor | None) -> Rounded:
        assert extent is not None
        smallest_inner, grouped = torch.finfo(FLOAT8).tiny, self.groups(x)
        # the inverse of both scales has to be finite, or zeros would become NaN
        outer = (extent / (LARGEST8 * LARGEST4)).clamp(min=SMALLEST_SCALE / smallest_inner)[..., None]
        largest = grouped.abs().amax(-1, keepdim=True)
        inner = (largest / LARGEST4 / outer).clamp(smallest_inner, LARGEST8).to(FLOAT8).to(x.dtype)
        return Rounded((_e2m1(grouped * (1 / outer / inner)) * (outer * inner)).flatten(-2))


class NVFP4Rows(NVFP4):
    """The same relative to the largest number of the row.

    A scale of all tokens that a rank computes at once would depend on the plan and on the size of microbatches.
    """

    shared = "row"


class MXFP4(NumberFormat):
    """[R, C] to e2m1 with a power of two for each group of 32, rounded up: MXFakeQuantizeConfig."""

    def round(self, x: torch.Tensor, extent: torch.Tensor | None) -> Rounded:
        grouped = self.groups(x)
        exponent = (grouped.abs().amax(-1, keepdim=True) / LARGEST4).log2().ceil().clamp(-126, 127)
        return Rounded((_e2m1(grouped * exponent.neg().exp2()) * exponent.exp2()).flatten(-2))


def _integers(
    x: torch.Tensor, scale: torch.Tensor, lowest: int, highest: int, zero: torch.Tensor | float = 0.0
) -> Rounded:
    """Round [R, G, N] to integers times `scale` [R, G, 1]; `zero`: the integer that stands for 0."""
    integers = (x * (1 / scale)).round() + zero
    clipped = integers.clamp(lowest, highest)
    return Rounded(((clipped - zero) * scale).flatten(-2), (clipped == integers).flatten(-2))


def _e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest number of e2m1, a tie to the one with an even last bit."""
    x = x.clamp(-LARGEST4, LARGEST4)
    step = 0.5 * (1 + (x.abs() >= 2).to(x.dtype) + 2 * (x.abs() >= 4).to(x.dtype))  # 0.5, 1 or 2
    return (x / step).round() * step


class Formats(NamedTuple):
    """The formats of a linear's weights and inputs."""

    weights: NumberFormat
    inputs: NumberFormat | None


def formats_of(weights: str, inputs: str | None, group: int) -> Formats:
    """Return the formats of two types by name: those of the section [qat], in combinations that its rules allow."""
    if weights == "int4" and inputs == "fp8":
        return Formats(Int4OfFloat8(group), Float8())
    if weights == "int4" and inputs is None:
        return Formats(AffineInt4(group), None)
    weight_formats = {"fp8": Float8(), "nvfp4": NVFP4(group), "mxfp4": MXFP4(group)}
    input_formats = {"int8": Int8Rows(), "fp8": Float8(), "nvfp4": NVFP4Rows(group), "mxfp4": MXFP4(group)}
    bits = {"int4": 4, "int8": 8}
    weight_format = SymmetricInt(group, bits[weights]) if weights in bits else weight_formats[weights]
    return Formats(weight_format, None if inputs is None else input_formats[inputs])
