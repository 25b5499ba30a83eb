"""Qwen 3-Next and Qwen 3.5: what they have beyond the gated decoders, which test_gated.py compares."""

import dataclasses
import json
import math

import torch
from safetensors.torch import load_file, save_file

from tests.support.hf_parity import build, close, same, write_folder
from tests.support.tiny_decoders import GATED
from tests.support.wrapper_folders import text_config, write_wrapper
from torchtitan.core.random_draws import Constant, Normal, Uniform
from torchtitan.models import SIZES, family_in
from torchtitan.models.qwen3_next.model import DENSE_SPEC, NEXT_SPEC, Qwen3Next

TINY = GATED["qwen3_next"]
PUBLISHED = {  # Qwen/Qwen3-Next-80B-A3B-Instruct
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_a_published_config_is_read():
    assert NEXT_SPEC.hf.config.args_from_config(PUBLISHED) == SIZES["qwen3_next"]["80B-A3B"]


def test_rotary_positions_with_a_height_and_a_width_are_those_of_a_text():
    args, config = GATED["qwen3_5"], DENSE_SPEC.hf.config_to_hf(GATED["qwen3_5"])
    del config["rope_scaling"], config["rope_theta"], config["partial_rotary_factor"]
    rope = {"rope_type": "default", "rope_theta": 77.0, "partial_rotary_factor": 0.25}
    config["rope_parameters"] = rope | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    expected = dataclasses.replace(args, rope_theta=77.0, rotary_dim=4)
    assert DENSE_SPEC.hf.config.args_from_config(config) == expected


def test_depths_of_multi_token_prediction_are_left_in_the_folder(tmp_path):
    model, other = build(Qwen3Next, TINY), build(Qwen3Next, TINY, seed=1)
    depth = {"mtp.fc.weight": torch.zeros(32, 64), "mtp.layers.0.input_layernorm.weight": torch.zeros(32)}
    write_folder(tmp_path, NEXT_SPEC.hf.to_hf(model.state_dict(), TINY) | depth, TINY, NEXT_SPEC.hf)
    NEXT_SPEC.hf.load_hf(tmp_path, other, TINY)
    assert same(model.state_dict(), other.state_dict())


@torch.no_grad()
def test_a_published_qwen_3_5_is_read_as_its_text_part(tmp_path):
    """With its keys, its three positions and the depths of multi-token prediction beside the text part."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}
    text = text_config("qwen3_5") | {"rope_parameters": rope | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}}
    del text["rope_scaling"], text["rope_theta"], text["partial_rotary_factor"]
    reference = write_wrapper(tmp_path, "qwen3_5", text)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.zeros(2, 2)}, file, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert family_in(tmp_path) == "qwen3_5"
    args = DENSE_SPEC.hf.config.args_from_folder(tmp_path)
    model = DENSE_SPEC.hf.build(args)
    DENSE_SPEC.hf.load_hf(tmp_path, model, args)
    tokens = torch.randint(4, args.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    assert close(model.eval()(tokens), reference(input_ids=tokens, use_cache=False).logits, 4e-6)


def test_initial_values():
    model = Qwen3Next(TINY)
    assert model.init_rule("layers.0.attention.decay.log_rate") == Uniform(math.log(16))
    assert model.init_rule("layers.0.attention.decay.step_bias") == Constant(1.0)
    assert model.init_rule("layers.0.attention.delta_norm.weight") == Constant(1.0)
    assert model.init_rule("layers.0.attention_norm.weight") == Constant(0.0)
    assert model.init_rule("layers.0.attention.conv_q.weight") == Normal(0.5)
    assert model.init_rule("layers.0.attention.delta_out.weight") == Normal(0.02 / 2**0.5)
