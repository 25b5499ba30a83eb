"""Qwen 3 with experts: arguments, and against transformers (logits, every gradient, folders)."""

import dataclasses

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe import modeling_qwen3_moe

from tests.support.hf_parity import (
    build,
    compare,
    configs,
    exact,
    names_go_both_ways,
    refuse_config,
    save_and_load,
    twin,
)
from tests.support.tiny_decoders import QWEN3_MOE
from torchtitan.errors import JobError
from torchtitan.initialization import Constant, Normal
from torchtitan.models import SIZES
from torchtitan.models.qwen3_moe.hf import HF
from torchtitan.models.qwen3_moe.model import Qwen3MoE

TINY = QWEN3_MOE["published"]


def theirs_of(model, dtype=torch.float32):
    return twin(Qwen3MoeForCausalLM, Qwen3MoeConfig, model, HF, dtype)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_layers": 0}, "n_layers = 0: must be at least 1"),
        ({"head_dim": 7}, "head_dim = 7: must be even"),
        ({"n_kv_heads": 3}, "n_kv_heads = 3 with n_heads = 4.*divide"),
        ({"top_k": 7}, "top_k = 7 with n_experts = 6"),
    ],
)
def test_impossible_sizes_are_refused(change, message):
    with pytest.raises(JobError, match=message):
        dataclasses.replace(TINY, **change)


# float32: sums taken in another order, a few units of 2**-24 relative to the largest element
@pytest.mark.parametrize("shape", QWEN3_MOE)
def test_logits_and_every_gradient_equal_transformers(shape):
    model = build(Qwen3MoE, QWEN3_MOE[shape])
    compare(model, theirs_of(model), HF, 2e-6)


@pytest.mark.parametrize("shape", QWEN3_MOE)
def test_logits_and_every_gradient_equal_transformers_exactly(shape, monkeypatch):
    model = build(Qwen3MoE, QWEN3_MOE[shape], dtype=torch.float64)
    theirs = theirs_of(model, torch.float64)
    with exact(modeling_qwen3_moe, model, theirs, monkeypatch):
        compare(model, theirs, HF, 1e-12)


def test_initial_weights_follow_the_recipe():
    model = Qwen3MoE(TINY)
    assert model.init_rule("layers.1.attention.q_norm.weight") == Constant(1.0)
    assert model.init_rule("layers.1.moe.experts.w3") == Normal(0.02 / 2)


@pytest.mark.parametrize("flavor", SIZES["qwen3_moe"])
def test_config_goes_both_ways_and_through_transformers(flavor, tmp_path):
    args = SIZES["qwen3_moe"][flavor]
    for stored in configs(args, HF, Qwen3MoeConfig, tmp_path):
        assert HF.config_from_hf(stored) == args


@pytest.mark.parametrize("shape", QWEN3_MOE)
def test_state_dicts_go_both_ways(shape):
    names_go_both_ways(build(Qwen3MoE, QWEN3_MOE[shape]), HF)


@pytest.mark.parametrize("shape", QWEN3_MOE)
@pytest.mark.parametrize("shard_bytes", [10**9, 10000])
def test_a_saved_folder_loads_here_and_in_transformers(shape, shard_bytes, tmp_path):
    save_and_load(Qwen3MoE, QWEN3_MOE[shape], HF, Qwen3MoeForCausalLM, tmp_path, shard_bytes)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "qwen3"}, "model_type = 'qwen3', but this model is a qwen3_moe"),
        ({"num_experts": None}, "no whole number above 0 for num_experts"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\], but this model only has \[\]"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rotary scaling 'yarn', but this model has none"),
    ],
)
def test_a_config_of_another_model_is_refused(change, message):
    refuse_config(TINY, HF, change, message)


def test_what_transformers_does_not_have_is_not_exported():
    with pytest.raises(JobError, match="n_shared_experts = 1: transformers' Qwen 3 only has 0"):
        HF.config_to_hf(dataclasses.replace(TINY, n_shared_experts=1))
