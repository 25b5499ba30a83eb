"""Sizes and constants of the Llamas as a config.json has them, LlamaConfig of transformers. No torch."""

from collections.abc import Mapping
from typing import Any

from torchtitan.errors import JobError
from torchtitan.models.hf.config import (
    ConfigForm,
    check_numbers,
    check_only,
    decoder_config,
    rope_kind,
    rope_of,
    rope_theta,
)
from torchtitan.models.llama import LlamaArgs, RopeScaling


def _to_hf(args: LlamaArgs, dtype: Any = "float32") -> dict[str, Any]:
    """The fields of transformers' LlamaConfig."""
    scaling = args.rope_scaling
    return decoder_config(args, dtype) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": args.ffn_dim,
        "head_dim": args.head_dim,
        "mlp_bias": False,
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        },
    }


def _from_hf(config: Mapping[str, Any]) -> LlamaArgs:
    numbers = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    check_numbers(config, numbers)
    dim, heads, ffn_dim = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    check_only(config, {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "head_dim": dim // heads})
    plain_width = int(2 * 4 * dim / 3)
    return LlamaArgs(
        dim=dim,
        n_layers=config["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=config.get("num_key_value_heads"),
        vocab_size=config["vocab_size"],
        multiple_of=ffn_dim,  # rounding up to it gives just it, once the plain width is not above
        ffn_dim_multiplier=None if plain_width <= ffn_dim else ffn_dim / plain_width,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=rope_theta(config),
        rope_scaling=_scaling_from_hf(config),
        tied_embeddings=config.get("tie_word_embeddings", False),
        max_seq_len=config.get("max_position_embeddings", 2048),
    )


def _scaling_from_hf(config: Mapping[str, Any]) -> RopeScaling | None:
    rope = rope_of(config)
    if rope_kind(config) == "default":
        return None
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if rope_kind(config) != "llama3" or any(key not in rope for key in keys):
        raise JobError(f"rotary scaling {dict(rope)}; allowed are none and type llama3 with {', '.join(keys)}")
    return RopeScaling(*(rope[key] for key in keys))


COMPARED = ("dim", "n_layers", "n_heads", "num_kv_heads", "ffn_dim", "vocab_size", "norm_eps", "rope_theta")
COMPARED += ("rope_scaling", "tied_embeddings")
CONFIG = ConfigForm(model_types=("llama",), to_hf=_to_hf, from_hf=_from_hf, compared=COMPARED)
