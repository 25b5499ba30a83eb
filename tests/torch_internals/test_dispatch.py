"""Tests of the private parts of torch.nn.Module."""

import torch
from torch import nn

from torchtitan.torch_internals.dispatch import has_hooks, local_parameters


def test_the_compiler_traces_both_functions():
    module = nn.Linear(2, 3, bias=False)

    def add(x: torch.Tensor) -> torch.Tensor:
        return x + len(local_parameters(module)) + has_hooks(module)

    compiled = torch.compile(add, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(())) == add(torch.zeros(())) == 2
