"""Mistral without experts: arguments, published sizes, and conversion from and to config.json (MistralConfig).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import check_supported, gated_config, gated_sizes, read_number
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.hf.layer_kinds import FULL, SLIDING, only_layer_type
from torchtitan.models.sizes import DEBUG, GatedArgs


@dataclass(frozen=True, kw_only=True)
class MistralArgs(GatedArgs):
    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int = 8
    ffn_dim: int = 14336
    sliding_window: int = 0  # number of tokens that a token attends to, with itself; 0: all before it

    may_be_zero: ClassVar = ("sliding_window",)


MISTRAL = {
    "debugmodel": MistralArgs(**DEBUG, sliding_window=64),
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
        "sliding_window": args.sliding_window or None,
    }
    return gated_config(args, dtype) | mistral_fields


def _from_hf(config: Mapping[str, Any]) -> MistralArgs:
    check_supported(config, {"hidden_act": "silu", "attention_bias": False})
    sizes = gated_sizes(config, 131072, kv_heads=8, head_dim_may_be_null=True)
    window = read_number(config, "sliding_window", 4096, null=0)  # absent: transformers' default; null: none
    if window == 0 and config["sliding_window"] is not None:
        raise JobError("sliding_window = 0; allowed: a number of tokens, or null for none")
    # with layer_types, even null, transformers reads a Ministral, which has the window in some of the layers
    kind = only_layer_type(config)
    if kind == SLIDING and not window:
        raise JobError(f"layer_types has {SLIDING!r}, but sliding_window = {config['sliding_window']!r}")
    return MistralArgs(**sizes, sliding_window=0 if kind == FULL else window)


KEYS = config_keys(DECODER_KEYS | {"head_dim", "sliding_window", "layer_types"})
CONFIG = ConfigConverter(model_types=("mistral",), to_hf=_to_hf, from_hf=_from_hf, keys=KEYS)


FAMILY = Family(sizes=MISTRAL, config=CONFIG, spec="torchtitan.models.mistral.model:SPEC", publisher="mistralai")
