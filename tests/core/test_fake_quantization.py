"""Formats of fake quantization: equal to torchao's numbers, each nearest on its grid, the same on parts of a row."""

import pytest
import torch

from torchtitan.core.fake_quantization import (
    MXFP4,
    NVFP4,
    AffineInt4,
    Float8,
    Int4OfFloat8,
    Int8Rows,
    NVFP4Rows,
    SymmetricInt,
    formats_of,
)

# Of x below by torchao 0.18.0: the first five numbers of the first row, and the sum of the numbers times 1, 2, 3, ...
TORCHAO = {
    SymmetricInt(32, 4): ([-1.6, 0.0, 1.28, -1.28, 0.32], 954.9459650),
    SymmetricInt(16, 8): ([-1.592471, -0.118588, 1.355294, -1.202824, 0.288], 964.9391019),
    AffineInt4(32): ([-1.6, 0.0, 1.333333, -1.333333, 0.266667], 950.5905526),
    Int4OfFloat8(32): ([-1.5, 0.0, 1.5, -1.2, 0.3], 913.7145430),
    Float8(): ([-1.542857, -0.117857, 1.371429, -1.2, 0.278571], 958.4644048),
    Int8Rows(): ([-1.6, -0.12549, 1.364706, -1.192157, 0.282353], 963.2760166),
    NVFP4(16): ([-1.485714, -0.185714, 1.485714, -1.114286, 0.371429], 988.5719683),
    MXFP4(32): ([-1.5, 0.0, 1.5, -1.0, 0.25], 912.0078125),
}
FORMATS = [*TORCHAO, NVFP4Rows(16)]
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
GRIDS = {
    "int4": torch.arange(-8.0, 8).double(),
    "e2m1": torch.tensor([s * v for s in (-1, 1) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]).double(),
    "e4m3": E4M3[E4M3.isfinite()],
}


def rounded(rounding, x):
    return rounding.round(x, rounding.extent(x))


@pytest.mark.parametrize("rounding", TORCHAO, ids=str)
def test_equals_torchao(rounding):
    numbers = torch.arange(128, dtype=torch.float32).view(2, 64)
    values = rounded(rounding, ((numbers * 37 % 101) - 40) / 25 * torch.tensor([[1.0], [0.03]])).values.double()
    first, total = TORCHAO[rounding]
    assert values[0, :5].tolist() == pytest.approx(first, abs=1e-6)
    assert float((values * torch.arange(1, 129).view(2, 64)).sum()) == pytest.approx(total, rel=1e-6)


def nearest(x, grid):
    return grid[(x[..., None] - grid).abs().argmin(-1)]


@pytest.mark.parametrize("seed", range(4))
def test_numbers_are_the_nearest_of_their_grid(seed):
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 10.0 ** (seed - 2)
    groups = x.unflatten(1, (-1, 16))
    largest = groups.abs().amax(-1, keepdim=True)
    scales = {
        SymmetricInt(16, 4): ("int4", largest / 7.5),
        MXFP4(16): ("e2m1", 2.0 ** (largest / 6).log2().ceil()),
        Float8(): ("e4m3", x.abs().amax(1).view(6, 1, 1) / 448),
    }
    for outer, rounding in ((x.abs().max(), NVFP4(16)), (x.abs().amax(1).view(6, 1, 1), NVFP4Rows(16))):
        block = (largest / 6) / (outer / 448 / 6)
        scales[rounding] = ("e2m1", nearest(block.clamp(2.0**-6, 448), GRIDS["e4m3"]) * outer / 448 / 6)
    for rounding, (grid, scale) in scales.items():
        expected = (nearest(groups / scale, GRIDS[grid]) * scale).flatten(1)
        errors = [(values - x).abs() for values in (rounded(rounding, x).values, expected)]  # of a tie either will do
        torch.testing.assert_close(*errors, msg=str(rounding))


@pytest.mark.parametrize("rounding", FORMATS, ids=str)
def test_rounded_numbers_stay_and_zero_rows_too(rounding):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[1], x[2, :32] = 0, 0
    values = rounded(rounding, x).values
    assert values.isfinite().all() and (values[1] == 0).all()
    if not isinstance(rounding, SymmetricInt | Int4OfFloat8 | Int8Rows | NVFP4):  # of which a clipped maximum shrinks
        torch.testing.assert_close(rounded(rounding, values).values, values)
    assert (values - x).abs().max() < x.abs().max() / 4


@pytest.mark.parametrize("rounding", FORMATS, ids=str)
def test_zeros_and_denormal_numbers_stay_finite_in_float32(rounding):
    tokens = torch.zeros(3, 64)
    tokens[1], tokens[2] = torch.tensor(1e-40), torch.linspace(-1, 1, 64)
    for x in (tokens, tokens[:2], tokens[:1]):
        values = rounded(rounding, x).values
        assert values.isfinite().all() and (values[0] == 0).all()


@pytest.mark.parametrize("rounding", FORMATS, ids=str)
def test_parts_of_rows_with_the_extent_of_all(rounding):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    halves, full = x.chunk(2, 1), rounded(rounding, x)
    extents = [rounding.extent(half) for half in halves]
    extent = None if extents[0] is None else torch.maximum(*extents)
    parts = [rounding.round(half, extent) for half in halves]
    assert torch.equal(torch.cat([part.values for part in parts], 1), full.values)


@pytest.mark.parametrize(
    "rounding, largest", [(SymmetricInt(8, 4), 7.5), (SymmetricInt(8, 8), 127.5), (Int4OfFloat8(8), 8.0)], ids=str
)
def test_clipped_numbers_have_no_gradient(rounding, largest):
    x = (
        torch.tensor([[-1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 0.875, 1.0]]) * largest
    )  # which is the largest integer + 1/2, 1
    result = rounded(rounding, x)
    assert result.masked(torch.full_like(x, 3.0))[0].tolist() == [3] * 7 + [0]
    assert rounded(AffineInt4(8), x).masked(x) is x


def test_formats_of_the_names():
    assert formats_of("int4", None, 32) == (AffineInt4(32), None)
    assert formats_of("int4", "int8", 32) == (SymmetricInt(32, 4), Int8Rows())
    assert formats_of("int4", "fp8", 32) == (Int4OfFloat8(32), Float8())
    assert formats_of("int8", "int8", 32) == (SymmetricInt(32, 8), Int8Rows())
    assert formats_of("fp8", "fp8", 1) == (Float8(), Float8())
    assert formats_of("nvfp4", "nvfp4", 16) == (NVFP4(16), NVFP4Rows(16))
    assert formats_of("mxfp4", "mxfp4", 32) == (MXFP4(32), MXFP4(32))
