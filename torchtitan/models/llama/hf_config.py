"""Sizes and constants of the Llamas as a config.json has them, LlamaConfig of transformers. No torch."""

from collections.abc import Mapping
from typing import Any

from torchtitan.errors import JobError
from torchtitan.models.hf.config import (
    ConfigForm,
    check_only,
    decoder_config,
    decoder_sizes,
    number_of,
    rope_kind,
    rope_of,
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
        "rope_theta": scaling.theta(args.rope_theta, args.head_dim) if scaling else args.rope_theta,
        "rope_scaling": scaling and _scaling_to_hf(scaling),
    }


def _from_hf(config: Mapping[str, Any]) -> LlamaArgs:
    sizes = decoder_sizes(config, 2048, "intermediate_size")
    dim, heads, ffn_dim = sizes["dim"], sizes["n_heads"], config["intermediate_size"]
    check_only(config, {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "head_dim": dim // heads})
    plain_width = int(2 * 4 * dim / 3)
    return LlamaArgs(
        **sizes,
        n_kv_heads=number_of(config, "num_key_value_heads", heads, null=heads),
        multiple_of=ffn_dim,  # rounding up to it gives just it, once the plain width is not above
        ffn_dim_multiplier=None if plain_width <= ffn_dim else ffn_dim / plain_width,
        rope_scaling=_scaling_from_hf(config),
    )


FIELDS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_seq_len",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
KINDS = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
}
"""What transformers has for each kind, by its names; of yarn the last two may be missing."""


def _scaling_to_hf(scaling: RopeScaling) -> dict[str, Any] | None:
    """None for ntk, which is another theta."""
    if scaling.kind == "ntk":
        return None
    return {"rope_type": scaling.kind} | {key: getattr(scaling, FIELDS[key]) for key in KINDS[scaling.kind]}


def _scaling_from_hf(config: Mapping[str, Any]) -> RopeScaling | None:
    rope, kind = rope_of(config), rope_kind(config)
    if kind == "default":
        return None
    given = {key: rope[key] for key in KINDS.get(kind, ()) if rope.get(key) is not None}
    if kind not in KINDS or set(KINDS[kind]) - set(given) - {"beta_fast", "beta_slow"}:
        kinds = "; ".join(f"{name} with {', '.join(keys)}" for name, keys in KINDS.items())
        raise JobError(f"rotary scaling {dict(rope)}; allowed are none and types {kinds}")
    check_only(rope, {"attention_factor": None, "truncate": True, "mscale": None, "mscale_all_dim": None})
    return RopeScaling(kind=kind, **{FIELDS[key]: value for key, value in given.items()})


COMPARED = ("dim", "n_layers", "n_heads", "num_kv_heads", "ffn_dim", "vocab_size", "norm_eps", "rope_theta")
COMPARED += ("rope_scaling", "tied_embeddings")
CONFIG = ConfigForm(model_types=("llama",), to_hf=_to_hf, from_hf=_from_hf, compared=COMPARED)
