"""Qwen 3 with experts: arguments, published sizes, and conversion from and to config.json (Qwen3MoeConfig).

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
    rotary_config,
    scaling_from_hf,
)
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.hf.layer_kinds import read_windows, window_config
from torchtitan.models.moe import PLAIN_SOFTMAX, GroupedMoEArgs, check_exported


@dataclass(frozen=True, kw_only=True)
class Qwen3MoEArgs(GroupedMoEArgs):
    """Arguments of Qwen 3 with experts in all layers."""

    vocab_size: int = 151936
    max_seq_len: int = 40960
    sliding_window: int = 0  # number of tokens that a token attends to, with itself; 0: all before it
    may_be_zero: ClassVar = (*GroupedMoEArgs.may_be_zero, "sliding_window")
    qk_norm: ClassVar = True


def _qwen3(**sizes: object) -> Qwen3MoEArgs:
    return Qwen3MoEArgs(**{"n_experts": 128, "top_k": 8, "normalize_top_k": True, "aux_loss_weight": 0.001} | sizes)


QWEN3_MOE = {
    "debugmodel": _qwen3(
        dim=256,
        n_layers=6,
        n_heads=8,
        n_kv_heads=4,
        head_dim=32,
        vocab_size=2048,
        expert_dim=256,
        n_experts=8,
        top_k=3,
        aux_loss_weight=0.01,  # ten times the others': the 60 steps of qwen3_moe_debug.toml must suffice
    ),
    "30B-A3B": _qwen3(dim=2048, n_layers=48, n_heads=32, n_kv_heads=4, expert_dim=768),
    "235B-A22B": _qwen3(dim=4096, n_layers=94, n_heads=64, n_kv_heads=4, expert_dim=1536),
}


def qwen_config(args: GroupedMoEArgs, dtype: Any) -> dict[str, Any]:
    """Return the fields that Qwen 2 and 3 with experts share."""
    shared_fields = {
        "head_dim": args.head_dim,
        "intermediate_size": args.expert_dim * args.top_k,  # of dense layers; there are none
        "moe_intermediate_size": args.expert_dim,
        "num_experts": args.n_experts,
        "num_experts_per_tok": args.top_k,
        "norm_topk_prob": args.normalize_top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": args.aux_loss_weight,
    }
    return decoder_config(args, dtype) | rotary_config(args) | shared_fields | window_config(args)


def qwen_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that `qwen_config` writes."""
    numbers = ("num_key_value_heads", "moe_intermediate_size", "num_experts", "num_experts_per_tok")
    sizes = decoder_sizes(config, 32768, *numbers)
    only = {"hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": []}
    check_supported(config, only)
    read_number(config, "decoder_sparse_step", 1)  # transformers refuses null here
    return sizes | {
        "rope_scaling": scaling_from_hf(config),
        "n_kv_heads": config["num_key_value_heads"],
        "head_dim": read_number(config, "head_dim", sizes["dim"] // sizes["n_heads"]),
        "expert_dim": config["moe_intermediate_size"],
        "n_experts": config["num_experts"],
        "top_k": config["num_experts_per_tok"],
        "normalize_top_k": config.get("norm_topk_prob", False),
        "aux_loss_weight": read_number(config, "router_aux_loss_coef", 0.001),
    }


def _to_hf(args: Qwen3MoEArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Qwen3MoeConfig. Raises JobError for unsupported routing."""
    check_exported(args, {**PLAIN_SOFTMAX, "n_shared_experts": 0}, "Qwen 3")
    config = qwen_config(args, dtype) | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    config.pop("layer_types", None)  # no field of Qwen3MoeConfig: all layers are alike
    return config


def _from_hf(config: Mapping[str, Any]) -> Qwen3MoEArgs:
    check_supported(config, {"attention_bias": False})
    sizes = qwen_sizes(config)
    windows = read_windows(config, [True] * sizes["n_layers"])
    return Qwen3MoEArgs(**sizes, sliding_window=windows.get("sliding_window", 0))


USED = ("head_dim", "moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob", "mlp_only_layers")
USED += ("use_sliding_window", "sliding_window", "decoder_sparse_step", "router_aux_loss_coef")
# no layer is dense; the last is of other programs, for very long texts
NOT_COMPUTED = ("intermediate_size", "dual_chunk_attention_config")
KEYS = config_keys(
    DECODER_KEYS - {"intermediate_size"} | {*USED},
    harmless=(*NOT_COMPUTED, "max_window_layers"),
    defaults={"use_qk_norm": True},
)
ALIASES = {"num_local_experts": "num_experts"}  # transformers 5 writes the first, transformers 4 the second
CONFIG = ConfigConverter(model_types=("qwen3_moe",), to_hf=_to_hf, from_hf=_from_hf, keys=KEYS, aliases=ALIASES)


FAMILY = Family(sizes=QWEN3_MOE, config=CONFIG, spec="torchtitan.models.qwen3_moe.model:SPEC", publisher="Qwen")
