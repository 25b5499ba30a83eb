"""MiniMax M2: arguments, published sizes, and conversion from and to config.json (MiniMaxM2Config).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torchtitan.core.errors import JobError
from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import (
    check_numbers,
    check_supported,
    decoder_config,
    decoder_sizes,
    read_number,
    rotary_config,
    scaling_from_hf,
    split_partial_rotary,
)
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.hf.layer_kinds import partial_rotary_factor
from torchtitan.models.moe import GroupedMoEArgs, check_exported
from torchtitan.models.sizes import check_rotary_dim


@dataclass(frozen=True, kw_only=True)
class MiniMaxM2Args(GroupedMoEArgs):
    """Arguments of MiniMax M2."""

    vocab_size: int = 200064
    n_kv_heads: int = 8
    rotary_dim: int = 64  # features of a head that are rotated
    rope_theta: float = 5000000.0
    max_seq_len: int = 196608
    score: Literal["softmax", "sigmoid"] = "sigmoid"
    normalize_top_k: bool = True
    expert_bias: bool = True
    qk_norm: ClassVar = True
    qk_norm_over_heads: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rotary_dim(self)


_debug: dict[str, Any] = dict(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, head_dim=32, vocab_size=2048)
MINIMAX_M2 = {
    "debugmodel": MiniMaxM2Args(**_debug, rotary_dim=16, expert_dim=256, n_experts=8, top_k=2),
    "230B-A10B": MiniMaxM2Args(dim=3072, n_layers=62, n_heads=48, expert_dim=1536, n_experts=256, top_k=8),
}
SIZE_KEYS = {"expert_dim": "intermediate_size", "n_experts": "num_local_experts", "top_k": "num_experts_per_tok"}
"""Sizes that every config.json has."""
ROUTING = {"score": "sigmoid", "n_groups": 1, "route_scale": 1.0, "expert_bias": True, "score_before_experts": False}
ROUTING |= {"normalize_top_k": True, "n_shared_experts": 0}


def _to_hf(args: MiniMaxM2Args, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' MiniMaxM2Config. Raises JobError for unsupported routing."""
    check_exported(args, ROUTING, "MiniMax M2")
    config = decoder_config(args, dtype) | rotary_config(args)
    del config["attention_bias"]  # no field of MiniMaxM2Config
    return config | {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "head_dim": args.head_dim,
        "rotary_dim": args.rotary_dim,
        "partial_rotary_factor": partial_rotary_factor(args),
        **{key: getattr(args, name) for name, key in SIZE_KEYS.items()},
    }


def _from_hf(config: Mapping[str, Any]) -> MiniMaxM2Args:
    softmax_attention = [1] * read_number(config, "num_hidden_layers", 62)
    check_supported(config, {"hidden_act": "silu", "router_jitter_noise": 0.0, "attn_type_list": softmax_attention})
    head_dim = read_number(config, "head_dim", 128)
    check_numbers({"head_dim": head_dim}, ["head_dim"])
    width = read_number(config, "rotary_dim", head_dim, null=head_dim)
    config, rotary_factor = split_partial_rotary(config, width / head_dim)
    rotary_dim = width if rotary_factor == width / head_dim else int(head_dim * rotary_factor)
    if config.get("rotary_dim") is not None and width != rotary_dim:
        raise JobError(f"rotary_dim = {width}, but partial_rotary_factor makes it {rotary_dim}; remove the wrong one")
    return MiniMaxM2Args(
        **decoder_sizes(config, 196608, *SIZE_KEYS.values(), theta=5000000.0),
        **{name: config[key] for name, key in SIZE_KEYS.items()},
        rope_scaling=scaling_from_hf(config),
        n_kv_heads=read_number(config, "num_key_value_heads", 8),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
    )


USED = (*SIZE_KEYS.values(), "head_dim", "rotary_dim", "partial_rotary_factor", "router_jitter_noise", "attn_type_list")
ONLY = {"attention_bias": False, "use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid"}
ONLY |= {"use_routing_bias": True, "shared_intermediate_size": 0, "sliding_window": None}
ONLY |= {f"layernorm_{part}_beta": 1.0 for part in ("full_attention", "linear_attention", "mlp")}
# depths of multi-token prediction are not read, as by transformers; the others are of models with other layers too
NOT_COMPUTED = ("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "mlp_intermediate_size", "shared_moe_mode")
CONFIG = ConfigConverter(
    model_types=("minimax_m2",),
    to_hf=_to_hf,
    from_hf=_from_hf,
    keys=config_keys(DECODER_KEYS - {"attention_bias"} | {*USED}, harmless=NOT_COMPUTED, defaults=ONLY),
    aliases={"num_experts": "num_local_experts"},
)


FAMILY = Family(sizes=MINIMAX_M2, config=CONFIG, spec="torchtitan.models.minimax_m2.model:SPEC", publisher="MiniMaxAI")
