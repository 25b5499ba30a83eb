"""Sizes of models: rotary frequencies that are scaled."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from torchtitan.models.layers import Rotary
from torchtitan.models.sizes import RopeScaling


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_scaled_frequencies_equal_transformers(factor):
    scaling = RopeScaling(factor=factor)
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=rope)
    expected, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config)
    ours = Rotary(128, 500000.0, scaling).frequencies(torch.device("cpu"))
    assert attention_factor == 1.0
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    plain = Rotary(128, 500000.0).frequencies(torch.device("cpu"))
    assert torch.equal(ours[:8], plain[:8]) and torch.allclose(ours[-8:], plain[-8:] / factor)
