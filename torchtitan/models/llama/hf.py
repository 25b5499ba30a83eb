"""Llama weights and sizes in the form of Hugging Face: names, order of rows, config.json, safetensors shards.

The one numerical difference: we turn neighbouring pairs of a head's features (Meta's order), transformers turns feature
i with i + head_dim / 2, so the rows of wq and wk come in another order. Everything else is a renaming.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torchtitan.models.hf_config import check_numbers, check_only, decoder_config, rope_kind, rope_of, rope_theta
from torchtitan.models.hf_folders import SHARD_BYTES, check_config, load_folder, save_folder
from torchtitan.models.hf_names import ATTENTION, FEED_FORWARD, Form
from torchtitan.models.llama import LlamaArgs, RopeScaling
from torchtitan.models.llama.model import Llama

TURNED = frozenset({"attention.wq.weight", "attention.wk.weight"})


def form(args: LlamaArgs) -> Form:
    return Form(parts=ATTENTION | FEED_FORWARD, turned=TURNED, head_dim=args.head_dim, tied=args.tied_embeddings)


def to_hf(state: Mapping[str, torch.Tensor], args: LlamaArgs) -> dict[str, torch.Tensor]:
    """Full tensors by our names (weights, or their gradients) -> by transformers' names. A tied head is left out."""
    return form(args).to_hf(state)


def from_hf(state: Mapping[str, torch.Tensor], args: LlamaArgs) -> dict[str, torch.Tensor]:
    """The inverse of to_hf, for Llama.load_state_dict: a tied head is there again."""
    return form(args).from_hf(state)


# -- config.json ------------------------------------------------------------------------------------------------------


def config_to_hf(args: LlamaArgs, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
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


def config_from_hf(config: Mapping[str, Any]) -> LlamaArgs:
    """Sizes from a config.json of transformers 4 or 5. ValueError for what this model does not have."""
    if config.get("model_type") != "llama":
        raise ValueError(f"model_type = {config.get('model_type')!r}, but this model is a llama")
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
        raise ValueError(f"rotary scaling {dict(rope)}; allowed are none and type llama3 with {', '.join(keys)}")
    return RopeScaling(*(rope[key] for key in keys))


# -- folders ----------------------------------------------------------------------------------------------------------

COMPARED = ("dim", "n_layers", "n_heads", "num_kv_heads", "ffn_dim", "vocab_size", "norm_eps", "rope_theta")
COMPARED += ("rope_scaling", "tied_embeddings")


def save_hf(
    folder: str | os.PathLike[str],
    state: Mapping[str, torch.Tensor],
    args: LlamaArgs,
    *,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
    write: bool = True,
) -> None:
    """See hf_folders.save_folder; in a process group all ranks call it, one of them with `write`."""
    config = config_to_hf(args, dtype)
    save_folder(folder, state, form(args), config, _shapes(args), dtype=dtype, shard_bytes=shard_bytes, write=write)


def load_hf(folder: str | os.PathLike[str], model: nn.Module, args: LlamaArgs) -> None:
    """See hf_folders.load_folder. ValueError, with everything that is wrong, for a folder that does not fit."""
    check_config(folder, args, config_from_hf, COMPARED)
    load_folder(folder, model, form(args), _shapes(args), ignored=lambda name: _is_ignored(name, args))


def _is_ignored(name: str, args: LlamaArgs) -> bool:
    """What is computed, and a copy of the embedding: some exports hold them, transformers reads neither."""
    return name.endswith("rotary_emb.inv_freq") or (args.tied_embeddings and name == "lm_head.weight")


def _shapes(args: LlamaArgs) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Llama(args).named_parameters()}
