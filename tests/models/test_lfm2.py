"""LFM 2: what it has beyond the gated decoders, which test_gated.py compares."""

import dataclasses
import json

import pytest
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from tests.support.tiny_decoders import GATED
from torchtitan.core.random_draws import Normal
from torchtitan.models import SIZES
from torchtitan.models.hf.save import SourceConfigs, build_extra_files
from torchtitan.models.lfm2.model import MOE_SPEC, SPEC, Lfm2

FULL, SHORT = "full_attention", "conv"
PUBLISHED = {  # LiquidAI/LFM2-1.2B
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "hidden_size": 2048,
    "layer_types": [*[SHORT, SHORT, FULL] * 3, *[SHORT, FULL] * 3, SHORT],
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "use_pos_enc": True,
    "vocab_size": 65536,
}


def test_a_published_config_is_read():
    assert SPEC.hf.config.args_from_config(PUBLISHED) == SIZES["lfm2"]["1.2B"]
    experts = SIZES["lfm2_moe"]["8B-A1B"]
    assert {flavor: round(args.num_parameters / 1e6) for flavor, args in SIZES["lfm2"].items()} == {
        "debugmodel": 6,
        "350M": 354,
        "700M": 742,
        "1.2B": 1170,
    }
    assert (round(experts.num_parameters / 1e9, 2), round(experts.num_active_parameters / 1e9, 2)) == (8.34, 1.56)
    assert [layer for layer, letter in enumerate(experts.letters) if letter == "*"] == [2, 6, 10, 14, 18, 21]


@pytest.mark.parametrize("layers, pattern", [(None, "*"), ([], "C"), ([1], "C*C"), ([0, 2], "*C")])
def test_layers_with_attention_may_be_listed(layers, pattern):
    config = SPEC.hf.config_to_hf(GATED["lfm2"]) | {"layer_types": None, "full_attn_idxs": layers}
    assert SPEC.hf.config.args_from_config(config) == dataclasses.replace(GATED["lfm2"], layer_pattern=pattern)


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_widths_are_adjusted_as_in_transformers(factor):
    changed = {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": factor, "intermediate_size": 50}
    config = SPEC.hf.config_to_hf(GATED["lfm2"]) | changed | {"block_multiple_of": 8}
    assert SPEC.hf.config.args_from_config(config).ffn_dim == Lfm2MLP(Lfm2Config(**config)).w1.out_features


def test_an_untied_export_has_no_second_name_of_the_tie():
    """transformers would read it in place of the first."""
    args = dataclasses.replace(GATED["lfm2"], tied_embeddings=False)
    source = SourceConfigs(SPEC.hf.config_to_hf(GATED["lfm2"]) | {"tie_embedding": True})
    options = dict(source=source, tokenizer_files={}, bos_id=None, end_ids=[])
    written = json.loads(build_extra_files(SPEC.hf.config, args, "bfloat16", **options)["config.json"])
    assert SPEC.hf.config.args_from_config(written) == args
    assert not Lfm2Config(**written).tie_word_embeddings


def test_initial_values_of_convolutions():
    model = Lfm2(GATED["lfm2"])
    assert model.init_rule("layers.0.attention.conv_short.weight") == Normal(3**-0.5)
    assert model.init_rule("layers.0.attention.short_out.weight") == Normal(0.02 / 2**0.5)


def test_a_model_of_fewer_layers_than_dense_ones_is_read():
    config = MOE_SPEC.hf.config_to_hf(GATED["lfm2_moe"]) | {"num_dense_layers": 9}
    assert MOE_SPEC.hf.config.args_from_config(config).n_dense_layers == 4
