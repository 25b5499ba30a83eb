"""Seed-OSS: arguments, published sizes, and conversion from and to config.json (SeedOssConfig).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.models.family import NOT_IN_FORWARD, ConfigConverter, Family
from torchtitan.models.hf.config import check_supported, gated_config, gated_sizes, read_flag, read_number
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.sizes import DEBUG, FEED_FORWARD, QKV, WO, GatedArgs, Names, check_probabilities


@dataclass(frozen=True, kw_only=True)
class SeedOssArgs(GatedArgs):
    vocab_size: int = 155136
    norm_eps: float = 1e-6
    rope_theta: float = 10000000.0
    max_seq_len: int = 524288
    attention_bias: bool = True  # of queries, keys and values
    attention_out_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0  # of attention probabilities; 0.1 in the published folder, as the other one
    residual_dropout: float = 0.0  # of the outputs of attention and feed-forward

    may_be_zero: ClassVar = ("attention_dropout", "residual_dropout")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probabilities(self, *DROPOUTS)

    @property
    def biases(self) -> Names:
        attention = (*(QKV if self.attention_bias else ()), *(WO if self.attention_out_bias else ()))
        return (*attention, *(FEED_FORWARD if self.mlp_bias else ()))


BIASES = {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False}
"""Sizes that say which linear layers have biases, and transformers' values where a config.json leaves them out."""
DROPOUTS = ("attention_dropout", "residual_dropout")
SEED_OSS = {
    "debugmodel": SeedOssArgs(**DEBUG),
    "36B": SeedOssArgs(dim=5120, n_layers=64, n_heads=80, n_kv_heads=8, ffn_dim=27648),
}


def _to_hf(args: SeedOssArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' SeedOssConfig."""
    fields = {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss"}
    return gated_config(args, dtype) | fields | {name: getattr(args, name) for name in (*BIASES, *DROPOUTS)}


def _from_hf(config: Mapping[str, Any]) -> SeedOssArgs:
    check_supported(config, {"hidden_act": "silu"})
    sizes = gated_sizes(config, 524288, kv_heads=8, head_dim_may_be_null=True)
    sizes |= {"head_dim": read_number(config, "head_dim", 128, null=sizes["dim"] // sizes["n_heads"])}
    sizes |= {name: read_flag(config, name, default) for name, default in BIASES.items()}
    return SeedOssArgs(**sizes, **{name: read_number(config, name, 0.1) for name in DROPOUTS})


KEYS = config_keys(DECODER_KEYS | {"head_dim", *BIASES, *DROPOUTS})
NOT_COMPARED = (*NOT_IN_FORWARD, *DROPOUTS)
CONFIG = ConfigConverter(
    model_types=("seed_oss",), to_hf=_to_hf, from_hf=_from_hf, not_compared=NOT_COMPARED, keys=KEYS
)


FAMILY = Family(sizes=SEED_OSS, config=CONFIG, spec="torchtitan.models.seed_oss.model:SPEC", publisher="ByteDance-Seed")
