"""Qwen 2, and Qwen 3 without and with experts: arguments, and logits, gradients and folders against transformers."""

import dataclasses
import random
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

from tests.support.hf_parity import (
    build,
    check_names_convert_both_ways,
    close,
    compare,
    configs,
    exact,
    refuse_config,
    save_and_load,
    to_memory_names,
    tokens_for,
    twin,
)
from tests.support.tiny_decoders import GATED, QWEN2, QWEN3, QWEN3_MOE
from torchtitan.core.errors import JobError
from torchtitan.core.random_draws import Constant, Normal
from torchtitan.models import SIZES
from torchtitan.models.qwen2.model import HF as QWEN2_HF
from torchtitan.models.qwen2.model import Qwen2
from torchtitan.models.qwen3.model import HF as QWEN3_HF
from torchtitan.models.qwen3.model import Qwen3
from torchtitan.models.qwen3_moe.model import HF as MOE_HF
from torchtitan.models.qwen3_moe.model import Qwen3MoE
from torchtitan.models.spec import MODELS


class Family(NamedTuple):
    model: type
    hf: Any
    shapes: dict
    hf_model: type
    config: type
    modeling: Any


FAMILIES = {
    "qwen2": Family(Qwen2, QWEN2_HF, QWEN2, Qwen2ForCausalLM, Qwen2Config, modeling_qwen2),
    "qwen3": Family(Qwen3, QWEN3_HF, QWEN3, Qwen3ForCausalLM, Qwen3Config, modeling_qwen3),
    "qwen3_moe": Family(Qwen3MoE, MOE_HF, QWEN3_MOE, Qwen3MoeForCausalLM, Qwen3MoeConfig, modeling_qwen3_moe),
}
SHAPES = [
    pytest.param(family, shape, id=f"{name} {shape}") for name, family in FAMILIES.items() for shape in family.shapes
]
TINY = {"qwen2": QWEN2["plain"], "qwen3": QWEN3["plain"], "qwen3_moe": QWEN3_MOE["published"]}


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_layers": 0}, "n_layers = 0: must be at least 1"),
        ({"head_dim": 7}, "head_dim = 7: must be even"),
        ({"n_kv_heads": 3}, "n_kv_heads = 3 with n_heads = 4.*divide"),
    ],
)
def test_impossible_sizes_are_refused(name, change, message):
    with pytest.raises(JobError, match=message):
        dataclasses.replace(TINY[name], **change)


def test_choosing_more_experts_than_exist_is_refused():
    with pytest.raises(JobError, match="top_k = 7 with n_experts = 6"):
        dataclasses.replace(TINY["qwen3_moe"], top_k=7)


# sums taken in another order: a few units of 2**-24, or of 2**-53, relative to the largest element
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("family, shape", SHAPES)
def test_logits_and_every_gradient_equal_transformers(family, shape, dtype, tolerance, monkeypatch):
    model = build(family.model, family.shapes[shape], dtype=dtype)
    hf_model = twin(family.hf_model, family.config, model, family.hf, dtype)
    exactly = dtype == torch.float64
    with exact(family.modeling, model, hf_model, monkeypatch) if exactly else nullcontext():
        compare(model, hf_model, family.hf, tolerance)


def test_initial_weights_follow_the_recipe():
    model = Qwen3MoE(TINY["qwen3_moe"])
    assert model.init_rule("layers.1.attention.q_norm.weight") == Constant(1.0)
    assert model.init_rule("layers.1.moe.experts.w3") == Normal(0.02 / 2)


@pytest.mark.parametrize("name, flavor", [(name, flavor) for name in FAMILIES for flavor in SIZES[name]])
def test_configs_convert_both_ways_and_through_transformers(name, flavor, tmp_path):
    args, family = SIZES[name][flavor], FAMILIES[name]
    for stored in configs(args, family.hf, family.config, tmp_path):
        assert family.hf.config.args_from_config(stored) == args


@pytest.mark.parametrize("family, shape", SHAPES)
def test_state_dicts_convert_both_ways(family, shape):
    check_names_convert_both_ways(build(family.model, family.shapes[shape]), family.hf)


@pytest.mark.parametrize("family, shape", SHAPES)
@pytest.mark.parametrize("shard_bytes", [10**9, 10000])
def test_a_saved_folder_loads_here_and_in_transformers(family, shape, shard_bytes, tmp_path):
    save_and_load(family.model, family.shapes[shape], family.hf, family.hf_model, tmp_path, shard_bytes)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("qwen2", {"model_type": "qwen2_moe"}, "model_type = 'qwen2_moe', but this model is a qwen2"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act = 'gelu', but this model only has 'silu'"),
        ("qwen3", {"model_type": "qwen3_moe"}, "model_type = 'qwen3_moe', but this model is a qwen3"),
        ("qwen3", {"intermediate_size": None}, "no whole number above 0 for intermediate_size"),
        ("qwen3", {"attention_bias": True}, "attention_bias = True"),
        ("qwen3_moe", {"model_type": "qwen3"}, "model_type = 'qwen3', but this model is a qwen3_moe"),
        ("qwen3_moe", {"num_experts": None}, "no whole number above 0 for num_experts"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\], but this model only has \[\]"),
        *(
            (name, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rotary scaling.*dynamic.*allowed are none")
            for name in FAMILIES
        ),
    ],
)
def test_a_config_of_another_model_is_refused(name, change, message):
    refuse_config(TINY[name], FAMILIES[name].hf, change, message)


PUBLISHED_7B = {  # Qwen/Qwen2.5-7B
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}


def test_a_published_config_with_an_unused_window_is_read():
    """A head is as wide as the model divided by the number of heads, as the config does not say it."""
    assert QWEN2_HF.config.args_from_config(PUBLISHED_7B) == SIZES["qwen2"]["7B"]
    narrow = PUBLISHED_7B | {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2}
    assert QWEN2_HF.config.args_from_config(narrow).head_dim == 64


def random_windows(draws):
    """Return random keys of windows, which may contradict each other."""
    keys = {
        "use_sliding_window": draws.choice([True, True, False]),
        "sliding_window": draws.choice([1, 4, 9, None]),
        "max_window_layers": draws.randrange(-1, 6),
        "layer_types": draws.choice([None, [draws.choice(["full_attention", "sliding_attention"]) for _ in range(4)]]),
    }
    return {key: value for key, value in keys.items() if draws.random() < 0.8}


@torch.no_grad()
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe"])
def test_layers_have_the_windows_that_transformers_gives_them(name, seed):
    """Which of the keys counts, with any of them absent: a config is refused only where transformers fails."""
    draws, spec = random.Random(seed), MODELS[name]
    for _ in range(4):
        tiny = dataclasses.replace(TINY[name] if name in TINY else GATED[name], n_layers=4)
        model = build(spec.build, tiny)
        windows = random_windows(draws)
        if name == "qwen3_moe":
            windows.pop("layer_types", None)  # no field of its config
        config = {key: value for key, value in spec.hf.config_to_hf(tiny).items() if key != "use_sliding_window"}
        config_class = CONFIG_MAPPING[name]
        reference = getattr(transformers, config["architectures"][0])._from_config(config_class(**config | windows))
        state = to_memory_names(spec.hf.to_hf(model.state_dict(), tiny), tiny)
        reference.load_state_dict(state, strict=False)
        tokens = tokens_for(tiny, 1, 20)
        try:
            expected = reference.eval()(tokens, use_cache=False).logits
        except (ValueError, TypeError):
            expected = None
        try:
            args = spec.hf.config.args_from_config(config | windows)
        except JobError:
            # transformers' Qwen 2 with experts has windows of no token then
            is_empty = name == "qwen2_moe" and not windows.get("use_sliding_window")
            assert expected is None or is_empty, windows
            continue
        other = build(spec.build, args)
        other.load_state_dict(model.state_dict())
        assert expected is not None and close(other(tokens), expected, 1e-5), windows
        assert spec.hf.config.args_from_config(spec.hf.config_to_hf(args)) == args


def test_features_missing_in_transformers_are_not_exported():
    with pytest.raises(JobError, match="n_shared_experts = 1: transformers' Qwen 3 only has 0"):
        MOE_HF.config_to_hf(dataclasses.replace(TINY["qwen3_moe"], n_shared_experts=1))
