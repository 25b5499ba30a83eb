"""Nemotron 4 and Minitron: arguments, published sizes, and conversion from and to config.json (NemotronConfig).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import (
    check_supported,
    gated_config,
    gated_sizes,
    read_biases,
    read_number,
    split_partial_rotary,
)
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys, of_family
from torchtitan.models.hf.layer_kinds import partial_rotary_factor
from torchtitan.models.layer_norms import LayerNormArgs
from torchtitan.models.sizes import DEBUG


@dataclass(frozen=True, kw_only=True)
class NemotronArgs(LayerNormArgs):
    vocab_size: int = 256000
    max_seq_len: int = 4096
    attention_bias: bool = False
    mlp_bias: bool = False

    zero_centered: ClassVar = True
    gate: ClassVar = False
    activation: ClassVar = "relu_squared"


_4b: dict[str, Any] = dict(dim=3072, n_layers=32, n_heads=24, n_kv_heads=8, ffn_dim=9216)
NEMOTRON = {
    "debugmodel": NemotronArgs(**DEBUG, rotary_dim=16),
    "4B": NemotronArgs(**_4b),
    "8B": NemotronArgs(**_4b | dict(dim=4096, n_heads=48, ffn_dim=16384)),
    "340B": NemotronArgs(**_4b | dict(dim=18432, n_layers=96, n_heads=96, ffn_dim=73728), head_dim=192, rotary_dim=96),
}
ROTARY_FACTOR = 0.5
"""transformers' value where a config.json leaves it out."""


def _to_hf(args: NemotronArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' NemotronConfig."""
    return of_family(gated_config(args, dtype), USED) | {
        "architectures": ["NemotronForCausalLM"],
        "model_type": "nemotron",
        "hidden_act": "relu2",
        "norm_eps": args.norm_eps,
        "partial_rotary_factor": partial_rotary_factor(args),
        "mlp_bias": args.mlp_bias,
    }


def _from_hf(config: Mapping[str, Any]) -> NemotronArgs:
    check_supported(config, {"hidden_act": "relu2"})
    config, factor = split_partial_rotary(config, ROTARY_FACTOR)
    sizes = gated_sizes(config, 4096, head_dim_may_be_null=True)
    sizes |= {"norm_eps": read_number(config, "norm_eps", 1e-5), "rotary_dim": int(sizes["head_dim"] * factor)}
    return NemotronArgs(**sizes, **read_biases(config))


USED = DECODER_KEYS - {"rms_norm_eps"} | {"head_dim", "norm_eps", "mlp_bias", "partial_rotary_factor"}
CONFIG = ConfigConverter(model_types=("nemotron",), to_hf=_to_hf, from_hf=_from_hf, keys=config_keys(USED))


FAMILY = Family(sizes=NEMOTRON, config=CONFIG, spec="torchtitan.models.nemotron.model:SPEC", publisher="nvidia")
