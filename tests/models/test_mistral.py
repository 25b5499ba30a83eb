"""Mistral: arguments, and against transformers (logits, every gradient, folders), with a window and without."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from transformers import CONFIG_MAPPING, Ministral3Config, MistralConfig, MistralForCausalLM
from transformers.models.mistral import modeling_mistral

from tests.support.hf_parity import (
    build,
    check_names_convert_both_ways,
    close,
    compare,
    configs,
    exact,
    refuse_config,
    save_and_load,
    tokens_for,
    twin,
)
from tests.support.tiny_decoders import MISTRAL as SHAPES
from torchtitan.core.errors import JobError
from torchtitan.models import SIZES
from torchtitan.models.mistral.model import HF, Mistral

WINDOW = SHAPES["window"]


def test_impossible_windows_are_refused():
    with pytest.raises(JobError, match="sliding_window = -1: must not be negative"):
        dataclasses.replace(WINDOW, sliding_window=-1)


# sums taken in another order: a few units of 2**-24, or of 2**-53, relative to the largest element
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_every_gradient_equal_transformers(shape, dtype, tolerance, monkeypatch):
    model = build(Mistral, SHAPES[shape], dtype=dtype)
    hf_model = twin(MistralForCausalLM, MistralConfig, model, HF, dtype)
    exactly = dtype == torch.float64
    with exact(modeling_mistral, model, hf_model, monkeypatch) if exactly else nullcontext():
        compare(model, hf_model, HF, tolerance)


@torch.no_grad()
def test_a_layer_reaches_back_one_window():
    """Two layers with a window of 5 carry nothing further than 2 x 4 tokens."""
    model, tokens = build(Mistral, WINDOW, dtype=torch.float64), tokens_for(WINDOW, 1, 20)
    changed = tokens.clone()
    changed[:, 6] = (tokens[:, 6] + 1) % WINDOW.vocab_size
    differs = (model(tokens) != model(changed)).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == list(range(6, 6 + 2 * 4 + 1))


@torch.no_grad()
def test_a_window_as_long_as_the_sequence_hides_nothing():
    tokens = tokens_for(WINDOW, 1, 20)
    models = [build(Mistral, dataclasses.replace(WINDOW, sliding_window=window)) for window in (0, 20, 19)]
    unlimited, full, shorter = (model(tokens) for model in models)
    assert torch.equal(unlimited, full)
    assert torch.equal(unlimited[:, :19], shorter[:, :19]) or close(shorter[:, :19], unlimited[:, :19], 2e-6)
    assert not close(shorter[:, 19:], unlimited[:, 19:], 1e-4)


@pytest.mark.parametrize("flavor", SIZES["mistral"])
def test_config_goes_both_ways_and_through_transformers(flavor, tmp_path):
    args = SIZES["mistral"][flavor]
    for stored in configs(args, HF, CONFIG_MAPPING[HF.config_to_hf(args)["model_type"]], tmp_path):
        assert HF.config.args_from_config(stored) == args


def test_what_a_config_leaves_out_is_as_in_transformers():
    config = HF.config_to_hf(WINDOW)
    for name in ("sliding_window", "head_dim", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings"):
        del config[name]
    config["num_attention_heads"] = 8
    ours, hf_config = HF.config.args_from_config(config), MistralConfig(**config)
    assert (ours.sliding_window, ours.head_dim, ours.n_kv_heads) == (4096, 4, 8)
    assert (hf_config.sliding_window, hf_config.head_dim, hf_config.num_key_value_heads) == (4096, 4, 8)
    assert (ours.norm_eps, ours.max_seq_len) == (hf_config.rms_norm_eps, hf_config.max_position_embeddings)


def test_what_the_config_of_one_whose_queries_grow_leaves_out_is_as_in_transformers():
    config = HF.config_to_hf(dataclasses.replace(WINDOW, query_growth=0.1))
    for name in ("sliding_window", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings"):
        del config[name]
    config["num_attention_heads"] = 8
    ours, hf_config = HF.config.args_from_config(config), Ministral3Config(**config)
    assert (ours.sliding_window or None, ours.n_kv_heads) == (hf_config.sliding_window, hf_config.num_key_value_heads)
    assert (ours.norm_eps, ours.max_seq_len) == (hf_config.rms_norm_eps, hf_config.max_position_embeddings)


def test_a_growing_model_has_no_default_of_its_rotary_base():
    """transformers fails without it."""
    config = HF.config_to_hf(dataclasses.replace(WINDOW, query_growth=0.1))
    table = config["rope_parameters"]
    assert HF.config.args_from_config(config).rope_theta == table.pop("rope_theta")
    with pytest.raises(JobError, match="has no rope_theta"):
        HF.config.args_from_config(config)


@pytest.mark.parametrize("shape", SHAPES)
def test_state_dicts_go_both_ways(shape):
    check_names_convert_both_ways(build(Mistral, SHAPES[shape]), HF)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shard_bytes", [10**9, 10000])
def test_a_saved_folder_loads_here_and_in_transformers(shape, shard_bytes, tmp_path):
    save_and_load(Mistral, SHAPES[shape], HF, MistralForCausalLM, tmp_path, shard_bytes)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "mixtral"}, "model_type = 'mixtral', but this model is one of mistral, ministral3"),
        ({"intermediate_size": None}, "no whole number above 0 for intermediate_size"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu', but this model only has 'silu'"),
        ({"sliding_window": -3}, "sliding_window = -3; allowed: a number of tokens, or null"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rotary scaling.*dynamic.*allowed are none"),
    ],
)
def test_a_config_of_another_model_is_refused(change, message):
    refuse_config(WINDOW, HF, change, message)
