"""Granite 4: what it has beyond the gated decoders, which test_gated.py compares."""

import dataclasses

import pytest

from tests.support.tiny_decoders import GATED
from torchtitan.core.errors import JobError
from torchtitan.models import SIZES
from torchtitan.models.granite4.model import HF
from torchtitan.models.sizes import shortest_pattern

PUBLISHED = {  # ibm-granite/granite-4.0-h-tiny
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "init_method": "mup",
    "initializer_range": 0.1,
    "intermediate_size": 512,
    "layer_types": [*["mamba"] * 5, *["attention", *["mamba"] * 9] * 3, "attention", *["mamba"] * 4],
    "logits_scaling": 6,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 40,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "output_router_logits": False,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.0,
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 100352,
}


def test_a_published_config_is_read():
    assert HF.config.args_from_config(PUBLISHED) == SIZES["granite4"]["h-tiny"]
    assert {flavor: round(args.num_parameters / 1e9, 2) for flavor, args in SIZES["granite4"].items()} == {
        "debugmodel": 0.01,
        "micro": 3.4,
        "h-micro": 3.19,
        "h-tiny": 6.94,
        "h-small": 32.21,
    }


def test_a_pattern_of_layers_repeats():
    assert [shortest_pattern(letters) for letters in ("MM*MM*M", "M", "M*M", "M*MM")] == ["MM*", "M", "M*", "M*M"]
    args = SIZES["granite4"]["h-tiny"]
    assert [layer for layer, letter in enumerate(args.letters) if letter == "*"] == [5, 15, 25, 35]
    fewer = dataclasses.replace(args, n_layers=4)
    assert (fewer.layer_pattern, fewer.n_state_layers, fewer.n_attention_layers) == ("M", 4, 0)
    assert HF.config.args_from_config(HF.config_to_hf(fewer)) == fewer


@pytest.mark.parametrize("pattern", ["", "M+", "m"])
def test_an_impossible_pattern_is_refused(pattern):
    with pytest.raises(JobError, match=r"layer_pattern = '.*': must be one or more of the letters \* M, one for each"):
        dataclasses.replace(GATED["granite4"], layer_pattern=pattern)
