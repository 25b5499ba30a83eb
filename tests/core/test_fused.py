"""Formulas with a compiled and an eager form: both give the formula's bits, and a compiler that fails is survived."""

import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchtitan.adapters import quantized
from torchtitan.adapters.quantized import NF4, Int8
from torchtitan.core import fused
from torchtitan.core.random_draws import STRIDES, scrambled
from torchtitan.models import dropout
from torchtitan.models.dropout import Dropout, token_keys


def nf4_formula(codes, scales, rows, dtype):
    """Unpack a matrix in one piece, weight by weight."""
    indices = torch.stack((codes >> 4, codes & 15), dim=-1).flatten(1).int()
    block_scales = scales.float() * (rows.view(torch.float32) / 255)[:, None]
    values = torch.tensor(quantized.LEVELS)[indices].unflatten(1, (block_scales.shape[1], -1))
    return (values * block_scales[..., None]).flatten(1).to(dtype)


def codes_formula(weight, scales, rows, block):
    """Find the level next to each weight by bisection."""
    levels = torch.tensor(quantized.LEVELS)
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
    monkeypatch.setattr(quantized, "LARGE", 128)
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
    weight[1, :16] = torch.tensor([*quantized._EDGES, 1.0])
    monkeypatch.setattr(quantized, "LARGE", 128)
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
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
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
    functions = quantized._fused_packing, quantized._blocks_on_cpu, quantized._rows, dropout._fused_drop
    assert not any(function.is_broken or function.refused for function in functions)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= len(functions)


def twice(x):
    return x.mul_(2)


def twice_in_eager(x):
    return x.add_(x)


def use_compiler(monkeypatch, compiled):
    """Make torch.compile return `compiled`."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled)
    fused.compile_lazily.cache_clear()


def raising(error):
    def call(*args, **options):
        raise error

    return call


@pytest.mark.parametrize("fails_when_called", [True, False])
def test_a_compiler_that_does_not_work_is_reported_once(fails_when_called, monkeypatch, caplog):
    error = torch._dynamo.exc.TorchDynamoException("no g++ here\nand a stack")
    use_compiler(monkeypatch, raising(error))
    if not fails_when_called:
        monkeypatch.setattr(torch, "compile", raising(RuntimeError("no g++ here")))
    function, large, small = fused.Fused(twice, twice_in_eager), torch.ones(fused.LARGE), torch.ones(3)
    assert function(small).sum() == 6 and not caplog.records
    for times in (2, 4):
        assert function(large).eq(times).all()
    (record,) = caplog.records
    assert record.getMessage() == "torch.compile does not work here, so twice is slower: no g++ here"


def test_a_compiler_may_fail_in_a_later_call(monkeypatch):
    use_compiler(monkeypatch, twice)
    function, large = fused.Fused(twice, twice_in_eager), torch.ones(fused.LARGE)
    function(large)
    use_compiler(monkeypatch, raising(torch._dynamo.exc.TorchDynamoException("no memory to compile in")))
    assert function(large).eq(4).all() and function.is_broken


def test_an_error_of_the_computation_is_raised_and_nothing_repeated(monkeypatch):
    use_compiler(monkeypatch, lambda x: raising(RuntimeError("launch failed"))(x.mul_(2)))
    large = torch.ones(fused.LARGE)
    with pytest.raises(RuntimeError, match="launch failed"):
        fused.Fused(twice, twice_in_eager)(large)
    assert large.eq(2).all()


def test_beyond_torchs_limit_of_compiled_forms_eager_computes(monkeypatch):
    """Torch itself would run the formula without compiling it, with temporaries of the full size."""
    torch._dynamo.reset()
    fused.compile_lazily.cache_clear()
    compile_to_torch = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compile_to_torch)
    monkeypatch.setattr(fused, "LARGE", 1)
    in_eager = []
    function = fused.Fused(twice, lambda x: in_eager.append(len(x)) or twice_in_eager(x), dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for size in (2, 3, 4, 4, 5, 2, 0):
            assert function(torch.ones(size)).eq(2).all()
    assert in_eager == [4, 4, 5, 0] and not function.is_broken
    assert function.refused == {(torch.Size([size]), torch.float32) for size in (4, 5)}
    fused.compile_lazily.cache_clear()


def test_on_a_cpu_a_formula_is_compiled_after_enough_of_eager(monkeypatch):
    use_compiler(monkeypatch, lambda x: compiled.append(len(x)) or twice(x))
    in_eager, compiled = [], []
    function = fused.Fused(twice, lambda x: in_eager.append(len(x)) or twice_in_eager(x), large=10, after=30)
    for size in (9, 10, 9, 20, 9, 10):
        assert function(torch.ones(size)).eq(2).all()
    with FakeTensorMode():
        function(torch.ones(10))
    assert (in_eager, compiled) == ([9, 10, 9, 20, 9, 10], [10])
    never = fused.Fused(twice, twice_in_eager, large=10, after=fused.NEVER)
    never(torch.ones(10))
    assert compiled == [10]


def test_pieces_cover_a_length():
    """Of a rank without rows, the size of a piece is 0 too, where it is the number of rows."""
    assert [*fused.pieces(0, 0), *fused.pieces(0, 4)] == []
    assert [*fused.pieces(10, 4)] == [slice(0, 4), slice(4, 8), slice(6, 10)] and [*fused.pieces(3, 4)] == [slice(0, 3)]


def test_compiled_formulas_do_not_check_their_indices(monkeypatch):
    """It takes a seventh of the time of packing and unpacking moments in 8 bits."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: arguments.append(options) or function)
    fused.compile_lazily.cache_clear()
    arguments = []
    fused.Fused(twice, dynamic=True)(torch.ones(fused.LARGE))
    fused.compile_lazily(twice_in_eager)
    expected = {"options": {"assert_indirect_indexing": False}, "dynamic": True, "fullgraph": True}
    assert arguments == [expected, {}]


def test_within_a_compiled_function_a_formula_is_a_part_of_it():
    inner = fused.Fused(twice, raising(AssertionError))
    torch._dynamo.reset()
    function = torch.compile(lambda x: inner(x) + 1, backend="eager", fullgraph=True)
    assert function(torch.ones(3)).eq(3).all()


def test_a_formula_that_breaks_the_graph_is_computed_once(monkeypatch):
    """Its first half would otherwise be computed before the second is compiled."""

    def broken(x):
        x.mul_(2)
        torch._dynamo.graph_break()
        return x.mul_(3)

    monkeypatch.setattr(fused, "LARGE", 1)
    function = fused.Fused(broken)
    assert function(torch.ones(4)).eq(6).all() and function.is_broken


@pytest.mark.parametrize("is_compiled_for_each_float", sorted({fused.IS_COMPILED_FOR_EACH_FLOAT, True}))
def test_a_function_is_compiled_once_for_all_values_of_a_float(monkeypatch, is_compiled_for_each_float):
    """Torch before 2.13 needs numbers as tensors for this; the present one takes both."""
    monkeypatch.setattr(fused, "IS_COMPILED_FOR_EACH_FLOAT", is_compiled_for_each_float)

    def decayed(weight: torch.Tensor, rates: tuple[float, int]) -> torch.Tensor:
        return weight * (rates[0] - 1) + weight / rates[1]

    function, weight = fused.Fused(decayed, dynamic=True, large=1), torch.randn(64, 64)
    torch._dynamo.utils.counters.clear()
    for step in range(4):
        rates = 1 - step / 7, 3
        torch.testing.assert_close(function(weight, rates), weight * (rates[0] - 1) + weight / 3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
