"""The gradient norm where there is nothing to add up. With gradients, every plan's norm is held against one device's
in test_combinations.py.
"""

import torch
from torch import nn

from torchtitan.parallelisms.gradients import clip_gradients


def test_a_rank_without_gradients_adds_zero_on_its_device():
    """Other pipeline ranks add their norms to it, by a collective of that device."""
    frozen = nn.Parameter(torch.zeros(2, device="meta"), requires_grad=False)
    assert clip_gradients([frozen], 1.0).device.type == "meta"
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    assert clip_gradients(iter([frozen]), 1.0).item() == 0
    assert clip_gradients([], 0.0).item() == 0
