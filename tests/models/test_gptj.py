"""GPT-J: its published folder, beside what test_gated.py compares with transformers."""

import torch

from tests.support.hf_parity import build, same, write_folder
from tests.support.tiny_decoders import GATED
from torchtitan.models import SIZES
from torchtitan.models.gptj.model import GPTJ, HF

PUBLISHED = {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_inner": None, "n_layer": 28, "n_positions": 2048}
PUBLISHED |= {"rotary": True, "rotary_dim": 64, "vocab_size": 50400, "tie_word_embeddings": False}


def test_the_published_config_is_the_6b():
    assert HF.config.args_from_config(PUBLISHED) == SIZES["gptj"]["6B"]


def test_attention_masks_of_old_folders_are_not_read(tmp_path):
    args = GATED["gptj"]
    model, other = build(GPTJ, args), build(GPTJ, args, seed=1)
    tensors = HF.to_hf(model.state_dict(), args)
    for layer in range(args.n_layers):
        prefix = f"transformer.h.{layer}.attn"
        tensors |= {f"{prefix}.bias": torch.ones(1, 1, 9, 9), f"{prefix}.masked_bias": torch.tensor(-1e9)}
    write_folder(tmp_path, tensors, args, HF)
    HF.load_hf(tmp_path, other, args)
    assert same(model.state_dict(), other.state_dict())
