"""Qwen 3 without experts: arguments, and against transformers (logits, every gradient, folders)."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3

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
from tests.support.tiny_decoders import QWEN3
from torchtitan.errors import JobError
from torchtitan.models import SIZES
from torchtitan.models.qwen3.hf import HF
from torchtitan.models.qwen3.model import Qwen3

TINY = QWEN3["plain"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_layers": 0}, "n_layers = 0: must be at least 1"),
        ({"head_dim": 7}, "head_dim = 7: must be even"),
        ({"n_kv_heads": 3}, "n_kv_heads = 3 with n_heads = 4.*divide"),
    ],
)
def test_impossible_sizes_are_refused(change, message):
    with pytest.raises(JobError, match=message):
        dataclasses.replace(TINY, **change)


# sums taken in another order: a few units of 2**-24, or of 2**-53, relative to the largest element
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("shape", QWEN3)
def test_logits_and_every_gradient_equal_transformers(shape, dtype, tolerance, monkeypatch):
    model = build(Qwen3, QWEN3[shape], dtype=dtype)
    theirs = twin(Qwen3ForCausalLM, Qwen3Config, model, HF, dtype)
    with exact(modeling_qwen3, model, theirs, monkeypatch) if dtype == torch.float64 else nullcontext():
        compare(model, theirs, HF, tolerance)


@pytest.mark.parametrize("flavor", SIZES["qwen3"])
def test_config_goes_both_ways_and_through_transformers(flavor, tmp_path):
    args = SIZES["qwen3"][flavor]
    for stored in configs(args, HF, Qwen3Config, tmp_path):
        assert HF.config_from_hf(stored) == args


@pytest.mark.parametrize("shape", QWEN3)
def test_state_dicts_go_both_ways(shape):
    names_go_both_ways(build(Qwen3, QWEN3[shape]), HF)


@pytest.mark.parametrize("shape", QWEN3)
@pytest.mark.parametrize("shard_bytes", [10**9, 10000])
def test_a_saved_folder_loads_here_and_in_transformers(shape, shard_bytes, tmp_path):
    save_and_load(Qwen3, QWEN3[shape], HF, Qwen3ForCausalLM, tmp_path, shard_bytes)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "qwen3_moe"}, "model_type = 'qwen3_moe', but this model is a qwen3"),
        ({"intermediate_size": None}, "no whole number above 0 for intermediate_size"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rotary scaling 'yarn', but this model has none"),
    ],
)
def test_a_config_of_another_model_is_refused(change, message):
    refuse_config(TINY, HF, change, message)
