"""Phi 1, 1.5 and 2: arguments, published sizes, and conversion from and to config.json (PhiConfig).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.models.family import NOT_IN_FORWARD, ConfigConverter, Family
from torchtitan.models.gpt2 import GELU
from torchtitan.models.hf.config import check_supported, read_flag, read_number
from torchtitan.models.hf.config_keys import config_keys
from torchtitan.models.layer_norms import KEYS, LayerNormArgs, layer_norm_config, layer_norm_sizes
from torchtitan.models.sizes import DEBUG, check_probabilities


@dataclass(frozen=True, kw_only=True)
class PhiArgs(LayerNormArgs):
    vocab_size: int = 51200
    max_seq_len: int = 2048
    qk_norm: bool = False
    residual_dropout: float = 0.0  # of the outputs of attention and feed-forward; 0.1 in Phi 2's folder

    attention_bias: ClassVar = True
    mlp_bias: ClassVar = True
    head_bias: ClassVar = True
    gate: ClassVar = False
    activation: ClassVar = "gelu_tanh"
    norm_order: ClassVar = "shared"
    may_be_zero: ClassVar = ("residual_dropout",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probabilities(self, "residual_dropout")


_1_5: dict[str, Any] = dict(dim=2048, n_layers=24, n_heads=32, n_kv_heads=32, head_dim=64, ffn_dim=8192)
PHI = {
    "debugmodel": PhiArgs(**DEBUG, rotary_dim=16),
    "1.3B": PhiArgs(**_1_5, rotary_dim=32),  # Phi 1 and 1.5
    "2.7B": PhiArgs(**_1_5 | dict(dim=2560, n_layers=32, head_dim=80, ffn_dim=10240), rotary_dim=32),  # Phi 2
}


def _to_hf(args: PhiArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' PhiConfig."""
    fields = {"hidden_act": GELU[0], "qk_layernorm": args.qk_norm, "resid_pdrop": args.residual_dropout}
    return layer_norm_config(args, dtype, "Phi") | fields


def _from_hf(config: Mapping[str, Any]) -> PhiArgs:
    if config.get("hidden_act", GELU[0]) not in GELU:
        raise JobError(f"hidden_act = {config['hidden_act']!r}, but this model only has {GELU[0]!r}")
    check_supported({"embd_pdrop": read_number(config, "embd_pdrop", 0.0)}, {"embd_pdrop": 0.0})
    return PhiArgs(
        **layer_norm_sizes(config, 2048, 0.5),
        qk_norm=read_flag(config, "qk_layernorm", False),
        residual_dropout=read_number(config, "resid_pdrop", 0.0),
    )


CONFIG = ConfigConverter(
    model_types=("phi",),
    to_hf=_to_hf,
    from_hf=_from_hf,
    not_compared=(*NOT_IN_FORWARD, "residual_dropout"),
    keys=config_keys(KEYS | {"qk_layernorm", "resid_pdrop", "embd_pdrop"}),
)


FAMILY = Family(sizes=PHI, config=CONFIG, spec="torchtitan.models.phi.model:SPEC", publisher="microsoft")
