"""Formulas with a compiled and an eager form: both give the bits of the formula, and a broken compiler is survived."""

import pytest
import torch

from torchtitan.adapters import unpacking
from torchtitan.adapters.quantized import NF4, Int8
from torchtitan.core import fused
from torchtitan.core.keyed_rng import STRIDES, scrambled
from torchtitan.models import dropout
from torchtitan.models.dropout import Dropout, token_keys


def nf4_formula(codes, scales, rows, dtype):
    """Unpack a matrix in one piece, weight by weight."""
    indices = torch.stack((codes >> 4, codes & 15), dim=-1).flatten(1).int()
    block_scales = scales.float() * (rows.view(torch.float32) / 255)[:, None]
    values = torch.tensor(unpacking.LEVELS)[indices].unflatten(1, (block_scales.shape[1], -1))
    return (values * block_scales[..., None]).flatten(1).to(dtype)


def codes_formula(weight, scales, rows, block):
    """Find the level next to each weight by bisection."""
    levels = torch.tensor(unpacking.LEVELS)
    block_scales = (scales.float() * (rows.view(torch.float32) / 255)[:, None])[..., None]
    normal = torch.where(block_scales > 0, weight.unflatten(1, (-1, block)) / block_scales, 0.0)
    numbers = torch.bucketize(normal, (levels[1:] + levels[:-1]) / 2).to(torch.uint8).flatten(1)
    return numbers[:, ::2] << 4 | numbers[:, 1::2]


def int8_formula(codes, rows, dtype):
    return (codes.float() * rows.view(torch.float32)[:, None]).to(dtype)


def dropout_formula(x, keys, p, stream, first=0):
    """Drop by numbers of 64 bits, of which the lower 32 count."""
    features = scrambled(torch.arange(first, first + x.shape[-1]) + stream * STRIDES[2])
    return torch.where(scrambled(keys[..., None] ^ features) >= int(p * 2**32), x / (1 - p), 0)


def normal_weights(outputs, inputs):
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)) * 0.02


def packed_nf4(outputs, inputs, block):
    weight = normal_weights(outputs, inputs)
    return NF4().quantize(weight.unflatten(1, (-1, block)), weight.abs().amax(1))


def packed_int8(outputs, inputs):
    weight = normal_weights(outputs, inputs)
    return Int8().quantize(weight[:, None], weight.abs().amax(1))


DTYPES = torch.float32, torch.bfloat16, torch.float64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 64, 64), (5, 96, 32), (3, 48, 16), (0, 64, 64)])
def test_unpacking_in_pieces_gives_the_bits_of_the_formula(monkeypatch, shape, dtype):
    """Pieces of 128 weights; the last one may be a part of a piece, and a rank may have no rows."""
    outputs, inputs, block = shape
    packed, packed8 = packed_nf4(max(outputs, 1), inputs, block), packed_int8(max(outputs, 1), inputs)
    monkeypatch.setattr(unpacking, "LARGE", 128)
    parts = [part[:outputs] for part in packed]
    unpacked = NF4().dequantize(*parts, dtype=dtype)
    assert unpacked.shape == (outputs, inputs) and torch.equal(unpacked, nf4_formula(*parts, dtype))
    parts = [part[:outputs] for part in packed8]
    assert torch.equal(Int8().dequantize(*parts, dtype=dtype), int8_formula(*parts, dtype))


@pytest.mark.parametrize("shape", [(8, 64, 64), (5, 96, 32), (3, 48, 16)])
def test_packing_in_pieces_gives_the_bits_of_the_formula(monkeypatch, shape):
    """Among the weights are a block of zeros, and edges between levels in a block of scale 1, which belong below."""
    outputs, inputs, block = shape
    weight = normal_weights(outputs, inputs)
    weight[0, :block] = 0
    weight[1, :16] = torch.tensor([*unpacking._EDGES, 1.0])
    monkeypatch.setattr(unpacking, "LARGE", 128)
    codes, scales, rows = NF4().quantize(weight.unflatten(1, (-1, block)), weight.abs().amax(1))
    assert torch.equal(codes, codes_formula(weight, scales, rows, block))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("piece", [1, 100, 2**18])
def test_dropout_in_pieces_gives_the_bits_of_the_formula(monkeypatch, piece, dtype):
    monkeypatch.setattr(dropout, "PIECE", piece)
    x = torch.randn(2, 7, 24, dtype=dtype, requires_grad=True)
    keys, drop, direction = token_keys(1, 2, torch.arange(2), 7), Dropout(0.3, stream=2**32 - 5), torch.randn_like(x)
    y, expected = drop(x, keys, first=3), dropout_formula(x, keys, 0.3, 2**32 - 5, first=3)
    assert torch.equal(y, expected)
    (grad,), (expected_grad,) = (torch.autograd.grad(out, x, direction) for out in (y, expected))
    assert torch.equal(grad, expected_grad)


def test_backward_of_dropout_saves_no_mask():
    x, keys = torch.randn(2, 7, 24, requires_grad=True), token_keys(1, 2, torch.arange(2), 7)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        Dropout(0.3)(x, keys)
    assert [t.shape for t in saved] == [keys.shape]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_formulas_give_the_bits_of_the_eager_ones(dtype):
    """The matrix is large enough to be compiled, and its last piece overlaps the one before."""
    parts, parts8 = packed_nf4(400, 2048, 64), packed_int8(400, 2048)
    assert fused.LARGE < 400 * 2048 and 400 * 2048 % fused.LARGE
    assert torch.equal(NF4().dequantize(*parts, dtype=dtype), nf4_formula(*parts, dtype))
    assert torch.equal(Int8().dequantize(*parts8, dtype=dtype), int8_formula(*parts8, dtype))
    assert torch.equal(parts[0], codes_formula(normal_weights(400, 2048), *parts[1:], 64))
    keys = token_keys(1, 2, torch.arange(2), 300)
    for width in (1024, 1000):
        x = torch.randn(2, 300, width, dtype=dtype, requires_grad=True)
        y, expected = Dropout(0.3, 7)(x, keys), dropout_formula(x, keys, 0.3, 7)
        assert torch.equal(y, expected)
        (grad,), (expected_grad,) = (torch.autograd.grad(out, x, torch.ones_like(x)) for out in (y, expected))
        assert torch.equal(grad, expected_grad)
    for function in (unpacking._fused_packing, unpacking._blocks_on_cpu, unpacking._rows, dropout._fused_drop):
        assert function.is_proven and not function.is_broken


def test_a_compiler_that_does_not_work_is_reported_once(monkeypatch, caplog):
    def no_compiler(function, **options):
        def call(*args):
            raise RuntimeError("no g++ here\nand a stack")

        return call

    monkeypatch.setattr(torch, "compile", no_compiler)

    def twice(x):
        return 2 * x

    function, large = fused.Fused(twice, eager=lambda x: x + x), torch.ones(fused.LARGE)
    small = large[1:]
    assert torch.equal(function(small), 2 * small) and not caplog.records
    for _ in range(2):
        assert torch.equal(function(large), 2 * large)
    (record,) = caplog.records
    assert record.getMessage() == "torch.compile does not work here, so twice is slower: no g++ here"
