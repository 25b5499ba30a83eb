"""Arcee's AFM: arguments, published sizes, and conversion from and to config.json (ArceeConfig).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import check_supported, gated_config, gated_sizes, read_biases
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.sizes import DEBUG, GatedArgs, RopeScaling, check_whole_heads


@dataclass(frozen=True, kw_only=True)
class ArceeArgs(GatedArgs):
    vocab_size: int = 128004
    max_seq_len: int = 65536
    attention_bias: bool = False
    mlp_bias: bool = False

    gate: ClassVar = False
    activation: ClassVar = "relu_squared"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole_heads(self)  # transformers' config demands it


YARN = RopeScaling(20.0, original_max_seq_len=4096, kind="yarn")
ARCEE = {
    "debugmodel": ArceeArgs(**DEBUG),
    "4.5B": ArceeArgs(dim=2560, n_layers=36, n_heads=20, n_kv_heads=4, ffn_dim=18432, rope_scaling=YARN),
}


def _to_hf(args: ArceeArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' ArceeConfig."""
    fields = {"architectures": ["ArceeForCausalLM"], "model_type": "arcee", "hidden_act": "relu2"}
    return gated_config(args, dtype) | fields | {"mlp_bias": args.mlp_bias}


def _from_hf(config: Mapping[str, Any]) -> ArceeArgs:
    check_supported(config, {"hidden_act": "relu2"})
    sizes = gated_sizes({"rms_norm_eps": 1e-5} | config, 4096, head_dim_may_be_null=True)
    return ArceeArgs(**sizes, **read_biases(config))


KEYS = config_keys(DECODER_KEYS | {"head_dim", "mlp_bias"})
CONFIG = ConfigConverter(model_types=("arcee",), to_hf=_to_hf, from_hf=_from_hf, keys=KEYS)


FAMILY = Family(sizes=ARCEE, config=CONFIG, spec="torchtitan.models.arcee.model:SPEC", publisher="arcee-ai")
