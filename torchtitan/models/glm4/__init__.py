"""Dense GLM 4: arguments, published sizes, and conversion from and to config.json (GlmConfig, Glm4Config).

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
    read_flag,
    read_number,
    split_partial_rotary,
)
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.hf.layer_kinds import partial_rotary_factor
from torchtitan.models.sizes import DEBUG, QKV, GatedArgs, Names, NormOrder, check_rotary_dim


@dataclass(frozen=True, kw_only=True)
class Glm4Args(GatedArgs):
    """Sizes of GLM 4. With `output_norms` it is one of April 2025 or later."""

    n_kv_heads: int = 2
    vocab_size: int = 151552
    max_seq_len: int = 32768
    rotary_dim: int = 64  # features of a head that are rotated
    qkv_bias: bool = True
    output_norms: bool = True  # norms of the outputs of attention and feed-forward, in addition to their inputs

    rotates_adjacent: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rotary_dim(self)

    @property
    def biases(self) -> Names:
        return QKV if self.qkv_bias else ()

    @property
    def norm_order(self) -> NormOrder:
        return "sandwich" if self.output_norms else "pre"


_9b: dict[str, Any] = dict(dim=4096, n_layers=40, n_heads=32, ffn_dim=13696)
_debug: dict[str, Any] = DEBUG | dict(rotary_dim=16)
GLM = {
    "debugmodel": Glm4Args(**_debug, output_norms=False),
    "9B": Glm4Args(**_9b, output_norms=False, norm_eps=1.5625e-7, max_seq_len=131072),  # glm-4-9b-chat-hf
}
GLM4 = {"debugmodel": Glm4Args(**_debug), "9B": Glm4Args(**_9b)}  # GLM-4-9B-0414


def _to_hf(args: Glm4Args, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Glm4Config, or of its GlmConfig if outputs have no norms."""
    name, model_type = ("Glm4", "glm4") if args.output_norms else ("Glm", "glm")
    return gated_config(args, dtype) | {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": model_type,
        "attention_bias": args.qkv_bias,
        "partial_rotary_factor": partial_rotary_factor(args),
    }


def _from_hf(config: Mapping[str, Any]) -> Glm4Args:
    check_supported(config, {"hidden_act": "silu"})
    output_norms = config["model_type"] == "glm4"
    # transformers refuses null for the first two
    numbers = {"n_kv_heads": read_number(config, "num_key_value_heads", 2)}
    numbers |= {"head_dim": read_number(config, "head_dim", 128)}
    norm_eps = read_number(config, "rms_norm_eps", 1.5625e-7)
    config, rotary_factor = split_partial_rotary(config, 0.5)
    sizes = gated_sizes(config, 131072) | numbers
    return Glm4Args(
        **sizes | {"norm_eps": norm_eps},
        rotary_dim=int(sizes["head_dim"] * rotary_factor),
        qkv_bias=read_flag(config, "attention_bias", True),
        output_norms=output_norms,
    )


KEYS = config_keys(DECODER_KEYS | {"head_dim", "partial_rotary_factor"})
CONFIG = ConfigConverter(model_types=("glm", "glm4"), to_hf=_to_hf, from_hf=_from_hf, keys=KEYS)


GLMS = {
    name: Family(sizes=sizes, config=CONFIG, spec="torchtitan.models.glm4.model:SPEC", publisher="zai-org")
    for name, sizes in (("glm4", GLM4), ("glm", GLM))
}
