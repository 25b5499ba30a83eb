"""Tests of the split backward: input gradients first, weight gradients later, equal to one backward."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge

from torchtitan.parallelisms.pipeline.overlap.chunk import backward_inputs


def assert_split_backward_equals_one(function, inputs, weights):
    """Compare gradients of `backward_inputs` and `later.run()` with one backward."""
    inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    torch.manual_seed(0)
    outputs = function(*inputs)
    grads = [torch.randn_like(output) for output in outputs]
    torch.autograd.backward(outputs, grads)
    expected = [x.grad for x in [*inputs, *weights]]
    for x in [*inputs, *weights]:
        x.grad = None
    outputs = function(*inputs)
    later = backward_inputs([get_gradient_edge(output) for output in outputs], grads, inputs)
    assert all(weight.grad is None for weight in weights)
    for x, grad in zip(inputs, expected, strict=False):
        torch.testing.assert_close(x.grad, grad, rtol=1e-12, atol=1e-12)
    later.run()
    for x, grad in zip(weights, expected[len(inputs) :], strict=True):
        torch.testing.assert_close(x.grad, grad, rtol=1e-12, atol=1e-12)
        x.grad = None
    assert not later  # and a second run does nothing


def test_split_backward_equals_one_backward():
    torch.manual_seed(0)
    w = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    b = torch.randn(4, dtype=torch.float64, requires_grad=True)
    x, h = (torch.randn(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert_split_backward_equals_one(lambda x: (torch.tanh(x @ w[0] @ w[1] + b),), [x], [w[0], w[1], b])
    assert_split_backward_equals_one(
        lambda x: (torch.tanh(torch.tanh(x @ w[0]) @ w[1]) @ w[0] + b,), [x], [w[0], w[1], b]
    )
    assert_split_backward_equals_one(lambda x: (x @ torch.cat(w[:2], 1) @ torch.cat(w[:2]) @ w[2],), [x], w)
    assert_split_backward_equals_one(lambda x, h: (x * b, h + x @ w[0]), [x, h], [w[0], b])
    assert_split_backward_equals_one(lambda x: (F.rms_norm(x, (4,), b) @ w[0],), [x], [b, w[0]])
    attention = nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)
    assert_split_backward_equals_one(
        lambda x: (attention(x[None], x[None], x[None])[0],), [x], list(attention.parameters())
    )


def test_split_backward_with_outputs_of_weights_only():
    torch.manual_seed(0)
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    x, h = (torch.randn(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def function(x):
        twice = w * 2
        return x @ torch.cat((w, twice)).T, twice, twice.sin(), x

    assert_split_backward_equals_one(function, [x], [w])
    assert_split_backward_equals_one(
        lambda x, h: (x @ w, h + x @ w), [x.detach(), h.detach()], [w]
    )  # an embedding's stage
