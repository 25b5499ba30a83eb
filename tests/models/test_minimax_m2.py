"""MiniMax M2: the part of a head that is rotated, beside what test_gated.py compares with transformers."""

import pytest

from torchtitan.models import SIZES
from torchtitan.models.minimax_m2 import CONFIG

PUBLISHED = {"rotary_dim": 64, "hidden_size": 3072, "num_hidden_layers": 62, "num_attention_heads": 48}
PUBLISHED |= {"intermediate_size": 1536, "num_local_experts": 256, "num_experts_per_tok": 8, "vocab_size": 200064}
PUBLISHED |= {"model_type": "minimax_m2"}


def test_the_published_config_rotates_half_of_a_head():
    assert CONFIG.args_from_config(PUBLISHED) == SIZES["minimax_m2"]["230B-A10B"]


@pytest.mark.parametrize(
    "change, rotary_dim",
    [
        ({"rotary_dim": None}, 128),
        ({"rotary_dim": None, "partial_rotary_factor": 0.25}, 32),
        ({"rotary_dim": 96, "rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.75}}, 96),
    ],
)
def test_the_part_may_be_a_factor(change, rotary_dim):
    assert CONFIG.args_from_config(PUBLISHED | change).rotary_dim == rotary_dim
