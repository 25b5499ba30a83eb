"""Tests of linears that multiply in float8: equal to torchao's, independent of the plan, and gathered in 8 bits."""

import copy
import math
from dataclasses import replace
from itertools import product as all_of
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from tests.plans.combinations import COMPOSED, LAYOUTS, Combination
from tests.support import table_rows
from tests.support.pool import run_ranks
from torchtitan.config.manager import load
from torchtitan.core.float8 import E4M3, E5M2, Scaled, product, quantize
from torchtitan.job import ResolvedJob
from torchtitan.models import layers
from torchtitan.models.deepseek.model import PLAN
from torchtitan.models.layers import Float8Linear, convert, use_float8
from torchtitan.models.sizes import HEAD, linears
from torchtitan.parallelisms import parallel_model
from torchtitan.parallelisms.pipeline.split_backward import backward_inputs
from torchtitan.planner.rehearsal import rehearse
from torchtitan.rules import check

RECIPES = ("tensorwise", "rowwise")


def as_float8(linear: nn.Linear, recipe: str, use_kernel: bool = False) -> Float8Linear:
    linear = copy.deepcopy(linear)
    convert(linear, recipe, use_kernel)
    return linear


def results(linear: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Return the output [..., N] for x [..., K], and the gradients of input, weight and bias."""
    x = x.clone().requires_grad_()
    y = linear(x)
    y.backward(grad)
    return [y.detach(), x.grad, linear.weight.grad, linear.bias.grad]


def spread(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Draw a tensor of this shape; its magnitudes differ by rows and columns."""
    x = torch.randn(shape) * torch.randn(*shape[:-1], 1).exp() * torch.randn(shape[-1]).exp()
    return x.to(dtype)


@pytest.mark.parametrize("use_kernel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_equal_to_torchao(recipe, dtype, use_kernel):
    """Bit by bit, with torchao's products emulated and ours too or by torch._scaled_mm, which also runs on a CPU.

    torchao's default scales are no powers of two with "tensorwise".
    """
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear as Reference

    torch.manual_seed(1)
    linear, x, grad = nn.Linear(64, 48).to(dtype), spread(2, 24, 64, dtype=dtype), 1e-4 * spread(2, 24, 48, dtype=dtype)
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    default, expected = (
        results(Reference.from_float(copy.deepcopy(linear), choice), x, grad)
        for choice in (config, replace(config, round_scales_to_power_of_2=True))
    )
    for tensor, reference in zip(results(as_float8(linear, recipe, use_kernel), x, grad), expected, strict=True):
        assert tensor.dtype == dtype and torch.equal(tensor, reference)
    for tensor, reference in zip(default[:3], expected[:3], strict=True):
        assert torch.equal(tensor, reference) is (recipe == "rowwise")
    exact = nn.functional.linear(x, linear.weight, linear.bias)
    assert 1e-3 < (expected[0] - exact).abs().max() / exact.abs().max() < 0.1  # the rounding is there


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rounding_does_not_depend_on_the_other_rows(dtype):
    """Magnitudes from 2^-13 of the largest on round to the same numbers, smaller ones to the same number of places."""
    torch.manual_seed(2)
    signs = torch.randn(32, 64).sign()
    x = signs * torch.exp2(-6 * torch.rand(32, 64) - torch.arange(0, 16, 0.5)[:, None])  # rows get smaller and smaller
    by_rows = torch.cat([quantize(rows, dtype, rowwise=False).expand(x.dtype) for rows in x.split(4)])
    full = quantize(x, dtype, rowwise=False).expand(x.dtype)
    is_wide = x.abs() >= 2.0**-13 * x.abs().max()
    assert torch.equal(by_rows[is_wide], full[is_wide]) and not is_wide.all()
    assert (by_rows - full).abs().max() <= 2.0**-17 * x.abs().max()
    assert (full - x).abs().div(x.abs())[is_wide].max() > 2.0**-5  # the rounding is there


def test_a_scale_is_the_largest_power_of_two_that_fits():
    for largest, factor in ((448.0, 1.0), (449.0, 0.5), (1.0, 256.0), (1.75, 256.0), (1.76, 128.0)):
        x = torch.tensor([[0.0, -largest]])
        assert quantize(x, E4M3, rowwise=False).inverse.item() == 1 / factor
    zeros = quantize(torch.zeros(2, 4), E4M3, rowwise=True)
    assert zeros.inverse.shape == (2, 1) and not zeros.expand(torch.float32).any()


@pytest.mark.parametrize("use_kernel", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_tokens(recipe, use_kernel):
    """The output and the gradients of weights have their shapes, and are equal to a plain linear's."""
    linear, x, grad = nn.Linear(64, 48), torch.randn(2, 0, 64), torch.randn(2, 0, 48)
    pairs = zip(results(as_float8(linear, recipe, use_kernel), x, grad), results(linear, x, grad), strict=True)
    assert all(torch.equal(tensor, reference) for tensor, reference in pairs)
    assert quantize(x[0], E4M3, rowwise=False).inverse == 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rowwise", [False, True])
def test_numbers_that_are_not_finite_stay_visible(value, rowwise):
    x = torch.randn(4, 16)
    x[1, 2] = value
    assert quantize(x, E4M3, rowwise).expand(torch.float32)[1, 2].isnan()


@pytest.mark.parametrize("rowwise", [False, True])
def test_the_kernel_takes_any_number_of_tokens(rowwise):
    """The products over 21 tokens are padded; matrices with other sides are multiplied without the kernel."""
    torch.manual_seed(3)
    a, b = (quantize(spread(rows, 21), E4M3, rowwise) for rows in (32, 48))
    assert torch.equal(*(product(a, b, torch.bfloat16, use_kernel) for use_kernel in (False, True)))
    odd = Scaled(b.values[:40], b.inverse[:40] if rowwise else b.inverse)
    assert product(a, odd, torch.bfloat16, use_kernel=True).shape == (32, 40)


def test_linears_of_blocks_are_converted():
    with torch.device("meta"):
        plain = table_rows.build_plain(Combination(model="deepseek"))
    use_float8(plain, PLAN, "rowwise", ["*.wo", "layers.0.*"], use_kernel=False)
    converted = {name for name, module in plain.named_modules() if isinstance(module, Float8Linear)}
    assert converted and all(name.startswith(("layers.1.", "layers.2.")) for name in converted)
    assert not any("gate" in name or name.endswith("wo") for name in converted)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_split_backward_computes_each_product_once(recipe, monkeypatch):
    torch.manual_seed(4)
    linear, x, grad = nn.Linear(32, 48), spread(16, 32), spread(16, 48)
    expected = results(as_float8(linear, recipe), x, grad)
    shapes = []
    monkeypatch.setattr(
        layers, "product", lambda *args, **kwargs: shapes.append((y := product(*args, **kwargs)).shape) or y
    )
    linear, x = as_float8(linear, recipe), x.clone().requires_grad_()
    y = linear(x)
    weights = backward_inputs([get_gradient_edge(y)], [grad], [x])
    assert shapes == [(16, 48), (16, 32)] and torch.equal(x.grad, expected[1])
    (of_input,) = torch.autograd.grad(as_float8(linear, recipe)(x), x, grad)  # of a leaf
    assert torch.equal(of_input, expected[1]) and shapes.pop() == (16, 32) and shapes.pop() == (16, 48)
    weights.run()
    assert shapes[2:] == [(48, 32)] and torch.equal(linear.weight.grad, expected[2])


def results_of_gathers(row: Combination) -> list:
    """Run a row with weights gathered in 8 bits, and in the type of the computation; return both results."""
    narrow = table_rows.run_row(row)
    with mock.patch.object(parallel_model, "gather_in_float8"):
        return [narrow, table_rows.run_row(row)]


@pytest.mark.parametrize(
    "row",
    [
        Combination(**LAYOUTS["FSDP 2"], float8="tensorwise", precision="bfloat16", accumulation=2, recompute="full"),
        Combination(**COMPOSED["FSDP 2 x TP 2"], float8="tensorwise", precision="bfloat16"),
        Combination(**COMPOSED["PP 2 x FSDP 2"], float8="tensorwise", precision="float32"),
    ],
    ids=str,
)
def test_a_gather_in_8_bits_changes_no_bit(row):
    for narrow, wide in run_ranks(row.ranks, results_of_gathers, row):
        assert narrow[:2] == wide[:2]
        assert narrow[2].keys() == wide[2].keys()
        assert all(np.array_equal(grad, wide[2][name]) for name, grad in narrow[2].items())


def test_weights_are_gathered_in_8_bits():
    """The rest of a layer and the ends stay in bfloat16; a matrix has 4 more bytes for its scale."""
    arguments = ["--model.tokenizer_path=bytes", "--model.overrides={n_layers = 2, dim = 512}", "--training.seq_len=64"]
    sent = {}
    for recipe in ("none", *RECIPES):
        config = load([*arguments, f"--training.float8={recipe}"])
        sent[recipe] = rehearse(ResolvedJob(config, 4, "cuda"), 0).sent["dp_shard", "all_gather", "bytes"]
    matrices = [math.prod(sizes) for name, sizes in linears(ResolvedJob(config).model.args).items() if name != HEAD]
    assert len(matrices) == 14 and sent["none"] == sent["rowwise"]
    assert sent["none"] - sent["tensorwise"] == 2 * 3 * sum(size / 4 - 4 for size in matrices)  # forward and backward


REFUSED = {
    "a pattern without a recipe": (
        ['--training.float8_exclude=["*.wo"]'],
        'training.float8_exclude: given ["*.wo"]; allowed: unset with training.float8 = "none"; set a recipe, ',
    ),
    "float32": (
        ["--training.float8=rowwise", "--training.mixed_precision_param=float32"],
        'training.float8: given "rowwise"; allowed: "none" with training.mixed_precision_param = "float32"; ',
    ),
    "an adapter": (
        ["--training.float8=rowwise", "--adapter.kind=lora", "--adapter.rank=4"],
        'training.float8: given "rowwise"; allowed: "none" with adapter.kind = "lora"; ',
    ),
    "gathers in int8": (
        ["--training.float8=rowwise", "--parallelism.fsdp_quantized_gather=int8"],
        'parallelism.fsdp_quantized_gather: given "int8"; allowed: "none" with training.float8; ',
    ),
    "reductions in int4": (
        ["--training.float8=rowwise", "--parallelism.fsdp_quantized_reduce=int4"],
        'parallelism.fsdp_quantized_reduce: given "int4"; allowed: "none" with training.float8; ',
    ),
    "a pattern that fits nothing": (
        ["--training.float8=rowwise", '--training.float8_exclude=["*.wo", "output"]'],
        'training.float8_exclude: given "output"; allowed: patterns that fit one of layers.*.attention.wq, ',
    ),
    "nothing left": (
        ["--training.float8=rowwise", '--training.float8_exclude=["*"]'],
        'training.float8: given "rowwise"; allowed: at least one linear with sides that are multiples of 16; ',
    ),
}


@pytest.mark.parametrize("arguments, message", REFUSED.values(), ids=REFUSED)
def test_refused(arguments, message):
    (fault,) = check(load(["--model.tokenizer_path=bytes", *arguments]), 2, "cpu")
    assert str(fault).removeprefix("the job: ").startswith(message)


@pytest.mark.parametrize(("recipe", "dtype"), all_of(RECIPES, ("float32", "bfloat16")))
def test_accepted(recipe, dtype):
    arguments = [f"--training.float8={recipe}", f"--training.dtype={dtype}", '--training.float8_exclude=["layers.0.*"]']
    assert not check(load(["--model.tokenizer_path=bytes", *arguments]), 1, "cpu")
