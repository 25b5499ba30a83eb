"""Records and a base of the script of the notes."""

import json

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.chat_templates import LLAMA3, folder_with

ANSWERS = ("yes", "no and never")


def base(folder):
    """Write a model and tokenizer with transformers; its head is large enough, though frozen, for confident tokens."""
    folder_with(folder, LLAMA3)
    torch.manual_seed(0)
    sizes = dict(vocab_size=2112, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    config = LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=256)
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data *= 15
    model.save_pretrained(folder)
    return folder


def write_rows(path):
    rows = [{"instruction": f"Is it {i % 7}?", "input": "", "output": ANSWERS[i % 2]} for i in range(64)]
    path.write_text(
        "".join(json.dumps(row | {"input": f"It is {i}."} if i % 5 == 0 else row) + "\n" for i, row in enumerate(rows))
    )
    return path
