"""Granite 3 without experts: arguments, published sizes, and conversion from and to config.json (GraniteConfig).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.models.family import NOT_IN_FORWARD, ConfigConverter, Family
from torchtitan.models.hf.config import check_supported, gated_config, gated_sizes, read_biases, read_number
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.sizes import DEBUG, GatedArgs, GatedDecoderSizes, check_probabilities


@dataclass(frozen=True, kw_only=True)
class GraniteFactors(GatedDecoderSizes):
    """Attention scores are the products of queries and keys times `attention_multiplier`."""

    embedding_multiplier: float = 12.0
    attention_multiplier: float = 0.0078125
    residual_multiplier: float = 0.22
    logits_divisor: float = 16.0

    @property
    def query_scale(self) -> float:
        return self.attention_multiplier * self.head_dim**0.5


@dataclass(frozen=True, kw_only=True)
class GraniteArgs(GraniteFactors, GatedArgs):
    """Sizes of Granite."""

    vocab_size: int = 49155
    max_seq_len: int = 4096
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0  # of attention probabilities; 0.1 in published folders

    may_be_zero: ClassVar = ("attention_dropout",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probabilities(self, "attention_dropout")


_8b: dict[str, Any] = dict(dim=4096, n_layers=40, n_heads=32, n_kv_heads=8, ffn_dim=12800, tied_embeddings=True)
GRANITE = {
    "debugmodel": GraniteArgs(**DEBUG, attention_multiplier=0.03125),
    "2B": GraniteArgs(
        **_8b | dict(dim=2048, ffn_dim=8192, head_dim=64), attention_multiplier=0.015625, logits_divisor=8.0
    ),
    "8B": GraniteArgs(**_8b),  # 3.0
}
FACTORS = {
    "embedding_multiplier": "embedding_multiplier",
    "attention_multiplier": "attention_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_divisor": "logits_scaling",
}
"""Names of the factors, here and in config.json."""


def _to_hf(args: GraniteArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' GraniteConfig."""
    fields = {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "mlp_bias": args.mlp_bias}
    fields |= {"attention_dropout": args.attention_dropout}
    return gated_config(args, dtype) | fields | {key: getattr(args, name) for name, key in FACTORS.items()}


def _from_hf(config: Mapping[str, Any]) -> GraniteArgs:
    check_supported(config, {"hidden_act": "silu"})
    sizes = gated_sizes(config, 2048)
    factors = {name: read_number(config, key, 1.0) for name, key in FACTORS.items()}
    dropped = read_number(config, "attention_dropout", 0.0, null=0.0)
    return GraniteArgs(**sizes, **factors, **read_biases(config), attention_dropout=dropped)


KEYS = config_keys(DECODER_KEYS | {"head_dim", "mlp_bias", *FACTORS.values()})
NOT_COMPARED = (*NOT_IN_FORWARD, "attention_dropout")
CONFIG = ConfigConverter(model_types=("granite",), to_hf=_to_hf, from_hf=_from_hf, not_compared=NOT_COMPARED, keys=KEYS)


FAMILY = Family(sizes=GRANITE, config=CONFIG, spec="torchtitan.models.granite.model:SPEC", publisher="ibm-granite")
