"""Conversion of Qwen 3 arguments from and to config.json (transformers' Qwen3Config), and the family. No torch."""

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
from torchtitan.models.qwen3 import QWEN3, Qwen3Args


def _to_hf(args: Qwen3Args, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Qwen3Config."""
    qwen3_fields = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": args.head_dim,
        "intermediate_size": args.ffn_dim,
        "use_sliding_window": False,
    }
    return decoder_config(args, dtype) | rotary_config(args) | qwen3_fields


def _from_hf(config: Mapping[str, Any]) -> Qwen3Args:
    sizes = decoder_sizes(config, 32768, "intermediate_size")
    check_only(config, {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False})
    return Qwen3Args(
        **sizes,
        rope_scaling=scaling_from_hf(config),
        n_kv_heads=number_of(config, "num_key_value_heads", 32, null=sizes["n_heads"]),
        ffn_dim=config["intermediate_size"],
        head_dim=number_of(config, "head_dim", 128, null=128),  # transformers' own default, whatever the width
    )


CONFIG = ConfigForm(model_types=("qwen3",), to_hf=_to_hf, from_hf=_from_hf)


FAMILY = Family(sizes=QWEN3, config=CONFIG, spec="torchtitan.models.qwen3.model:SPEC", home="Qwen")
