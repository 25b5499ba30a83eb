"""Linear attention against the recurrence token by token, transformers, documents alone, and sequences in parts."""

import random
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers.models.falcon_h1.modeling_falcon_h1 import mamba2_chunk_scan
from transformers.models.qwen3_next import modeling_qwen3_next as reference

from tests.support.pool import run_ranks
from torchtitan.models import linear_attention as module
from torchtitan.models.linear_attention import (
    CausalConvolution,
    StateKernel,
    affine_map,
    apply_map,
    into_chunks,
    linear_attention,
    scan,
    tokens_before,
    zero_state,
)
from torchtitan.parallelisms.context_parallel import build_layout, gather_sequence
from torchtitan.parallelisms.sequence_layout import Tokens


def draw(seed, rows=2, length=40, groups=2, heads=4, key_dim=6, value_dim=5, dtype=torch.float64):
    """Return random q, k, v, g and beta that require gradients; decays from almost none to all of the state."""
    generator = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    q, k = (F.normalize(normal(rows, length, groups, key_dim), dim=-1) for _ in range(2))
    v, beta = normal(rows, length, heads, value_dim), normal(rows, length, heads).sigmoid()
    g = -(2 * normal(rows, length, heads)).exp()
    return [x.to(dtype).requires_grad_() for x in (q, k, v, g, beta)]


def recurrence(q, k, v, g, beta, starts=None, state=None, delta=True):
    """Apply the definition, token by token, in float64."""
    repeats = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(repeats, dim=2) for x in (q, k))
    state = v.new_zeros(*v.shape[::2], k.shape[-1], v.shape[-1]) if state is None else state
    outputs = []
    for t in range(v.shape[1]):
        if starts is not None:
            state = state * ~starts[:, t, None, None, None]
        state = g[:, t, :, None, None].exp() * state
        stored = v[:, t] - torch.einsum("rhkv,rhk->rhv", state, k[:, t]) if delta else v[:, t]
        state = state + torch.einsum("rhk,rhv,rh->rhkv", k[:, t], stored, beta[:, t])
        outputs.append(torch.einsum("rhkv,rhk->rhv", state, q[:, t]))
    return torch.stack(outputs, 1), state


def gradients(outputs, inputs, seed=5):
    """Return the gradients of a random weighted sum of the outputs."""
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.autograd.grad((outputs * weights).sum(), inputs)


def ids_of(*lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


def equal(ours, expected, tolerance=1e-11):
    for one, other in zip(ours, expected, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("seed", range(24))
def test_chunks_equal_the_recurrence(seed, monkeypatch):
    """Outputs, the state after the rows, and every gradient, with documents and a first state or without."""
    rng = random.Random(seed)
    monkeypatch.setattr(module, "CHUNK", rng.choice([1, 3, 8, 16, 64]))
    groups = rng.choice([1, 2, 3])
    sizes = dict(length=rng.randint(1, 50), groups=groups, heads=groups * rng.choice([1, 2]))
    inputs = draw(seed, **sizes, key_dim=rng.choice([1, 4, 7]), value_dim=rng.choice([1, 3, 8]))
    starts = None if seed % 3 == 0 else torch.rand(2, sizes["length"]) < rng.choice([0.05, 0.5])
    state = None
    if seed % 2:
        shape = (2, groups, sizes["heads"] // groups, inputs[1].shape[-1], inputs[2].shape[-1])
        state = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        inputs.append(state)
    delta = seed < 12
    outputs, last = linear_attention(*inputs[:5], starts, state, delta)
    first = None if state is None else state.flatten(1, 2)
    expected, expected_last = recurrence(*inputs[:5], starts, first, delta)
    equal((outputs, last.flatten(1, 2)), (expected, expected_last))
    total, expected_total = (
        torch.cat((x.flatten(), y.flatten())) for x, y in ((outputs, last), (expected, expected_last))
    )
    equal(gradients(total, inputs), gradients(expected_total, inputs))


def test_equal_to_transformers(monkeypatch):
    inputs = draw(0, length=150, dtype=torch.float32)
    # transformers' float32 loses what is left of small decays behind large ones
    inputs[3] = (-torch.log1p(-inputs[3].detach())).requires_grad_()
    for function in (reference.torch_chunk_gated_delta_rule, reference.torch_recurrent_gated_delta_rule):
        q, k, v, g, beta = inputs
        expected, state = function(q, k, v, g=g, beta=beta, output_final_state=True)
        outputs, last = linear_attention(q * q.shape[-1] ** -0.5, k, v, g, beta)
        equal((outputs, last.flatten(1, 2)), (expected, state), 1e-5)
        weights = torch.randn_like(outputs)
        ours, theirs = (torch.autograd.grad((y * weights).sum(), inputs) for y in (outputs, expected))
        equal(ours, theirs, 1e-4)


def test_equal_to_the_mamba_2_of_transformers():
    """Outputs, the last state and every gradient; decays and strengths follow from steps there."""
    q, k, v, _, _ = (x.detach().float() for x in draw(6, length=150))
    steps, rates = torch.rand(2, 150, 4), torch.tensor([0.1, 1.0, 3.0, 20.0])
    inputs = [x.requires_grad_() for x in (q, k, v, steps, rates)]
    expected, state = mamba2_chunk_scan(v, steps, -rates, k, q, chunk_size=32, return_final_states=True)
    outputs, last = linear_attention(q, k, v, -rates * steps, steps, delta=False)
    equal((outputs, last.flatten(1, 2).mT), (expected, state), 1e-5)
    equal(*(gradients(y.double(), inputs) for y in (outputs, expected)), 1e-4)


def test_float32_stays_near_float64_over_long_rows():
    """Also where the state decays to nothing within a chunk, or not at all."""
    for decay in (0.0, 1e-3, 40.0):
        inputs = [x.detach() for x in draw(1, length=500)]
        inputs[3] = torch.full_like(inputs[3], -decay)
        exact, _ = linear_attention(*inputs)
        rounded, _ = linear_attention(*(x.float() for x in inputs))
        equal((rounded,), (exact,), 1e-4)


@pytest.mark.parametrize("decay", [1e3, 1e5, 1e9, 3e38])
def test_float32_stays_near_float64_behind_tokens_that_decay_everything(decay):
    """The sum of a chunk's decays must not round those of its other tokens away, nor overflow."""
    inputs = [x.detach() for x in draw(9, length=150)]
    inputs[3] = torch.where(inputs[3] < -8, -decay, -0.01)
    exact = [x.detach().requires_grad_() for x in inputs]
    rounded = [x.detach().float().requires_grad_() for x in inputs]
    expected, outputs = recurrence(*exact)[0], linear_attention(*rounded)[0]
    equal((outputs,), (expected,), 2e-4)
    equal(gradients(outputs.double(), rounded), gradients(expected, exact), 4e-4)


def test_values_in_bfloat16_are_computed_in_float32_under_autocast_too():
    inputs = [x.detach().bfloat16() for x in draw(2)]
    expected, _ = linear_attention(*(x.float() for x in inputs))
    with torch.autocast("cpu", torch.bfloat16):
        outputs, state = linear_attention(*inputs)
    assert outputs.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert torch.equal(outputs, expected.bfloat16())


def test_packed_documents_equal_documents_alone():
    lengths = [7, 64, 1, 30, 70]
    inputs = draw(3, rows=1, length=sum(lengths))
    starts = tokens_before(ids_of(*lengths)) == 0
    packed, state = linear_attention(*inputs, starts)
    parts = [linear_attention(*part) for part in zip(*(x.split(lengths, dim=1) for x in inputs), strict=True)]
    separate = torch.cat([outputs for outputs, _ in parts], dim=1)
    equal((packed, state), (separate, parts[-1][1]))
    equal(gradients(packed, inputs), gradients(separate, inputs))


@pytest.mark.parametrize("delta", [True, False])
def test_the_map_of_a_row_composes(delta):
    """Two parts of a row give the state and the outputs of the whole row, from any state."""
    first, second = draw(4, length=20), draw(5, length=33)
    joined = [torch.cat(pair, dim=1) for pair in zip(first, second, strict=True)]
    state = torch.randn_like(zero_state(into_chunks(*joined)))
    expected, last = linear_attention(*joined, state=state, delta=delta)
    for part in (first, second):
        chunks = into_chunks(*part, delta=delta)
        outputs, after = scan(chunks, state)
        equal((apply_map(*affine_map(chunks), state),), (after,))
        state = after
    equal((state,), (last,))


def test_places_in_documents():
    ids = torch.tensor([[0, 0, 0, 1, 1, 2], [5, 5, 5, 5, 5, 5], [0, 1, 0, 0, 1, 1]])
    expected = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 0, 1]])
    assert torch.equal(tokens_before(ids), expected)


@pytest.mark.parametrize("taps, bias", [(1, False), (2, True), (4, False)])
def test_the_convolution_sees_the_last_tokens_of_its_document(taps, bias):
    convolution, kernel = CausalConvolution(3, taps, bias).double(), StateKernel()
    for parameter in convolution.parameters():
        torch.nn.init.normal_(parameter)
    x, lengths = torch.randn(1, 17, 3, dtype=torch.float64), [2, 9, 1, 5]

    def expected(part):
        return F.conv1d(F.pad(part.mT, (taps - 1, 0)), convolution.weight, convolution.bias, groups=3).mT

    before = kernel.prepare(Tokens(torch.arange(17), ids_of(*lengths)))
    packed = convolution(kernel.with_earlier(x, taps - 1), before)
    torch.testing.assert_close(packed, torch.cat([expected(part) for part in x.split(lengths, dim=1)], dim=1))
    assert kernel.prepare(Tokens(torch.arange(17), None)) is None
    torch.testing.assert_close(convolution(kernel.with_earlier(x, taps - 1), None), expected(x))


def mixed(kernel, convolution, inputs, documents):
    """Return the rule's outputs with values of a convolution, as a layer calls a kernel."""
    q, k, v, g, beta = inputs
    before = kernel.prepare(Tokens(torch.arange(q.shape[1]), documents))
    widths = [x[0, 0].numel() for x in (q, k, v)]
    rows = kernel.with_earlier(torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1), convolution.taps - 1)
    parts = convolution(rows, before).split(widths, dim=-1)
    heads = [part.unflatten(-1, x.shape[2:]) for part, x in zip(parts, (q, k, v), strict=True)]
    heads[:2] = [F.normalize(x, dim=-1) for x in heads[:2]]
    return kernel(*heads, g, beta, before)


def convolution_of(inputs):
    convolution = CausalConvolution(sum(x[0, 0].numel() for x in inputs[:3]), 4).double()
    torch.nn.init.normal_(convolution.weight, generator=torch.Generator().manual_seed(0))
    return convolution


def parts_of_ranks(length, headtail, documents, delta):
    """Return the outputs of all ranks in order and this rank's gradients, for a share of a sequence on each rank."""
    group = dist.group.WORLD
    layout = build_layout(dist.get_world_size(), "allgather", headtail)
    full = draw(7, length=length)
    inputs = [layout.shard(x.detach(), group.rank()).requires_grad_() for x in full]
    convolution = convolution_of(full)
    kernel = StateKernel(delta).context_parallel(group, layout)
    local = None if documents is None else layout.shard(documents.expand(2, -1), group.rank())
    outputs = mixed(kernel, convolution, inputs, local)
    weights = torch.randn(
        outputs.shape[0], length, *outputs.shape[2:], generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    loss = (outputs * layout.shard(weights, group.rank())).sum()
    *grads, of_weight = torch.autograd.grad(loss, [*inputs, convolution.weight])
    dist.all_reduce(of_weight)
    full_grads = [gather_sequence(grad, layout, group) for grad in grads]
    return [gather_sequence(outputs.detach(), layout, group), *full_grads, of_weight]


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("headtail", [True, False])
@pytest.mark.parametrize(
    "length, lengths", [(160, None), (160, (3, 70, 1, 1, 45, 40)), (16, (5, 1, 10)), (8, None), (160, (40, 40, 80))]
)
def test_ranks_with_parts_of_a_sequence_equal_one(ranks, headtail, length, lengths, delta):
    """Pieces longer and shorter than a chunk and than the convolution; documents that end at a rank's end, or not."""
    documents = None if lengths is None else ids_of(*lengths)
    inputs = draw(7, length=length)
    convolution = convolution_of(inputs)
    outputs = mixed(StateKernel(delta), convolution, inputs, documents)
    expected = [outputs, *gradients(outputs, [*inputs, convolution.weight])]
    for results in run_ranks(ranks, parts_of_ranks, length, headtail, documents, delta):
        equal(results, expected)


@pytest.mark.parametrize("delta", [True, False])
def test_a_growing_text_continues_from_the_state(delta):
    inputs = [x.detach() for x in draw(8, rows=1, length=30)]
    convolution, kernel = convolution_of(inputs), StateKernel(delta).caching()
    expected = mixed(StateKernel(delta), convolution, inputs, None)
    for _ in range(2):
        parts = [
            mixed(kernel, convolution, part, None)
            for part in zip(*(x.split([1, 12, 1, 1, 2, 13], dim=1) for x in inputs), strict=True)
        ]
        equal((torch.cat(parts, dim=1),), (expected,))
        kernel.clear()
