"""Falcon-H1: what it has beyond the gated decoders, which test_gated.py compares."""

import dataclasses

from transformers import FalconH1Config

from tests.support.tiny_decoders import GATED
from torchtitan.models import SIZES
from torchtitan.models.falcon_h1.model import HF

TINY = GATED["falcon_h1"]
PUBLISHED = {  # tiiuae/Falcon-H1-0.5B-Instruct
    "architectures": ["FalconH1ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375,
    "attn_layer_indices": None,
    "embedding_multiplier": 5.656854249492381,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 2048,
    "key_multiplier": 0.39062499999999994,
    "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 128,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "mamba_use_mlp": True,
    "max_position_embeddings": 16384,
    "mlp_bias": False,
    "mlp_expansion_factor": 8,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "model_type": "falcon_h1",
    "num_attention_heads": 8,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "projectors_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32784,
}


def test_a_published_config_is_read():
    assert HF.config.args_from_config(PUBLISHED) == SIZES["falcon_h1"]["0.5B"]
    assert {flavor: round(args.num_parameters / 1e9, 2) for flavor, args in SIZES["falcon_h1"].items()} == {
        "debugmodel": 0.01,
        "0.5B": 0.52,
        "1.5B-Deep": 1.55,
        "7B": 7.59,
        "34B": 33.64,
    }


def test_widths_that_follow_from_other_keys_are_read():
    """The mixer's width from its factor of the model's, and its heads' from their number."""
    config = HF.config_to_hf(TINY) | {"mamba_d_ssm": None, "mamba_d_head": "auto"}
    read = HF.config.args_from_config(config)
    assert read == dataclasses.replace(TINY, ssm_head_dim=16)
    without = {key: value for key, value in config.items() if key not in ("mlp_multipliers", "ssm_multipliers")}
    assert HF.config.args_from_config(without) == HF.config.args_from_config(
        config | {"mlp_multipliers": None, "ssm_multipliers": [1.0] * 5}
    )


def test_whole_factors_of_a_job_are_exported_as_transformers_reads_them():
    whole = dict(key_multiplier=1, gate_multiplier=2, ssm_z_multiplier=3)  # as model.overrides may have them
    config = HF.config_to_hf(dataclasses.replace(TINY, **whole))
    FalconH1Config(**config)
    assert HF.config.args_from_config(config) == dataclasses.replace(TINY, **whole)
