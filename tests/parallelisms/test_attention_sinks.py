"""Attention sinks: equal to a softmax with one more column, in every kernel, with every mask and its gradients."""

import math

import pytest
import torch

from torchtitan.models import attention as attention_module
from torchtitan.models.attention import AttentionKernel
from torchtitan.models.kv_cache import CachingKernel
from torchtitan.parallelisms import attention_kernels
from torchtitan.parallelisms.ring_attention import RegionAttentionFunction
from torchtitan.parallelisms.sequence_layout import Region, Tokens

LENGTH, HEADS, KEY_HEADS, WIDTH = 24, 4, 2, 8
PLACES = torch.arange(LENGTH)
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 9 + [2] * 10, [0] * 24])


def inputs(dtype=torch.float64):
    """Return q, k, v and the sinks, from one that takes nearly all weight to one that takes none."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, LENGTH, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    tensors = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    sinks = torch.tensor([9.0, 1.0, -0.5, -40.0], dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (*tensors, sinks)]


def with_one_more_column(q, k, v, sinks, visible):
    """Compute attention with explicit scores; `visible`: bool [B or 1, 1, Q, S]."""
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (k, v))
    scores = ((q @ k.mT) * WIDTH**-0.5).masked_fill(~visible, -math.inf)
    column = sinks[None, :, None, None].expand(len(q), -1, q.shape[2], 1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1] @ v


def gradients(y, tensors):
    weight = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return torch.autograd.grad(y, tensors, weight)


def check(y, tensors, visible, tolerance=1e-13):
    exact = [x.detach().double().requires_grad_() for x in tensors]
    expected = with_one_more_column(*exact, visible)
    pairs = zip((y, *gradients(y, tensors)), (expected, *gradients(expected, exact)), strict=True)
    for got, wanted in pairs:
        assert (got.double() - wanted).abs().max() <= tolerance * wanted.abs().max()


def visible_to(window, documents):
    return AttentionKernel(window=window).dense_mask(*[Tokens(PLACES, documents)] * 2)


@pytest.mark.parametrize("kernel", ["cpu", "written out"])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "documents"])
@pytest.mark.parametrize("is_dense", [False, True])
def test_equal_to_a_softmax_with_one_more_column(kernel, window, documents, is_dense, monkeypatch):
    monkeypatch.setattr(attention_kernels, "kernel_for", lambda *_: kernel)
    attention, tensors = AttentionKernel(window=window), inputs()
    if is_dense and kernel == "written out":  # with any mask, as on a GPU; grouped heads are repeated there
        monkeypatch.setattr(attention, "uses_regions", lambda _: False)
    mask = visible_to(window, documents) if is_dense else attention.prepare(Tokens(PLACES, documents))
    check(attention(*tensors[:3], mask, tensors[3]), tensors, visible_to(window, documents))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_narrower_types_keep_their_dtype(dtype, tolerance):
    attention, tensors = AttentionKernel(window=5), inputs(dtype)
    y = attention(*tensors[:3], attention.prepare(Tokens(PLACES, None)), tensors[3])
    assert y.dtype == dtype
    check(y, tensors, visible_to(5, None), tolerance)


def test_flex_attention_gives_the_logsumexp(monkeypatch):
    """Not compiled, as the compiler's kernel for a CPU does not give it, and without a backward, which a CPU lacks."""
    monkeypatch.setattr(attention_module, "compile_lazily", lambda function: function)
    attention, tensors = AttentionKernel("flex", window=5), [x.detach().float() for x in inputs()]
    y = attention(*tensors[:3], attention.prepare(Tokens(PLACES, DOCUMENTS)), tensors[3])
    expected = with_one_more_column(*tensors, visible_to(5, DOCUMENTS))
    assert (y - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_regions_are_merged_before_the_sinks_join():
    *tensors, sinks = inputs()
    half = LENGTH // 2
    regions = [Region(0, half, 0, half, True), Region(half, LENGTH, 0, half, False)]
    regions.append(Region(half, LENGTH, half, LENGTH, True))
    y = RegionAttentionFunction.apply(*tensors, regions, None, None, None, sinks)
    check(y, [*tensors, sinks], visible_to(0, None))


@pytest.mark.parametrize("window", [0, 5])
def test_a_cache_attends_with_the_sinks(window):
    q, k, v, sinks = (x.detach() for x in inputs())
    expected = with_one_more_column(q, k, v, sinks, visible_to(window, None))
    cache, parts = CachingKernel(AttentionKernel(window=window)), []
    for first, last in ((0, 7), (7, 8), (8, 20), *((token, token + 1) for token in range(20, LENGTH))):
        new = [x[:, :, first:last] for x in (q, k, v)]
        parts.append(cache(*new, cache.prepare(Tokens(PLACES[first:last], None)), sinks))
    assert (torch.cat(parts, dim=2) - expected).abs().max() <= 1e-13 * expected.abs().max()
