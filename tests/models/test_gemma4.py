"""Gemma 4: what it has beyond the gated decoders, which test_gated.py compares."""

import dataclasses
import json
import random
import sys

import pytest
import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from tests.support.hf_parity import build, close, compare, exact, refuse_config, tokens_for, twin
from tests.support.tiny_decoders import GATED
from tests.support.wrapper_folders import write_wrapper
from torchtitan.core.errors import JobError
from torchtitan.models import SIZES
from torchtitan.models.gemma4.model import HF, Gemma4
from torchtitan.models.hf.wrappers import text_part

TINY, EXPERTS = GATED["gemma4"], GATED["gemma4 experts"]
TEXT = {  # google/gemma-4-31B
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": True,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 5376,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10,
    "max_position_embeddings": 262144,
    "model_type": "gemma4_text",
    "num_attention_heads": 32,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
    "num_kv_shared_layers": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_double_wide_mlp": False,
    "vocab_size": 262144,
}


def test_a_folder_of_transformers_without_wider_heads_is_read():
    """It says so by an empty per_layer_config."""
    args = dataclasses.replace(TINY, global_head_dim=TINY.head_dim, global_kv_heads=TINY.n_kv_heads)
    args = dataclasses.replace(args, global_rotary_dim=TINY.head_dim // 2)
    written = json.loads(Gemma4TextConfig(**HF.config_to_hf(args)).to_json_string())
    assert written["per_layer_config"] == {}
    assert HF.config.args_from_config(written) == args


def test_a_published_config_is_read():
    config = text_part({"model_type": "gemma4", "text_config": TEXT, "vision_config": {}, "image_token_id": 258880})
    assert HF.config.args_from_config(config) == SIZES["gemma4"]["31B"]
    assert round(SIZES["gemma4"]["31B"].num_parameters / 1e9, 1) == 30.7
    plain = {key: value for key, value in TEXT.items() if key not in ("rope_parameters", "layer_types")}
    assert HF.config.args_from_config(plain) == SIZES["gemma4"]["31B"]  # transformers' defaults


def test_a_published_config_of_experts_is_read():
    """Of google/gemma-4-26B-A4B, with the sizes that its publisher states."""
    config = TEXT | {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
    config |= {"hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16}
    config |= {"num_key_value_heads": 8, "num_global_key_value_heads": 2, "layer_types": TEXT["layer_types"][:30]}
    args = HF.config.args_from_config(config)
    assert args == SIZES["gemma4"]["26B-A4B"]
    assert round(args.num_parameters / 1e9, 1) == 25.2 and round(args.num_active_parameters / 1e9, 1) == 3.8


def drawn(seed):
    draw = random.Random(seed)
    shares, kv_heads = draw.random() < 0.5, draw.choice([1, 2, 4])
    global_head_dim = draw.choice([4, 8, 20])
    experts = draw.choice([2, 3, 5])
    of_experts = dict(n_experts=experts, top_k=draw.randint(2, experts), n_shared_experts=draw.randint(1, 3))
    return dataclasses.replace(
        TINY if seed % 2 else EXPERTS,
        **({} if seed % 2 else of_experts),
        n_layers=draw.randint(1, 5),
        n_kv_heads=kv_heads,
        head_dim=draw.choice([4, 8, 12]),
        global_head_dim=global_head_dim,
        global_kv_heads=draw.choice([1, 2, 4]) if shares else kv_heads,
        global_rotary_dim=2 * draw.randint(1, global_head_dim // 2),
        global_interval=draw.randint(1, 4),
        keys_are_values=shares,
        sliding_window=draw.choice([2, 3, 8, 64]),
        logit_cap=draw.choice([0.0, 3.0]),
        tied_embeddings=draw.random() < 0.5,
        norm_eps=draw.choice([1e-6, 1e-2]),
    )


@pytest.mark.parametrize("seed", range(8))
def test_drawn_sizes_compute_as_in_transformers(seed, monkeypatch):
    args = drawn(seed)
    assert HF.config.args_from_config(HF.config_to_hf(args)) == args
    model = build(Gemma4, args, dtype=torch.float64)
    for block in model.layers.values():
        block.layer_scale.uniform_(0.5, 2.0)
    reference = twin(Gemma4ForCausalLM, Gemma4TextConfig, model, HF, torch.float64)
    with exact(sys.modules[Gemma4ForCausalLM.__module__], model, reference, monkeypatch):
        compare(model, reference, HF, 1e-11)


@torch.no_grad()
def test_the_scales_of_layers_are_stored_and_count(tmp_path):
    model, other = build(Gemma4, TINY), build(Gemma4, TINY)
    model.layers["1"].layer_scale.fill_(0.25)
    HF.save_hf(tmp_path, model.state_dict(), TINY)
    tokens = tokens_for(TINY)
    before = other(tokens)
    HF.load_hf(tmp_path, other, TINY)
    assert torch.equal(other(tokens), model(tokens)) and not close(before, model(tokens), 1e-2)


@torch.no_grad()
def test_the_text_part_of_a_folder_with_experts_is_read(tmp_path):
    text = HF.config_to_hf(EXPERTS) | {"pad_token_id": 0}  # in the place of images
    reference = write_wrapper(tmp_path, "gemma4", text)
    args = HF.config.args_from_folder(tmp_path)
    model = Gemma4(args).eval()
    HF.load_hf(tmp_path, model, args)
    tokens = tokens_for(args).clamp(min=1)
    assert close(model(tokens), reference(input_ids=tokens, use_cache=False).logits, 1e-5)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"enable_moe_block": True}, "no whole number above 0 for num_experts, top_k_experts, moe_intermediate_size"),
        ({"enable_moe_block": 1}, "enable_moe_block = 1; allowed: true or false"),
        ({"top_k_experts": [1]}, r"top_k_experts = \[1\]; allowed: a whole number, or null"),
        ({"num_kv_shared_layers": None}, "num_kv_shared_layers = None; allowed: a whole number"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers = 1, but this model only has 0"),
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input = 8, but this model only has 0"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'; allowed: null or 'vision'"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping = -1.0; allowed: a number above 0, or null"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types = .*; allowed: 3 entries"),
        ({"layer_types": 3}, "layer_types = 3; allowed: 3 entries"),
        (
            {"per_layer_config": {"1": {"head_dim": 16}, "2": {"head_dim": 8}}},
            "per_layer_config = .*; allowed: the same",
        ),
        ({"per_layer_config": {"0": {"head_dim": 16}}}, "per_layer_config = .*; allowed: the same head_dim"),
        ({"per_layer_config": {"1": {"sliding_window": 16}}}, "per_layer_config = .*; allowed: the same head_dim"),
        ({"per_layer_config": []}, "per_layer_config = .*; allowed: the same head_dim"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_parameters has full_attention = .*'yarn'",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "default"}}},
            "rope_parameters has full_attention = No",
        ),
        ({"rope_parameters": {"global": {}}}, "rope_parameters = .*; allowed: an object with sliding_attention"),
        ({"num_global_key_value_heads": 3}, "global_kv_heads = 3 with n_heads = 4"),
        ({"global_head_dim": 7}, "global_head_dim = 7: must be even"),
        ({"attention_k_eq_v": 1}, "attention_k_eq_v = 1; allowed: true or false"),
    ],
)
def test_other_configs_are_refused(change, message):
    refuse_config(TINY, HF, change, message)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"intermediate_size": 40}, "intermediate_size = 40; allowed: a multiple of moe_intermediate_size = 16"),
        ({"top_k_experts": 7}, "top_k = 7 with n_experts = 6"),
        ({"num_experts": None}, "no whole number above 0 for num_experts"),
    ],
)
def test_other_configs_of_experts_are_refused(change, message):
    refuse_config(EXPERTS, HF, change, message)


def test_routing_that_transformers_lacks_is_not_exported():
    with pytest.raises(JobError, match="score = 'sigmoid': transformers' Gemma 4 only has 'softmax'"):
        HF.config_to_hf(dataclasses.replace(EXPERTS, score="sigmoid"))
    with pytest.raises(JobError, match="n_shared_experts = 0: must be at least 1"):
        dataclasses.replace(EXPERTS, n_shared_experts=0)


def test_heads_that_transformers_lacks_are_not_exported():
    with pytest.raises(JobError, match="global_kv_heads = 2: without keys_are_values transformers' Gemma 4 only has"):
        HF.config_to_hf(dataclasses.replace(TINY, keys_are_values=False))


def test_too_many_rotated_features_are_refused():
    with pytest.raises(JobError, match="global_rotary_dim = 18: must be at most global_head_dim = 16"):
        dataclasses.replace(TINY, global_rotary_dim=18)
