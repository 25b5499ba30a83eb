"""Conversion of Qwen 3 MoE arguments from and to config.json (Qwen3MoeConfig), and the family. No torch."""

from collections.abc import Mapping
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.models.family import ConfigForm, Family
from torchtitan.models.hf.config import (
    check_only,
    decoder_config,
    decoder_sizes,
    number_of,
    rotary_config,
    scaling_from_hf,
)
from torchtitan.models.qwen3_moe import QWEN3_MOE, Qwen3MoEArgs


def _to_hf(args: Qwen3MoEArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Qwen3MoeConfig. Raises JobError for unsupported routing."""
    plain = {
        "score": "softmax",
        "n_groups": 1,
        "n_shared_experts": 0,
        "route_scale": 1.0,
        "expert_bias": False,
        "score_before_experts": False,
    }
    for name, supported in plain.items():
        if getattr(args, name) != supported:
            raise JobError(f"{name} = {getattr(args, name)!r}: transformers' Qwen 3 only has {supported!r}")
    qwen3_moe_fields = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": args.head_dim,
        "intermediate_size": args.expert_dim * args.top_k,  # of dense layers; there are none
        "moe_intermediate_size": args.expert_dim,
        "num_experts": args.n_experts,
        "num_experts_per_tok": args.top_k,
        "norm_topk_prob": args.normalize_top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "router_aux_loss_coef": args.aux_loss_weight,
    }
    return decoder_config(args, dtype) | rotary_config(args) | qwen3_moe_fields


def _from_hf(config: Mapping[str, Any]) -> Qwen3MoEArgs:
    n_experts = config.get("num_experts", config.get("num_local_experts"))  # transformers 4; 5
    numbers = ("num_key_value_heads", "moe_intermediate_size", "num_experts", "num_experts_per_tok")
    sizes = decoder_sizes(dict(config) | {"num_experts": n_experts}, 32768, *numbers)
    only = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, "decoder_sparse_step": 1}
    check_only(config, only | {"mlp_only_layers": []})
    width, heads = sizes["dim"], sizes["n_heads"]
    return Qwen3MoEArgs(
        **sizes,
        rope_scaling=scaling_from_hf(config),
        n_kv_heads=config["num_key_value_heads"],
        head_dim=number_of(config, "head_dim", width // heads, null=width // heads),
        expert_dim=config["moe_intermediate_size"],
        n_experts=n_experts,
        top_k=config["num_experts_per_tok"],
        normalize_top_k=config.get("norm_topk_prob", False),
        aux_loss_weight=number_of(config, "router_aux_loss_coef", 0.001),
    )


CONFIG = ConfigForm(model_types=("qwen3_moe",), to_hf=_to_hf, from_hf=_from_hf)


FAMILY = Family(sizes=QWEN3_MOE, config=CONFIG, spec="torchtitan.models.qwen3_moe.model:SPEC", home="Qwen")
