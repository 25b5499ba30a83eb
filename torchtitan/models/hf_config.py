"""What the readers and writers of config.json share."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def check_numbers(config: Mapping[str, Any], needed: Iterable[str]) -> None:
    """ValueError unless all of these are whole numbers above 0."""
    missing = [key for key in needed if type(config.get(key)) is not int or config[key] < 1]
    if missing:
        raise ValueError(f"no whole number above 0 for {', '.join(missing)}")


def check_only(config: Mapping[str, Any], only: Mapping[str, Any]) -> None:
    """ValueError where a key that is there has another value than the one that the model knows."""
    for key, wanted in only.items():
        if config.get(key) not in (None, wanted):
            raise ValueError(f"{key} = {config[key]!r}, but this model only has {wanted!r}")


def rope_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Scaling and, of transformers 5, theta. ValueError where that is no object."""
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(name) or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"{name} = {rope!r}; allowed are null and an object with rope_type and its numbers")
    return rope


def rope_kind(config: Mapping[str, Any]) -> str:
    rope = rope_of(config)
    return rope.get("rope_type", rope.get("type", "default"))


def rope_theta(config: Mapping[str, Any]) -> float:
    return float(rope_of(config).get("rope_theta", config.get("rope_theta", 10000.0)))


def decoder_config(args: Any, dtype: torch.dtype) -> dict[str, Any]:
    """The fields that all families have, in the spelling that transformers 4 and 5 both read."""
    return {
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.num_kv_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": args.norm_eps,
        "max_position_embeddings": args.max_seq_len,
        "rope_theta": args.rope_theta,
        "tie_word_embeddings": args.tied_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
