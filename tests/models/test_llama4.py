"""Llama 4: what it has beyond the gated decoders, which test_gated.py compares."""

import dataclasses
import json
import random
import sys

import pytest
import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig

from tests.support.hf_parity import (
    build,
    close,
    compare,
    exact,
    refuse_config,
    refuse_folder,
    same,
    tokens_for,
    twin,
    write_folder,
)
from tests.support.tiny_decoders import GATED
from torchtitan.models import SIZES
from torchtitan.models.attention import ChunkKernel
from torchtitan.models.flops import causal_keys, mean_over_layers
from torchtitan.models.hf.wrappers import text_part
from torchtitan.models.llama4.model import HF, SINGLE, Llama4
from torchtitan.models.sizes import RopeScaling
from torchtitan.parallelisms.sequence_layout import Tokens

TINY = GATED["llama4"]
TEXT = {  # meta-llama/Llama-4-Scout-17B-16E-Instruct, of 2025
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "attention_dropout": 0.0,
    "attn_scale": 0.1,
    "attn_temperature_tuning": 4,
    "bos_token_id": 200000,
    "eos_token_id": [200001, 200007, 200008],
    "floor_scale": 8192,
    "for_llm_compressor": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "max_position_embeddings": 10485760,
    "model_type": "llama4_text",
    "moe_layers": [*range(48)],
    "no_rope_layers": [],
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "output_router_logits": False,
    "pad_token_id": 200018,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_qk_norm": True,
    "vocab_size": 202048,
}
PUBLISHED = {"model_type": "llama4", "text_config": TEXT, "vision_config": {"hidden_size": 1408}}
PUBLISHED |= {"boi_token_index": 200080, "eoi_token_index": 200081, "image_token_index": 200092}


def test_published_configs_are_read():
    config = text_part(PUBLISHED)
    assert HF.config.args_from_config(config) == SIZES["llama4"]["scout"]
    experts = {"interleave_moe_layer_step": 2, "moe_layers": [*range(1, 48, 2)], "num_local_experts": 128}
    maverick = config | experts | {"rope_scaling": None, "use_qk_norm": False, "max_position_embeddings": 1048576}
    assert HF.config.args_from_config(maverick) == SIZES["llama4"]["maverick"]


def drawn(seed):
    draw = random.Random(seed)
    n_layers, experts = draw.randint(1, 5), draw.randint(1, 6)
    growing = draw.random() < 0.7
    scaled = draw.random() < 0.5
    return dataclasses.replace(
        TINY,
        n_layers=n_layers,
        n_kv_heads=draw.choice([1, 2, 4]),
        head_dim=draw.choice([8, 16]),
        n_experts=experts,
        top_k=draw.randint(1, experts),
        moe_interval=draw.randint(1, 4),
        no_rope_interval=draw.randint(1, 4),
        chunk_size=draw.choice([1, 2, 3, 7, 16, 40, 64]),
        query_growth=draw.uniform(0.1, 2.0) if growing else 0.0,
        query_period=draw.choice([1, 3, 10]),
        unit_heads=draw.random() < 0.5,
        attention_bias=draw.random() < 0.5,
        tied_embeddings=draw.random() < 0.3,
        rope_scaling=RopeScaling(4.0, *draw.choice([(1.0, 4.0), (1.0, 1.0)]), 16) if scaled else None,
        norm_eps=draw.choice([1e-5, 1e-2]),
    )


@pytest.mark.parametrize("seed", range(6))
def test_drawn_sizes_compute_as_in_transformers(seed, monkeypatch):
    args = drawn(seed)
    assert HF.config.args_from_config(HF.config_to_hf(args)) == args
    model = build(Llama4, args, dtype=torch.float64)
    reference = twin(Llama4ForCausalLM, Llama4TextConfig, model, HF, torch.float64)
    with exact(sys.modules[Llama4ForCausalLM.__module__], model, reference, monkeypatch):
        compare(model, reference, HF, 1e-11)


@torch.no_grad()
def test_a_document_is_computed_alone_wherever_it_is():
    """Chunks, positions and growing queries begin again with each document."""
    model = build(Llama4, TINY)
    tokens, lengths = tokens_for(TINY, 2, 40), ((7, 22, 11), (1, 39, 0))
    ids = torch.stack([torch.repeat_interleave(torch.tensor([3, 9, 4]), torch.tensor(row)) for row in lengths])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    packed = model(tokens, positions=positions, document_ids=ids)
    for row, of_row in enumerate(lengths):
        for part, logits in zip(tokens[row].split(of_row), packed[row].split(of_row), strict=True):
            assert not len(part) or close(logits[None], model(part[None]), 3e-6)


@pytest.mark.parametrize("seed", range(3))
def test_every_kind_of_mask_has_the_same_chunks(seed):
    """Against the definition, also for some of the queries, as context parallel has them."""
    draw = torch.Generator().manual_seed(seed)
    changes = (torch.rand(2, 48, generator=draw) < 0.1).cumsum(-1)
    for documents in (None, changes):
        rows = torch.zeros(1, 48, dtype=torch.int64) if documents is None else documents
        first = torch.stack([torch.searchsorted(row, row) for row in rows])
        chunks = (torch.arange(48) - first) // 6
        same_chunk = (rows[:, :, None] == rows[:, None]) & (chunks[:, :, None] == chunks[:, None])
        visible = same_chunk & torch.ones(48, 48).tril().bool()
        of_queries = torch.cat([torch.arange(5, 17), torch.arange(31, 43)])
        q, k, v = (torch.randn(2, 2, 48, 8, generator=draw, dtype=torch.float64) for _ in range(3))
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, visible[:, None])
        sequence = Tokens(torch.arange(48), documents)
        part = Tokens(of_queries, None if documents is None else documents[:, of_queries])
        kernel, flex = ChunkKernel(6), ChunkKernel(6, "flex")
        assert close(kernel(q, k, v, kernel.prepare(sequence)), expected, 1e-12)
        mask = kernel.prepare(part, sequence)
        assert close(kernel(q[:, :, of_queries], k, v, mask), expected[:, :, of_queries], 1e-12)
        places = torch.arange(len(rows))[:, None, None], 0, torch.arange(48)[:, None], torch.arange(48)
        assert (flex.prepare(sequence).mask_mod(*places) == visible).all()
        of_part = flex.prepare(part, sequence).mask_mod(*places[:2], torch.arange(24)[:, None], places[3])
        assert (of_part == visible[:, of_queries]).all()


@pytest.mark.parametrize("length", [4, 10, 23])
def test_the_mean_number_of_keys_is_that_of_the_masks(length):
    visible = ChunkKernel(5).dense_mask(*[Tokens(torch.arange(length), torch.arange(length)[None] // 5)] * 2)
    in_chunks, causal = visible.sum().item() / length, causal_keys(length)
    assert mean_over_layers(TINY, length, causal_keys) == pytest.approx((3 * in_chunks + causal) / 4)


@pytest.mark.parametrize("layout", range(len(SINGLE)))
def test_a_folder_with_separate_experts_is_read(layout, tmp_path):
    model = build(Llama4, TINY)
    tensors = {}
    for name, value in HF.to_hf(model.state_dict(), TINY).items():
        layer, _, part = name.partition("feed_forward.experts.")
        if not part:
            tensors[name] = value
            continue
        halves = zip(("w1", "w3"), value.chunk(2, dim=-1), strict=True) if "gate_up" in part else [("w2", value)]
        for matrix, experts in halves:
            single = SINGLE[layout][f"moe.experts.{matrix}"]
            tensors |= {layer + single.replace("*", str(n)): m.t().contiguous() for n, m in enumerate(experts)}
    write_folder(tmp_path, tensors, TINY, HF)
    other = build(Llama4, TINY, seed=1)
    HF.load_hf(tmp_path, other, TINY)
    assert same(other.state_dict(), model.state_dict())
    del tensors[next(name for name in tensors if "3" in name and "up_proj" in name and "experts" in name)]
    write_folder(tmp_path, tensors, TINY, HF)
    refuse_folder(Llama4, TINY, HF, tmp_path, "experts.*up_proj.* is missing")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"moe_layers": [0, 1, 3]}, r"moe_layers = \[0, 1, 3\]; allowed: the last of each n layers"),
        ({"moe_layers": 3}, "moe_layers = 3; allowed"),
        ({"moe_layers": [True]}, r"moe_layers = \[True\]; allowed"),
        ({"interleave_moe_layer_step": 0, "moe_layers": None}, "interleave_moe_layer_step = 0; allowed: at least 1"),
        ({"no_rope_layers": [1, 0, 0, 1]}, "no_rope_layers = .*; allowed: 4 entries"),
        ({"no_rope_layer_interval": 0, "no_rope_layers": None}, "no_rope_layer_interval = 0; allowed: at least 1"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types = .*; allowed: 'chunked_attention' for layers with rot"),
        ({"attention_chunk_size": None}, "attention_chunk_size = None; allowed: a whole number"),
        ({"attention_chunk_size": 0}, "chunk_size = 0: must be at least 1"),
        ({"attn_temperature_tuning": 0.5}, "attn_temperature_tuning = 0.5; allowed: true or false"),
        ({"floor_scale": 0}, "query_period = 0: must be at least 1"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1, but attention of this family drops no"),
    ],
)
def test_other_configs_are_refused(change, message):
    refuse_config(TINY, HF, change, message)


def test_a_config_without_experts_goes_both_ways():
    config = HF.config_to_hf(TINY) | {"moe_layers": []}
    args = HF.config.args_from_config(config)
    assert args.expert_layers == 0 and HF.config_to_hf(args)["moe_layers"] == []
    assert json.loads(Llama4TextConfig(**HF.config_to_hf(args)).to_json_string(use_diff=False))["moe_layers"] == []
