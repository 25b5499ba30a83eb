"""Mixtral: arguments, published sizes, and conversion from and to config.json (MixtralConfig).

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
    read_window,
    rotary_config,
    scaling_from_hf,
)
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.moe import PLAIN_SOFTMAX, GroupedMoEArgs, check_exported


@dataclass(frozen=True, kw_only=True)
class MixtralArgs(GroupedMoEArgs):
    """Arguments of Mixtral."""

    vocab_size: int = 32000
    norm_eps: float = 1e-5
    normalize_top_k: bool = True
    max_seq_len: int = 32768
    sliding_window: int = 0  # number of tokens that a token attends to, with itself; 0: all before it
    may_be_zero: ClassVar = (*GroupedMoEArgs.may_be_zero, "sliding_window")
    mean_aux_loss: ClassVar = True


def _mixtral(**sizes: Any) -> MixtralArgs:
    return MixtralArgs(**{"n_kv_heads": 8, "n_experts": 8, "top_k": 2} | sizes)


_debug: dict[str, Any] = dict(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, head_dim=32, vocab_size=2048)
MIXTRAL = {
    "debugmodel": _mixtral(**_debug, expert_dim=256, aux_loss_weight=0.02),
    "8x7B": _mixtral(dim=4096, n_layers=32, n_heads=32, expert_dim=14336, aux_loss_weight=0.02),
    "8x22B": _mixtral(dim=6144, n_layers=56, n_heads=48, expert_dim=16384, aux_loss_weight=0.001, max_seq_len=65536),
}


def _to_hf(args: MixtralArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' MixtralConfig. Raises JobError for unsupported routing."""
    check_exported(args, {**PLAIN_SOFTMAX, "normalize_top_k": True, "n_shared_experts": 0}, "Mixtral")
    config = decoder_config(args, dtype) | rotary_config(args)
    del config["attention_bias"]  # no field of MixtralConfig
    return config | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "head_dim": args.head_dim,
        "intermediate_size": args.expert_dim,
        "num_local_experts": args.n_experts,
        "num_experts_per_tok": args.top_k,
        "router_aux_loss_coef": args.aux_loss_weight,
        "sliding_window": args.sliding_window or None,
    }


def _from_hf(config: Mapping[str, Any]) -> MixtralArgs:
    check_supported(config, {"hidden_act": "silu", "router_jitter_noise": 0.0})
    numbers = ("intermediate_size", "num_local_experts", "num_experts_per_tok")
    sizes = decoder_sizes(config, 131072, *numbers, theta=1000000.0, norm_eps=1e-5)
    heads = sizes["n_heads"]
    head_dim = sizes["dim"] // heads
    return MixtralArgs(
        **sizes,
        rope_scaling=scaling_from_hf(config),
        n_kv_heads=read_number(config, "num_key_value_heads", 8, null=heads),
        head_dim=read_number(config, "head_dim", head_dim, null=head_dim),
        expert_dim=config["intermediate_size"],
        n_experts=config["num_local_experts"],
        top_k=config["num_experts_per_tok"],
        aux_loss_weight=read_number(config, "router_aux_loss_coef", 0.001),
        sliding_window=read_window(config, 0),
    )


USED = ("head_dim", "num_local_experts", "num_experts_per_tok", "router_aux_loss_coef", "router_jitter_noise")
KEYS = config_keys(DECODER_KEYS - {"attention_bias"} | {*USED, "sliding_window"}, defaults={"attention_bias": False})
CONFIG = ConfigConverter(
    model_types=("mixtral",), to_hf=_to_hf, from_hf=_from_hf, keys=KEYS, aliases={"num_experts": "num_local_experts"}
)


FAMILY = Family(sizes=MIXTRAL, config=CONFIG, spec="torchtitan.models.mixtral.model:SPEC", publisher="mistralai")
