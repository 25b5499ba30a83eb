"""Gemma 3: arguments, against transformers (logits, every gradient, folders), and what layers of a kind share."""

import dataclasses
import json
from contextlib import nullcontext

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.models.gemma3 import modeling_gemma3

from tests.support.hf_parity import (
    build,
    check_names_convert_both_ways,
    compare,
    configs,
    exact,
    refuse_config,
    save_and_load,
    tokens_for,
    twin,
)
from tests.support.tiny_decoders import GEMMA3 as SHAPES
from torchtitan.core.errors import JobError
from torchtitan.core.random_draws import Constant, Normal
from torchtitan.models import SIZES
from torchtitan.models.attention import AttentionKernel
from torchtitan.models.gemma3.model import HF, Gemma3
from torchtitan.models.layers import ZeroCenteredRMSNorm

PLAIN = SHAPES["plain"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"sliding_window": 0}, "sliding_window = 0: must be at least 1"),
        ({"global_interval": 0}, "global_interval = 0: must be at least 1"),
        ({"query_scalar": -1}, "query_scalar = -1: must be at least 1"),
        ({"n_heads": 6}, "dim = 64 with n_heads = 6: dim must be a multiple of n_heads"),
    ],
)
def test_impossible_sizes_are_refused(change, message):
    with pytest.raises(JobError, match=message):
        dataclasses.replace(PLAIN, **change)


# sums taken in another order: a few units of 2**-24, or of 2**-53, relative to the largest element
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 4e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_every_gradient_equal_transformers(shape, dtype, tolerance, monkeypatch):
    model = build(Gemma3, SHAPES[shape], dtype=dtype)
    hf_model = twin(Gemma3ForCausalLM, Gemma3TextConfig, model, HF, dtype)
    exactly = dtype == torch.float64
    with exact(modeling_gemma3, model, hf_model, monkeypatch) if exactly else nullcontext():
        compare(model, hf_model, HF, tolerance)


@pytest.mark.parametrize("change", [{"sliding_window": 6}, {"global_interval": 3}, {"local_rope_theta": 60.0}])
def test_every_size_changes_the_logits(change):
    """The comparison with transformers sees both kinds of layers."""
    model, tokens = build(Gemma3, PLAIN), tokens_for(PLAIN, 1, 40)
    other = build(Gemma3, dataclasses.replace(PLAIN, **change))
    assert (model(tokens) - other(tokens)).abs().max() > 1e-4 * model(tokens).abs().max()


@torch.no_grad()
def test_embeddings_in_bfloat16_are_those_of_transformers():
    """The square root of 48 is rounded to bfloat16 before the product."""
    model = build(Gemma3, dataclasses.replace(PLAIN, dim=48), dtype=torch.bfloat16)
    hf_model = twin(Gemma3ForCausalLM, Gemma3TextConfig, model, HF, torch.bfloat16)
    tokens = tokens_for(PLAIN)
    assert torch.equal(model.embed(tokens), hf_model.model.embed_tokens(tokens))


@torch.no_grad()
def test_norms_in_bfloat16_are_those_of_transformers():
    norm, hf_norm = ZeroCenteredRMSNorm(64, 1e-6), modeling_gemma3.Gemma3RMSNorm(64)
    norm.weight.copy_(torch.randn(64) / 100)
    hf_norm.load_state_dict(norm.state_dict())
    x = torch.randn(50, 64).bfloat16()
    ours, expected = norm.bfloat16()(x), hf_norm.bfloat16()(x)
    assert ours.dtype == torch.bfloat16
    assert (ours != expected).float().mean() < 0.01  # the sum of squares is added in another order


def test_initial_weights_follow_the_recipe():
    """Norms multiply by 1 at first; scaled embeddings have a standard deviation of 1."""
    model = Gemma3(PLAIN)
    norms = ("layers.1.attention.q_norm", "layers.0.ffn_post_norm", "norm")
    assert [model.init_rule(f"{name}.weight") for name in norms] == [Constant(0.0)] * 3
    for tied in (True, False):
        model = Gemma3(dataclasses.replace(PLAIN, tied_embeddings=tied))
        assert model.init_rule("tok_embeddings.weight") == Normal(PLAIN.dim**-0.5)


class CountingKernel(AttentionKernel):
    def __init__(self, window, counts):
        super().__init__(window=window)
        self.counts = counts

    def prepare(self, queries, keys=None):
        self.counts.append(self.window)
        return super().prepare(queries, keys)


@torch.no_grad()
def test_masks_and_rotations_are_prepared_once_for_each_kind():
    """A pipeline part prepares only those of its layers."""
    model, counts, received = build(Gemma3, PLAIN), [], {}
    model.set_attention_kernels(CountingKernel(kernel.window, counts) for kernel in model.kernels)
    for name, block in model.layers.items():
        block.register_forward_pre_hook(lambda _, args, name=name: received.update({name: args[1]}))
    tokens = tokens_for(PLAIN, 1, 20)
    model(tokens)
    assert sorted(counts) == [0, 5]
    assert [PLAIN.is_global(int(layer)) for layer in received] == [False, True, False]
    first, full, second = received.values()
    assert first.mask is second.mask and first.rotation is second.rotation
    assert full.mask is None and not torch.equal(full.rotation, first.rotation)
    counts.clear()
    del model.layers["1"]
    model(tokens)
    assert counts == [5]


@pytest.mark.parametrize("flavor", SIZES["gemma3"])
def test_configs_convert_both_ways_and_through_transformers(flavor, tmp_path):
    args = SIZES["gemma3"][flavor]
    for stored in configs(args, HF, Gemma3TextConfig, tmp_path):
        assert HF.config.args_from_config(stored) == args
    hf_config = Gemma3TextConfig(**HF.config_to_hf(args))
    assert [kind == "full_attention" for kind in hf_config.layer_types] == list(
        map(args.is_global, range(args.n_layers))
    )


def test_absent_keys_have_the_defaults_of_transformers():
    needed = {"hidden_size": 64, "num_hidden_layers": 13, "num_attention_heads": 4, "vocab_size": 64}
    config = {"model_type": "gemma3_text", "intermediate_size": 48} | needed
    read = HF.config.args_from_config(config)
    assert read == HF.config.args_from_config(json.loads(Gemma3TextConfig(**config).to_json_string()))
    assert (read.rope_theta, read.local_rope_theta, read.tied_embeddings) == (1e6, 1e4, True)
    assert (read.global_interval, read.sliding_window, read.n_global_layers) == (6, 4096, 2)


@pytest.mark.parametrize(
    "layers, pattern, layer_types, interval",
    [(5, 3, None, 3), (3, 6, "lll", 6), (3, 2, "lll", 4), (5, 6, "llgll", 3), (2, 6, "gg", 1)],
)
def test_the_interval_of_global_layers_is_read_from_a_pattern_or_a_list(layers, pattern, layer_types, interval):
    config = HF.config_to_hf(dataclasses.replace(PLAIN, n_layers=layers)) | {"sliding_window_pattern": pattern}
    names = {"l": "sliding_attention", "g": "full_attention"}
    config["layer_types"] = layer_types and [names[letter] for letter in layer_types]
    assert HF.config.args_from_config(config).global_interval == interval


@pytest.mark.parametrize("shape", SHAPES)
def test_state_dicts_convert_both_ways(shape):
    check_names_convert_both_ways(build(Gemma3, SHAPES[shape]), HF)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shard_bytes", [10**9, 10000])
def test_a_saved_folder_loads_here_and_in_transformers(shape, shard_bytes, tmp_path):
    save_and_load(Gemma3, SHAPES[shape], HF, Gemma3ForCausalLM, tmp_path, shard_bytes)


LOCAL, GLOBAL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "gemma2"}, "model_type = 'gemma2', but this model is a gemma3_text"),
        ({"intermediate_size": None}, "no whole number above 0 for intermediate_size"),
        ({"hidden_activation": "silu"}, "hidden_activation = 'silu', but this model only has 'gelu_pytorch_tanh'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0, but this model only has None"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0, but this model only has None"),
        ({"layer_types": [GLOBAL, LOCAL, LOCAL]}, "layer_types = .*allowed: 3 entries"),
        ({"layer_types": [LOCAL, GLOBAL]}, "layer_types = .*allowed: 3 entries"),
        ({"layer_types": 3}, "layer_types = 3; allowed: 3 entries"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rotary scaling.*dynamic.*allowed are none"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "with rope_type, as transformers ignores type"),
        ({"rope_parameters": {LOCAL: {"rope_type": "linear", "factor": 2.0}}}, "rope_type = 'linear', but this model"),
        ({"rope_parameters": {LOCAL: 7}}, "rope_parameters = 7; allowed are null and an object"),
        ({"rope_local_base_freq": 1e13}, "rope_local_base_freq = 10000000000000.0; allowed: from 1 to 1e.12"),
    ],
)
def test_a_config_of_another_model_is_refused(change, message):
    refuse_config(PLAIN, HF, change, message)
