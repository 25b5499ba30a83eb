"""Mistral 4: the growth of its queries and its config, beside what test_gated.py compares with transformers."""

import pytest
from transformers import Mistral4Config, Mistral4ForCausalLM

from tests.support.hf_parity import build, compare_positions, twin
from tests.support.tiny_decoders import GATED
from torchtitan.core.errors import JobError
from torchtitan.models import SIZES
from torchtitan.models.deepseek.model import Deepseek
from torchtitan.models.mistral4 import CONFIG
from torchtitan.models.mistral4.model import HF


def test_queries_grow_with_positions_that_do_not_begin_at_zero():
    """Two periods of 20 positions, of which the first ends within the tokens."""
    model = build(Deepseek, GATED["mistral4"])
    compare_positions(model, twin(Mistral4ForCausalLM, Mistral4Config, model, HF))


def test_a_config_without_sizes_is_the_published_model():
    """All keys have transformers' defaults, and so has the table of rotary positions."""
    assert CONFIG.args_from_config({"model_type": "mistral4"}) == SIZES["mistral4"]["Small-119B"]


def test_a_table_without_growth_has_none():
    table = {"rope_type": "yarn", "factor": 128.0, "original_max_position_embeddings": 8192, "rope_theta": 1e4}
    assert CONFIG.args_from_config({"model_type": "mistral4", "rope_parameters": table}).query_growth == 0
    with pytest.raises(JobError, match="llama_4_scaling_beta = '1'; allowed: a finite number"):
        CONFIG.args_from_config({"model_type": "mistral4", "rope_parameters": table | {"llama_4_scaling_beta": "1"}})


def test_heads_of_another_width_are_refused():
    """transformers makes rotary positions of the width that head_dim says, as in a folder that it has written."""
    config = HF.config_to_hf(GATED["mistral4"])
    width = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    assert CONFIG.args_from_config(config | {"head_dim": width}) == CONFIG.args_from_config(config)
    for head_dim in (width // 2, None):
        with pytest.raises(JobError, match=f"head_dim = .*; allowed: qk_nope_head_dim .* = {width}; leave it out"):
            CONFIG.args_from_config(config | {"head_dim": head_dim})


def test_its_folders_stack_experts():
    form = HF.tensor_map(GATED["mistral4"])
    assert form.is_stack("layers.0.moe.experts.w1") and form.with_stacks() == form
