"""Conversion of Mistral arguments from and to config.json (transformers' MistralConfig), and the family. No torch."""

from collections.abc import Mapping
from typing import Any

from torchtitan.models.family import ConfigForm, Family
from torchtitan.models.hf.config import (
    check_only,
    decoder_config,
    decoder_sizes,
    number_of,
    rotary_config,
    scaling_from_hf,
)
from torchtitan.models.mistral import MISTRAL, MistralArgs


def _to_hf(args: MistralArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' MistralConfig."""
    mistral_fields = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": args.head_dim,
        "intermediate_size": args.ffn_dim,
        "sliding_window": args.sliding_window or None,
    }
    return decoder_config(args, dtype) | rotary_config(args) | mistral_fields


def _from_hf(config: Mapping[str, Any]) -> MistralArgs:
    sizes = decoder_sizes(config, 131072, "intermediate_size")
    check_only(config, {"hidden_act": "silu", "attention_bias": False})
    dim, heads = sizes["dim"], sizes["n_heads"]
    return MistralArgs(
        **sizes,
        rope_scaling=scaling_from_hf(config),
        # absent keys: transformers' defaults; null: as many key/value heads as query heads, and no window
        n_kv_heads=number_of(config, "num_key_value_heads", 8, null=heads),
        ffn_dim=config["intermediate_size"],
        head_dim=number_of(config, "head_dim", dim // heads, null=dim // heads),
        sliding_window=number_of(config, "sliding_window", 4096, null=0),
    )


CONFIG = ConfigForm(model_types=("mistral",), to_hf=_to_hf, from_hf=_from_hf)


FAMILY = Family(sizes=MISTRAL, config=CONFIG, spec="torchtitan.models.mistral.model:SPEC", home="mistralai")
