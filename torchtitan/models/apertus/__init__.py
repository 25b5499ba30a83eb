"""Apertus: arguments, published sizes, and conversion from and to config.json (ApertusConfig).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import check_supported, gated_config, gated_sizes, read_flag
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.sizes import DEBUG, GatedArgs, RopeScaling

THETA = 12000000.0


@dataclass(frozen=True, kw_only=True)
class ApertusArgs(GatedArgs):
    vocab_size: int = 131072
    rope_theta: float = THETA
    rope_scaling: RopeScaling | None = RopeScaling()
    max_seq_len: int = 65536
    attention_bias: bool = False

    gate: ClassVar = False
    activation: ClassVar = "xielu"
    qk_norm: ClassVar = True


_8b: dict[str, Any] = dict(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=21504)
APERTUS = {
    "debugmodel": ApertusArgs(**DEBUG),
    "8B": ApertusArgs(**_8b),
    "70B": ApertusArgs(**_8b | dict(dim=8192, n_layers=80, n_heads=64, ffn_dim=43008)),
}


def _to_hf(args: ApertusArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' ApertusConfig."""
    fields = {"architectures": ["ApertusForCausalLM"], "model_type": "apertus", "hidden_act": "xielu"}
    config = gated_config(args, dtype) | fields
    if config["rope_scaling"] is None:  # which alone would mean transformers' scaling
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    return config


def _from_hf(config: Mapping[str, Any]) -> ApertusArgs:
    check_supported(config, {"hidden_act": "xielu"})
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        if "rope_scaling" in config:
            raise JobError(
                "rope_scaling = None; allowed: with rope_parameters, as transformers 4 takes it for none and 5 for "
                "that of the published models; write rope_parameters, or leave both out for the latter"
            )
        config = {**config, "rope_parameters": ROPE}
    sizes = gated_sizes({"rms_norm_eps": 1e-5} | config, 65536, theta=THETA)
    return ApertusArgs(**sizes, attention_bias=read_flag(config, "attention_bias", False))


ROPE: dict[str, Any] = {"rope_type": "llama3", "rope_theta": THETA, "factor": 8.0, "low_freq_factor": 1.0}
ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""transformers' rotary positions where a config.json leaves them out."""
_DEFAULTS = {"qk_norm": True, "post_norm": False, "hidden_dropout": 0.0, "mlp_bias": False}
CONFIG = ConfigConverter(
    model_types=("apertus",),
    to_hf=_to_hf,
    from_hf=_from_hf,
    keys=config_keys(DECODER_KEYS | {"head_dim"}, defaults=_DEFAULTS),
)


FAMILY = Family(sizes=APERTUS, config=CONFIG, spec="torchtitan.models.apertus.model:SPEC", publisher="swiss-ai")
