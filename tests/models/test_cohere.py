"""Cohere: published configs."""

from torchtitan.models import SIZES
from torchtitan.models.cohere.model import HF

COMMAND_R7B = {  # CohereLabs/c4ai-command-r7b-12-2024
    "architectures": ["Cohere2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "cache_implementation": "hybrid",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "layer_norm_eps": 1e-05,
    "layer_switch": 4,
    "logit_scale": 0.25,
    "max_position_embeddings": 8192,
    "model_type": "cohere2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "rope_theta": 50000,
    "rotary_pct": 1.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": False,
    "vocab_size": 256000,
}


def test_the_published_config_is_read():
    assert HF.config.args_from_config(COMMAND_R7B) == SIZES["cohere2"]["7B"]


def test_layers_without_a_window_have_no_positions():
    args = SIZES["cohere2"]["7B"]
    assert [layer for layer in range(8) if args.rope(layer) is None] == [3, 7]
    assert all(SIZES["cohere"]["35B"].rope(layer) for layer in range(8)), "without windows all layers have them"
