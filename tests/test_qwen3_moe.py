"""Qwen 3 with experts: published sizes, and against transformers (logits, every gradient, folders)."""

import dataclasses
import json

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe import modeling_qwen3_moe

from tests.hf_parity import build, close, compare, exact, twin
from torchtitan.initialization import Constant, Normal
from torchtitan.models import SIZES
from torchtitan.models.qwen3_moe import Qwen3MoEArgs, hf
from torchtitan.models.qwen3_moe.model import Qwen3MoE
from torchtitan.models.registry import MODELS

TINY = Qwen3MoEArgs(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,  # 4 x 16 is not 32
    vocab_size=64,
    expert_dim=16,
    n_experts=6,
    top_k=2,
    normalize_top_k=True,
    rope_theta=5000.0,
    max_seq_len=128,
)
SHAPES = {
    "published": TINY,
    "not normalized, tied": dataclasses.replace(TINY, normalize_top_k=False, tied_embeddings=True, norm_eps=1e-5),
}


def theirs_of(model, dtype=torch.float32):
    return twin(Qwen3MoeForCausalLM, Qwen3MoeConfig(**hf.config_to_hf(model.args)), model, hf, dtype)


def tokens(batch=2, length=12):
    return torch.randint(0, TINY.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))


PUBLISHED = {"30B-A3B": (30_532_122_624, 3_353_032_704), "235B-A22B": (235_093_634_560, 22_190_763_520)}


@pytest.mark.parametrize("flavor", SIZES["qwen3_moe"])
def test_parameter_counts(flavor):
    args = SIZES["qwen3_moe"][flavor]
    with torch.device("meta"):
        model = MODELS["qwen3_moe"].build(args)
    counted = sum(p.numel() for p in model.parameters())
    assert counted == args.num_parameters
    assert PUBLISHED.get(flavor, (counted, args.num_active_parameters)) == (counted, args.num_active_parameters)
    outside = sum(p.numel() for name, p in model.named_parameters() if "norm" in name or "tok_embeddings" in name)
    assert args.num_active_parameters - args.num_matmul_parameters == outside


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
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)


# float32: sums taken in another order, a few units of 2**-24 relative to the largest element
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_every_gradient_equal_transformers(shape):
    model = build(Qwen3MoE, SHAPES[shape])
    compare(model, theirs_of(model), hf, 2e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_every_gradient_equal_transformers_exactly(shape, monkeypatch):
    model = build(Qwen3MoE, SHAPES[shape], dtype=torch.float64)
    theirs = theirs_of(model, torch.float64)
    with exact(modeling_qwen3_moe, model, theirs, monkeypatch):
        compare(model, theirs, hf, 1e-12)


def test_initial_weights_follow_the_recipe():
    model = Qwen3MoE(TINY)
    assert model.init_rule("layers.1.attention.q_norm.weight") == Constant(1.0)
    assert model.init_rule("layers.1.moe.experts.w3") == Normal(0.02 / 2)


@pytest.mark.parametrize("flavor", SIZES["qwen3_moe"])
def test_config_goes_both_ways_and_through_transformers(flavor, tmp_path):
    args = SIZES["qwen3_moe"][flavor]
    config = hf.config_to_hf(args, torch.bfloat16)
    Qwen3MoeConfig(**config).save_pretrained(tmp_path)
    for stored in (config, json.loads((tmp_path / "config.json").read_text())):
        assert hf.config_from_hf(stored) == args


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shard_bytes", [10**9, 10000])
def test_a_saved_folder_loads_here_and_in_transformers(shape, shard_bytes, tmp_path):
    args = SHAPES[shape]
    model = build(Qwen3MoE, args)
    hf.save_hf(tmp_path, dict(model.named_parameters()), args, shard_bytes=shard_bytes)
    other = build(Qwen3MoE, args, seed=1)
    hf.load_hf(tmp_path, other, args)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    theirs = Qwen3MoeForCausalLM.from_pretrained(tmp_path, experts_implementation="eager").eval()
    assert close(model(tokens()), theirs(tokens()).logits, 2e-6)
    back = hf.from_hf(hf.to_hf(model.state_dict(), args), args)
    assert all(torch.equal(back[name], value) for name, value in model.state_dict().items())


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
    with pytest.raises(ValueError, match=message):
        hf.config_from_hf(hf.config_to_hf(TINY) | change)


def test_what_transformers_does_not_have_is_not_exported():
    with pytest.raises(ValueError, match="n_shared_experts = 1: transformers' Qwen 3 only has 0"):
        hf.config_to_hf(dataclasses.replace(TINY, n_shared_experts=1))
