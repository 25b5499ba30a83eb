"""Capped attention by chunks against the whole matrix of scores: outputs, gradients, and the size of its chunks."""

import pytest
import torch

from torchtitan.models.attention import CappedKernel
from torchtitan.parallelisms import capped_attention
from torchtitan.parallelisms.sequence_layout import Tokens

LENGTH, CAP = 37, 0.7


def plain(q, k, v, visible):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = CAP * torch.tanh((q @ k.mT) * q.shape[-1] ** -0.5 / CAP)
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v


def inputs(length=LENGTH):
    """Return queries of four heads, and keys of two with narrower values."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, length, 8), (2, 2, length, 8), (2, 2, length, 6))
    return [torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("few, scores", [(256, 2**24), (3, 2**24), (256, 100)])
@pytest.mark.parametrize("rows", [slice(0, LENGTH), slice(10, 20)])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("window", [0, 5, 300])
def test_equal_to_the_whole_matrix(window, has_documents, rows, few, scores, monkeypatch):
    monkeypatch.setattr(capped_attention, "FEW", few)
    monkeypatch.setattr(capped_attention, "SCORES", scores)
    q, k, v = inputs()
    documents = torch.tensor([[0] * 15 + [1] * 22, [0] * 12 + [1] * 5 + [2] * 20]) if has_documents else None
    everything = Tokens(torch.arange(LENGTH), documents)
    queries = Tokens(torch.arange(LENGTH)[rows], documents[:, rows] if has_documents else None)
    kernel = CappedKernel(CAP, window=window)
    mask = kernel.prepare(queries) if rows.stop == LENGTH else kernel.prepare(queries, everything)
    out = kernel(q[:, :, rows], k, v, mask)
    expected = plain(q[:, :, rows], k, v, kernel.dense_mask(queries, everything))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    gradients, expected = (torch.autograd.grad((y * weight).sum(), (q, k, v)) for y in (out, expected))
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-13)


def test_without_a_mask_all_keys_are_visible():
    q, k, v = inputs()
    out = CappedKernel(CAP).without_causality()(q[:, :, :1], k, v, None)
    torch.testing.assert_close(out, plain(q[:, :, :1], k, v, torch.tensor(True)), rtol=0, atol=1e-13)


def test_the_compiler_may_rely_on_the_declared_shapes():
    q, k, v = inputs()
    mask = CappedKernel(CAP, window=5).prepare(Tokens(torch.arange(LENGTH), None))
    torch.library.opcheck(capped_attention.capped_attention, (q, k, v, *mask, CAP))
    grad, results = torch.ones(2, 4, LENGTH, 6, dtype=q.dtype), capped_attention.capped_attention(q, k, v, *mask, CAP)
    detached = [x.detach() for x in (q, k, v, *results)]
    torch.library.opcheck(capped_attention.capped_attention_backward, (grad, *detached, *mask, CAP))


@pytest.mark.parametrize("window", [0, 4096])
def test_scores_of_a_chunk_are_few(window):
    """At 32768 tokens and 8 heads: a window's chunks see few keys outside of it, and none sees later ones."""
    q = torch.empty(1, 8, 32768, 8, device="meta")
    tokens = torch.empty(32768, dtype=torch.int64, device="meta")
    mask = capped_attention.VisibleKeys(tokens, tokens[None], tokens[None], True, window, True)
    chunks = list(capped_attention._chunks(q, q, mask))
    assert chunks[0].queries.start == 0 and chunks[-1].queries.stop == 32768
    for queries, keys in chunks:
        count = queries.stop - queries.start
        assert 8 * count * (keys.stop - keys.start) <= capped_attention.SCORES and keys.stop == queries.stop
        assert keys.start == (max(0, queries.start - window + 1) if window else 0)
