"""Sizes and constants of Qwen 3 without experts as a config.json has them, Qwen3Config of transformers. No torch."""

from collections.abc import Mapping
from typing import Any

from torchtitan.errors import JobError
from torchtitan.models.hf.config import (
    ConfigForm,
    check_numbers,
    check_only,
    decoder_config,
    number_of,
    rope_kind,
    rope_theta,
)
from torchtitan.models.qwen3 import Qwen3Args


def _to_hf(args: Qwen3Args, dtype: Any = "float32") -> dict[str, Any]:
    """The fields of transformers' Qwen3Config."""
    return decoder_config(args, dtype) | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": args.head_dim,
        "intermediate_size": args.ffn_dim,
        "use_sliding_window": False,
        "rope_scaling": None,
    }


def _from_hf(config: Mapping[str, Any]) -> Qwen3Args:
    numbers = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    check_numbers(config, numbers)
    check_only(config, {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False})
    if rope_kind(config) != "default":
        raise JobError(f"rotary scaling {rope_kind(config)!r}, but this model has none")
    return Qwen3Args(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=number_of(config, "num_key_value_heads", 32, null=config["num_attention_heads"]),
        ffn_dim=config["intermediate_size"],
        head_dim=number_of(config, "head_dim", 128, null=128),  # transformers' own default, whatever the width
        vocab_size=config["vocab_size"],
        norm_eps=number_of(config, "rms_norm_eps", 1e-6),
        rope_theta=rope_theta(config),
        tied_embeddings=config.get("tie_word_embeddings", False),
        max_seq_len=number_of(config, "max_position_embeddings", 32768),
    )


CONFIG = ConfigForm(model_types=("qwen3",), to_hf=_to_hf, from_hf=_from_hf)
