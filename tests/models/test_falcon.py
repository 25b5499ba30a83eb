"""Falcon: published configs, and ranks that read parts of matrices which are joined or split in its folders."""

import pytest
import torch

from tests.support.hf_parity import build
from tests.support.tiny_decoders import GATED
from torchtitan.models import SIZES
from torchtitan.models.falcon.model import HF
from torchtitan.models.hf import load
from torchtitan.models.spec import MODELS

PUBLISHED_7B = {  # tiiuae/falcon-7b
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0,
    "bias": False,
    "bos_token_id": 11,
    "eos_token_id": 11,
    "hidden_dropout": 0.0,
    "hidden_size": 4544,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "falcon",
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "parallel_attn": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 65024,
}
OF_40B = {"hidden_size": 8192, "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8}


@pytest.mark.parametrize("flavor, change", [("7B", {}), ("40B", OF_40B | {"new_decoder_architecture": True})])
def test_published_configs_are_read(flavor, change):
    assert HF.config.args_from_config(PUBLISHED_7B | change) == SIZES["falcon"][flavor]


@pytest.mark.parametrize("shape, names", [("falcon new", ("wq", "wk", "wv")), ("stablelm side by side", ("q_norm",))])
def test_a_rank_reads_its_rows_of_joined_and_of_split_tensors(shape, names, monkeypatch):
    """Also where its part begins or ends within a head."""
    hf, args = MODELS[shape.split()[0]].hf, GATED[shape]
    state = build(hf.build, args).state_dict()
    stored, form = hf.to_hf(state, args), hf.tensor_map(args)
    for name in (f"layers.1.attention.{name}.weight" for name in names):
        full = state[name]
        for first, last in ((0, len(full)), (0, 3), (5, 13), (len(full) - 6, len(full))):
            local = torch.empty_like(full[first:last])
            part = local, tuple(full.shape), (first, *[0] * (full.dim() - 1))
            monkeypatch.setattr(load, "local_part", lambda tensor, part=part: part)
            load.read_part([stored[hf_name] for hf_name in form.hf_names(name)], full, name, form)
            assert torch.equal(local, full[first:last])
