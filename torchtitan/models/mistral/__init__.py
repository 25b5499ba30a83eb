"""Mistral without experts: arguments, published sizes, and conversion from and to config.json (MistralConfig).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import (
    check_supported,
    decoder_config,
    decoder_sizes,
    read_number,
    rotary_config,
    scaling_from_hf,
)
from torchtitan.models.sizes import GatedArgs, check_not_negative


@dataclass(frozen=True, kw_only=True)
class MistralArgs(GatedArgs):
    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int = 8
    ffn_dim: int = 14336
    sliding_window: int = 0  # number of tokens that a token attends to, with itself; 0: all before it

    may_be_zero: ClassVar = ("sliding_window",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self, "sliding_window")


_debug: dict[str, Any] = dict(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, head_dim=32, ffn_dim=768, vocab_size=2048)
MISTRAL = {
    "debugmodel": MistralArgs(**_debug, sliding_window=64),
    "7B": MistralArgs(sliding_window=4096),  # v0.1
    "7B-v0.2": MistralArgs(rope_theta=1e6),
    "7B-v0.3": MistralArgs(rope_theta=1e6, vocab_size=32768),
    "Nemo-12B": MistralArgs(dim=5120, n_layers=40, vocab_size=131072, rope_theta=1e6, max_seq_len=131072),
}


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
    check_supported(config, {"hidden_act": "silu", "attention_bias": False})
    dim, heads = sizes["dim"], sizes["n_heads"]
    return MistralArgs(
        **sizes,
        rope_scaling=scaling_from_hf(config),
        # absent keys: transformers' defaults; null: as many key/value heads as query heads, and no window
        n_kv_heads=read_number(config, "num_key_value_heads", 8, null=heads),
        ffn_dim=config["intermediate_size"],
        head_dim=read_number(config, "head_dim", dim // heads, null=dim // heads),
        sliding_window=read_number(config, "sliding_window", 4096, null=0),
    )


CONFIG = ConfigConverter(model_types=("mistral",), to_hf=_to_hf, from_hf=_from_hf)


FAMILY = Family(sizes=MISTRAL, config=CONFIG, spec="torchtitan.models.mistral.model:SPEC", publisher="mistralai")
