"""GPT-NeoX: published configs and tensors of old folders."""

import pytest
import torch

from tests.support.hf_parity import build, same, write_folder
from tests.support.tiny_decoders import GATED
from torchtitan.core.errors import JobError
from torchtitan.models import SIZES
from torchtitan.models.gpt_neox.model import HF

PYTHIA = {  # EleutherAI/pythia-1.4b
    "architectures": ["GPTNeoXForCausalLM"],
    "hidden_act": "gelu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
FACTOR = "partial_rotary_factor"
OF_20B = {"hidden_act": "gelu_fast", "hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 64}
OF_20B |= {"num_hidden_layers": 44, "vocab_size": 50432, "attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0}
OF_REDPAJAMA = {"hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 32, "num_hidden_layers": 32}
OF_REDPAJAMA |= {"rotary_pct": 1.0, "use_parallel_residual": False, "vocab_size": 50432}


@pytest.mark.parametrize("flavor, change", [("pythia-1.4B", {}), ("20B", OF_20B), ("redpajama-3B", OF_REDPAJAMA)])
def test_published_configs_are_read(flavor, change):
    assert HF.config.args_from_config(PYTHIA | change) == SIZES["gpt_neox"][flavor]


@pytest.mark.parametrize("key, name, value", [("rope_theta", "rotary_emb_base", 77.0), (FACTOR, "rotary_pct", 0.5)])
def test_second_names_count_in_a_table_only(key, name, value):
    """Beside one transformers takes the default of the first name."""
    config = {other: setting for other, setting in PYTHIA.items() if other != name}
    table = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(JobError, match=f"{key}: {name} or its default is .*, but {key} is {value}"):
        HF.config.args_from_config(config | {"rope_scaling": table, key: value})
    args = HF.config.args_from_config(config | {"rope_scaling": table | {key: value}, key: value})
    assert value in (args.rope_theta, args.rotary_dim / args.head_dim)


@pytest.mark.parametrize("shape", ["gpt_neox", "gpt_neox in turn"])
def test_masks_and_copies_in_old_folders_are_not_read(shape, tmp_path):
    args = GATED[shape]
    model, other = build(HF.build, args), build(HF.build, args, seed=1)
    tensors = HF.to_hf(model.state_dict(), args)
    for layer in range(args.n_layers):
        prefix = f"gpt_neox.layers.{layer}.attention"
        tensors |= {f"{prefix}.bias": torch.ones(1, 1, 9, 9), f"{prefix}.masked_bias": torch.tensor(-1e9)}
        tensors[f"{prefix}.rotary_emb.inv_freq"] = torch.ones(2)
    if args.tied_embeddings:
        tensors["embed_out.weight"] = tensors["gpt_neox.embed_in.weight"].clone()
    write_folder(tmp_path, tensors, args, HF)
    HF.load_hf(tmp_path, other, args)
    assert same(model.state_dict(), other.state_dict())
