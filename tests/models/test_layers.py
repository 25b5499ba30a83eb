"""Rotary positions, norms and the attention kernel against formulas written out."""

import math
import sys

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from torchtitan.core.errors import JobError
from torchtitan.models import attention
from torchtitan.models.attention import AttentionKernel
from torchtitan.models.layers import RMSNorm, Rotary, SwiGLU, ZeroCenteredRMSNorm, rotate
from torchtitan.parallelisms.region_attention import RegionTable
from torchtitan.parallelisms.sequence_layout import Tokens


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_rotation_is_a_complex_product_of_neighbours():
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 0, 1], [7, 8, 9, 10, 11]])
    turned = rotate(x, Rotary(8, theta=100.0)(positions))
    for pair in range(4):
        angle = positions[:, :, None].double() * 100.0 ** (-2 * pair / 8)
        expected = torch.polar(torch.ones_like(angle), angle) * torch.complex(x[..., 2 * pair], x[..., 2 * pair + 1])
        # the angles themselves are float32: 11 radians at 2**-24
        torch.testing.assert_close(turned[..., 2 * pair], expected.real, rtol=0, atol=5e-6)
        torch.testing.assert_close(turned[..., 2 * pair + 1], expected.imag, rtol=0, atol=5e-6)


def test_scores_depend_on_distance_only():
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)
    rotary = Rotary(16, theta=10000.0)

    def score(at_q, at_k):
        return (rotate(q, rotary(torch.tensor([[at_q]]))) * rotate(k, rotary(torch.tensor([[at_k]])))).sum()

    torch.testing.assert_close(score(3, 1), score(103, 101), rtol=0, atol=1e-4)
    assert (score(3, 1) - score(3, 2)).abs() > 1e-3


def test_rotation_keeps_the_type_and_computes_in_float32():
    x = torch.randn(1, 300, 2, 8).bfloat16()
    rotation = Rotary(8, 10000.0)(torch.arange(300)[None])
    assert rotation.dtype == torch.float32
    turned = rotate(x, rotation)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned, rotate(x.double(), rotation).bfloat16(), rtol=2**-7, atol=1e-6)


def test_compiled_rotation_is_real_arithmetic_with_the_same_result():
    x = torch.randn(2, 6, 2, 8, requires_grad=True)
    rotation = Rotary(8, 10000.0)(torch.arange(6)[None])
    compiled = torch.compile(rotate, fullgraph=True, backend="aot_eager")
    weight = torch.randn_like(x)
    (eager_grad,) = torch.autograd.grad((rotate(x, rotation) * weight).sum(), x)
    (compiled_grad,) = torch.autograd.grad((compiled(x, rotation) * weight).sum(), x)
    torch.testing.assert_close(compiled(x, rotation), rotate(x, rotation), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(compiled_grad, eager_grad, rtol=1e-6, atol=1e-6)


def test_gated_feed_forward_by_hand():
    module = SwiGLU(4, 6).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    gate = x @ module.w1.weight.T
    expected = (gate / (1 + torch.exp(-gate)) * (x @ module.w3.weight.T)) @ module.w2.weight.T
    torch.testing.assert_close(module(x), expected)


def plain_attention(q, k, v, visible):
    """Scores written out; k and v repeated for grouped heads; visible [B, 1, S, S]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~visible, -math.inf).softmax(-1) @ v


def heads(dtype, kv_heads=2, head_dim=16):
    shapes = [(2, 4, 7, head_dim), (2, kv_heads, 7, head_dim), (2, kv_heads, 7, head_dim)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


PLACES = torch.arange(7)
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 9]])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "documents"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "to all"])
def test_kernel_equals_attention_written_out(kv_heads, documents, causal):
    inputs = heads(torch.float64, kv_heads)
    visible = torch.ones(7, 7, dtype=torch.bool).expand(2, 1, 7, 7)
    visible = visible.tril() if causal else visible
    if documents is not None:
        visible = visible & (documents[:, None, :, None] == documents[:, None, None, :])
    kernel = AttentionKernel(causal=causal)
    ours, reference = kernel(*inputs, kernel.prepare(Tokens(PLACES, documents))), plain_attention(*inputs, visible)
    torch.testing.assert_close(ours, reference)
    weight = torch.randn_like(ours)
    ours_grads, reference_grads = (torch.autograd.grad((y * weight).sum(), inputs) for y in (ours, reference))
    torch.testing.assert_close(ours_grads, reference_grads)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "to all"])
def test_flex_attention_masks_the_same(causal, monkeypatch):
    monkeypatch.setattr(attention, "compile_lazily", lambda function: function)  # 10 s faster
    q, k, v = (x.detach() for x in heads(torch.float32))
    flex, sdpa = AttentionKernel("flex", causal), AttentionKernel("sdpa", causal)
    masks = flex.prepare(Tokens(PLACES, DOCUMENTS)), sdpa.prepare(Tokens(PLACES, DOCUMENTS))
    assert isinstance(masks[0], BlockMask) and isinstance(masks[1], RegionTable)
    with torch.no_grad():
        torch.testing.assert_close(flex(q, k, v, masks[0]), sdpa(q, k, v, masks[1]))


@pytest.mark.parametrize("backend", ["flex", "sdpa"])
def test_without_documents_no_mask_is_made(backend):
    tokens = Tokens(PLACES, None)
    assert AttentionKernel(backend).prepare(tokens) is None
    assert AttentionKernel(backend, causal=False).prepare(tokens) is None
    assert AttentionKernel(backend, causal=False).prepare(tokens, Tokens(torch.arange(14), None)) is None
    part, every = Tokens(PLACES + 2, None), Tokens(torch.arange(14), None)
    mask = AttentionKernel(backend).prepare(part, every).regions
    assert mask.tolist()[0] == [-1, 0, 7, 0, 9, 1] and not mask[1:].any(), "its queries are a part"
    dense_mask = AttentionKernel(backend).dense_mask(part, every)
    assert torch.equal(dense_mask[0, 0], torch.ones(14, 14, dtype=torch.bool).tril()[2:9])


@pytest.mark.parametrize("autocast", (False, True))
@pytest.mark.parametrize("kernel_dtype", (torch.float32, torch.bfloat16))
def test_attention_computes_in_the_fastest_dtype(kernel_dtype, autocast, monkeypatch):
    dtypes, sdpa = [], torch.nn.functional.scaled_dot_product_attention

    def record(*args, **kwargs):
        dtypes.append(sdpa(*args, **kwargs).dtype)
        return sdpa(*args, **kwargs)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", record)
    monkeypatch.setattr(attention, "fastest_cpu_dtype", lambda *size: kernel_dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = AttentionKernel()(*heads(torch.bfloat16), None)
    assert dtypes == [kernel_dtype] and y.dtype == torch.bfloat16


def test_flash_attention_3_without_its_package_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # import raises ImportError
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    attention.activate_flash_attention("auto", torch.device("cuda"))
    attention.activate_flash_attention("fa3", torch.device("cpu"))
    with pytest.raises(
        JobError, match='given "fa3"; allowed: "fa3" only with the package flash_attn_interface.*write "auto"'
    ):
        attention.activate_flash_attention("fa3", torch.device("cuda"))


def test_flash_attention_3_on_another_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(attention, "activate_flash_attention_impl", lambda name: None)
    with pytest.raises(JobError, match=r'this GPU, of compute capability 10\.0; .*\(9\.0\); write "auto"') as caught:
        attention.activate_flash_attention("fa3", torch.device("cuda"))
    assert "install" not in str(caught.value)


def test_an_unknown_backend_is_refused():
    with pytest.raises(JobError, match="'fast'.*auto, sdpa, flex"):
        AttentionKernel("fast")


@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("trained", ["both", "input", "weight"])
@pytest.mark.parametrize("kind, center", [(RMSNorm, 0), (ZeroCenteredRMSNorm, 1)])
def test_rms_norm_and_its_gradients_equal_torch(kind, center, dtype, atol, trained):
    """Compare with torch in float64. A bfloat16 result is rounded once: half a unit of the last place at 4 is 2^-7."""
    norm = kind(24, eps=1e-3).to(dtype)
    x = torch.randn(3, 5, 24, dtype=dtype, requires_grad=trained != "weight")
    norm.weight.data = 1 - center + 0.3 * torch.randn(24, dtype=dtype)
    norm.weight.requires_grad_(trained != "input")
    grad = torch.randn(5, 3, 24, dtype=dtype).transpose(0, 1)  # not contiguous, as attention hands it back
    y = norm(x)
    y.backward(grad)
    wide, weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    expected = torch.nn.functional.rms_norm(wide, (24,), center + weight, 1e-3)
    expected.backward(grad.double())
    assert y.dtype == dtype
    for ours, reference in ((y, expected), (x.grad, wide.grad), (norm.weight.grad, weight.grad)):
        assert ours is None or (ours.dtype == dtype and torch.allclose(ours.double(), reference, atol=atol, rtol=atol))
    assert (x.grad is None, norm.weight.grad is None) == (trained == "weight", trained == "input")
    with torch.no_grad():
        assert torch.equal(norm(x), y)
