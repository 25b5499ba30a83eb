"""GLM 4 with experts: what it has beyond the gated decoders, which test_gated.py compares with transformers."""

import dataclasses

import torch

from tests.support.hf_parity import build, same, write_folder
from tests.support.tiny_decoders import GATED
from torchtitan.models import SIZES
from torchtitan.models.glm4_moe.model import HF, Glm4MoE
from torchtitan.models.layers import Rotary, rotate

TINY = GATED["glm4_moe"]
PUBLISHED_AIR = {  # zai-org/GLM-4.5-Air
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_qk_norm": False,
    "vocab_size": 151552,
}


def test_a_published_config_is_read():
    assert HF.config.args_from_config(PUBLISHED_AIR) == SIZES["glm4_moe"]["106B-A12B"]


def test_the_part_of_heads_that_is_rotated_is_read_wherever_it_is():
    config = HF.config_to_hf(TINY)
    del config["partial_rotary_factor"]
    for table, rotary_dim in ((None, 8), ({"rope_type": "default", "partial_rotary_factor": 0.25}, 4)):
        changed = config | {"rope_scaling": table}
        assert HF.config.args_from_config(changed) == dataclasses.replace(TINY, rotary_dim=rotary_dim)


def test_every_width_of_the_rotated_part_is_read_again():
    """Also where its share of a head, times the head, is less by rounding: 30 / 44 x 44."""
    for head_dim, rotary_dim in ((44, 30), (46, 26), (88, 60), (64, 32)):
        args = dataclasses.replace(TINY, head_dim=head_dim, rotary_dim=rotary_dim)
        assert HF.config.args_from_config(HF.config_to_hf(args)).rotary_dim == rotary_dim


def test_depths_of_multi_token_prediction_are_left_in_the_folder(tmp_path):
    model, other = build(Glm4MoE, TINY), build(Glm4MoE, TINY, seed=1)
    tensors = HF.to_hf(model.state_dict(), TINY)
    last = {name: value for name, value in tensors.items() if name.startswith("model.layers.2.")}
    depth = {name.replace(".2.", ".3."): value.clone() for name, value in last.items()}
    write_folder(tmp_path, tensors | depth | {"model.layers.3.eh_proj.weight": torch.zeros(32, 64)}, TINY, HF)
    HF.load_hf(tmp_path, other, TINY)
    assert same(model.state_dict(), other.state_dict())


def test_features_beyond_the_rotated_ones_stay():
    x, positions = torch.randn(2, 5, 3, 16), torch.arange(5)[None]
    rotation = Rotary(8, 100.0)(positions)
    turned = rotate(x, rotation)
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert torch.equal(turned[..., :8], rotate(x[..., :8].contiguous(), rotation))
