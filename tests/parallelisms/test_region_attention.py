"""Attention by regions on a CPU: equal to a mask over all pairs, in few calls and small regions."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.models import attention
from torchtitan.models.attention import AttentionKernel, GroupKernel
from torchtitan.parallelisms import region_attention
from torchtitan.parallelisms.parallelize import SAVED_OPS
from torchtitan.parallelisms.region_attention import RegionTable
from torchtitan.parallelisms.sequence_layout import Tokens

SAMPLES, LENGTH = 3, 200


def documents_of(*lengths):
    """Return document ids [1, S] of documents of these lengths."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]


def random_documents(number):
    """Return ids [SAMPLES, LENGTH] of `number` documents a row."""
    generator, starts = torch.Generator().manual_seed(number), torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    for row in starts:
        row[torch.randperm(LENGTH - 1, generator=generator)[: number - 1] + 1] = 1
    return starts.cumsum(1)


def tensors(length, dtype, samples=SAMPLES, heads=4, key_heads=2, width=16, value_width=16):
    """Return q, k and v, laid out as a block makes them, and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    sizes = (heads, width), (key_heads, width), (key_heads, value_width), (heads, value_width)
    q, k, v, grad = (
        torch.randn(samples, length, *size, generator=generator, dtype=dtype).transpose(1, 2) for size in sizes
    )
    return [x.requires_grad_() for x in (q, k, v)], grad


def output_and_gradients(kernel, inputs, grad, mask):
    y = kernel(*inputs, mask)
    return y, *torch.autograd.grad(y, inputs, grad)


def largest_difference(got, expected):
    """Return the largest difference of any tensor relative to its largest value."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, expected, strict=True))


def record_calls(monkeypatch):
    """Return a list that receives (samples, queries, keys, causal, True if masked) of each call of the kernel."""
    calls, forward = [], region_attention.block_forward

    def recorded(q, k, v, causal, bias):
        calls.append((q.shape[0], q.shape[2], k.shape[2], causal, bias is not None))
        return forward(q, k, v, causal, bias)

    monkeypatch.setattr(region_attention, "block_forward", recorded)
    return calls


def test_inputs_of_any_strides(monkeypatch):
    """The kernel does not check that the elements of a head are neighbours in memory."""
    inputs, grad = tensors(LENGTH, torch.float64)
    mask = AttentionKernel().prepare(Tokens(torch.arange(LENGTH), random_documents(3)))
    expected = output_and_gradients(AttentionKernel(), inputs, grad, mask)
    strided = [x.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in inputs]
    assert strided[0].stride(-1) != 1
    assert largest_difference(output_and_gradients(AttentionKernel(), strided, grad, mask), expected) < 1e-13


def test_the_logsumexp_has_no_gradient():
    (q, k, v), _ = tensors(LENGTH, torch.float32)
    documents = random_documents(3)
    table = region_attention.region_table(documents, torch.arange(LENGTH), documents, torch.arange(LENGTH), True, 0)
    out, logsumexp = region_attention.attend_by_regions(q, k, v, table, 0)
    assert out.requires_grad and not logsumexp.requires_grad


KERNELS = {
    "causal": AttentionKernel(),
    "to all": AttentionKernel(causal=False),
    "narrow window": AttentionKernel(window=5),
    "wide window": AttentionKernel(window=70),
    "groups": GroupKernel(16, 8),
}


@pytest.mark.parametrize("value_width", (16, 9))
@pytest.mark.parametrize("number", (None, 1, 4, 60))
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_equal_to_the_mask_over_all_pairs(kernel, number, value_width):
    """float32 differs by the order of sums over at most 200 keys, by less than 20 units in the last place."""
    tokens = Tokens(torch.arange(LENGTH), None if number is None else random_documents(number))
    mask = kernel.prepare(tokens)
    assert mask is None or isinstance(mask, RegionTable)
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 20 * torch.finfo(torch.float32).eps)):
        inputs, grad = tensors(LENGTH, dtype, value_width=value_width)
        got = output_and_gradients(kernel, inputs, grad, mask)
        dense = output_and_gradients(kernel, inputs, grad, kernel.dense_mask(tokens, tokens))
        assert largest_difference(got, dense) <= tolerance


@pytest.mark.parametrize("region_dtype", (torch.float32, torch.bfloat16))
def test_bfloat16_is_as_exact_as_with_a_mask(region_dtype, monkeypatch):
    """Both are compared with float64; the logsumexp, which backward reads, stays in float32."""
    monkeypatch.setattr(region_attention, "fastest_cpu_dtype", lambda *size: region_dtype)
    monkeypatch.setattr(attention, "fastest_cpu_dtype", lambda dtype, *size: dtype)
    kernel, tokens = AttentionKernel(window=70), Tokens(torch.arange(LENGTH), random_documents(4))
    inputs, grad = tensors(LENGTH, torch.bfloat16, width=64, value_width=64)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    dense_mask = kernel.dense_mask(tokens, tokens)
    exact = output_and_gradients(kernel, exact_inputs, grad.double(), dense_mask)
    dense = output_and_gradients(kernel, inputs, grad, dense_mask)
    got = output_and_gradients(kernel, inputs, grad, kernel.prepare(tokens))
    assert largest_difference(got, exact) <= 1.2 * largest_difference(dense, exact) <= 0.02


def test_an_expanded_gradient_is_summed_correctly():
    kernel, tokens = AttentionKernel(), Tokens(torch.arange(LENGTH), random_documents(4))
    inputs, _ = tensors(LENGTH, torch.float64)
    masks = kernel.prepare(tokens), kernel.dense_mask(tokens, tokens)
    got, dense = (torch.autograd.grad(kernel(*inputs, mask).sum(), inputs) for mask in masks)
    assert largest_difference(got, dense) <= 1e-13


@pytest.mark.parametrize(
    "lengths, calls",
    [
        ([640], [(1, 640, 640, True, False)]),  # one record costs what plain causal attention does
        ([128] * 3, [(3, 128, 128, True, False)]),
        ([600, 600, 40], [(1, 600, 600, True, False)] * 2 + [(1, 40, 40, True, False)]),
        ([4] * 500, [(500, 4, 4, True, False)]),
        ([3, 1, 1, 3], [(2, 3, 3, True, False), (2, 1, 1, False, False)]),
    ],
)
def test_documents_of_equal_length_share_a_call(lengths, calls, monkeypatch):
    recorded, documents = record_calls(monkeypatch), documents_of(*lengths)
    inputs, _ = tensors(documents.shape[1], torch.float32, samples=1)
    kernel = AttentionKernel()
    kernel(*inputs, kernel.prepare(Tokens(torch.arange(documents.shape[1]), documents)))
    assert recorded == calls


def test_the_number_of_calls_is_bounded(monkeypatch):
    """Documents of 1, 2, ..., 63 tokens fill 2,016 tokens in 63 calls; no 2,016 tokens need more."""
    recorded, documents = record_calls(monkeypatch), documents_of(*range(1, 64), 32)
    inputs, _ = tensors(2048, torch.float32, samples=1)
    kernel = AttentionKernel()
    kernel(*inputs, kernel.prepare(Tokens(torch.arange(2048), documents)))
    assert len(recorded) == 63


def test_a_window_computes_few_hidden_pairs(monkeypatch):
    """2,048 tokens with a window of 256: the first 256 are causal, then 64 at a time see 319 keys, together."""
    recorded, kernel = record_calls(monkeypatch), AttentionKernel(window=256)
    inputs, _ = tensors(2048, torch.float32, samples=2)
    kernel(*inputs, kernel.prepare(Tokens(torch.arange(2048), None)))
    assert recorded == [(2, 256, 256, True, False), (2 * 28, 64, 319, True, True)]


def test_documents_in_pieces_are_refused():
    with pytest.raises(ValueError, match="must be consecutive"):
        AttentionKernel().prepare(Tokens(torch.arange(3), torch.tensor([[0, 1, 0]])))


def test_batches_share_one_compiled_graph():
    """The table has the same shape for all documents, so nothing is compiled again."""
    kernel, graphs = AttentionKernel(), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(kernel, backend=count, fullgraph=True)
    inputs, grad = tensors(LENGTH, torch.float64)
    for number in (2, 7, 60):
        mask = kernel.prepare(Tokens(torch.arange(LENGTH), random_documents(number)))
        expected = output_and_gradients(kernel, inputs, grad, mask)
        assert largest_difference(output_and_gradients(compiled, inputs, grad, mask), expected) <= 1e-15
    assert len(graphs) == 1


def test_operators_are_registered_correctly():
    kernel, tokens = AttentionKernel(window=30), Tokens(torch.arange(LENGTH), random_documents(4))
    segments = kernel.segments(tokens), tokens.indices
    torch.library.opcheck(region_attention.region_table, (*segments, *segments, True, 30))
    inputs, grad = tensors(LENGTH, torch.float64, value_width=9)
    table = kernel.prepare(tokens).regions
    torch.library.opcheck(
        region_attention.attend_by_regions,
        (*inputs, table, 30),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
    inputs = [x.detach() for x in inputs]
    results = region_attention.attend_by_regions(*inputs, table, 30)
    torch.library.opcheck(region_attention.attend_by_regions_backward, (grad, *inputs, *results, table, 30))


def test_selective_recompute_saves_the_output():
    ops = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            ops.append(op)
            return op(*args, **kwargs or {})

    kernel = AttentionKernel()
    mask = kernel.prepare(Tokens(torch.arange(LENGTH), random_documents(4)))
    with Record():
        kernel(*tensors(LENGTH, torch.float32)[0], mask)
    assert [op for op in ops if op.namespace == "torchtitan"] == [op for op in ops if op in SAVED_OPS]
    assert len([op for op in ops if op in SAVED_OPS]) == 1
