"""Conversion of DeepSeek arguments from and to config.json, and the family. No torch.

The version follows from the routing: softmax is V2, sigmoid with an expert bias V3.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.models.deepseek import DEEPSEEK, DeepseekArgs, YarnScaling
from torchtitan.models.family import NOT_COMPUTED_WITH, ConfigForm, Family
from torchtitan.models.hf.config import (
    check_numbers,
    check_only,
    decoder_config,
    number_of,
    rope_kind,
    rope_of,
    rope_theta,
)

V2 = {"score": "softmax", "normalize_top_k": False, "expert_bias": False, "group_score": "max"}
V3 = {"score": "sigmoid", "expert_bias": True, "group_score": "top2"}


def _to_hf(args: DeepseekArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' DeepseekV2Config or DeepseekV3Config.

    Raises JobError for routing that neither supports.
    """
    version = 3 if args.score == "sigmoid" else 2
    supported = (V3 if version == 3 else V2) | {"score_before_experts": False}
    if args.n_groups == 1:
        del supported["group_score"]
    for name, value in supported.items():
        if getattr(args, name) != value:
            setting = f"{name} = {getattr(args, name)!r} with score = {args.score!r}"
            raise JobError(f"{setting}: transformers' DeepSeek V{version} only has {value!r}")
    if args.n_shared_experts == 0:
        raise JobError("n_shared_experts = 0: transformers' DeepSeek models have at least 1")
    routing = {
        2: {"scoring_func": "softmax", "topk_method": "greedy" if args.n_groups == 1 else "group_limited_greedy"},
        3: {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True},
    }
    return decoder_config(args, dtype) | {
        "architectures": [f"DeepseekV{version}ForCausalLM"],
        "model_type": f"deepseek_v{version}",
        "intermediate_size": args.ffn_dim,
        "first_k_dense_replace": args.n_dense_layers,
        "moe_layer_freq": 1,
        "q_lora_rank": args.q_lora_rank or None,
        "kv_lora_rank": args.kv_lora_rank,
        "qk_nope_head_dim": args.qk_nope_head_dim,
        "qk_rope_head_dim": args.qk_rope_head_dim,
        "v_head_dim": args.v_head_dim,
        "moe_intermediate_size": args.expert_dim,
        "n_routed_experts": args.n_experts,
        "n_shared_experts": args.n_shared_experts,
        "num_experts_per_tok": args.top_k,
        "n_group": args.n_groups,
        "topk_group": args.top_groups,
        "norm_topk_prob": args.normalize_top_k,
        "routed_scaling_factor": args.route_scale,
        "aux_loss_alpha": args.aux_loss_weight,
        "seq_aux": True,
        "num_nextn_predict_layers": args.n_mtp_layers,
        "rope_scaling": _scaling_to_hf(args.rope_scaling),
        **routing[version],
    }


def _from_hf(config: Mapping[str, Any]) -> DeepseekArgs:
    version = 3 if config["model_type"] == "deepseek_v3" else 2
    numbers = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    numbers += ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "moe_intermediate_size")
    numbers += ("n_routed_experts", "n_shared_experts", "num_experts_per_tok")
    check_numbers(config, numbers)
    only = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "moe_layer_freq": 1}
    only |= {"num_key_value_heads": config["num_attention_heads"]}
    only |= {"norm_topk_prob": False, "scoring_func": "softmax"} if version == 2 else {}
    only |= {"rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"} if version == 3 else {}
    check_only(config, only)
    n_groups = number_of(config, "n_group", 1, null=1) or 1
    if version == 2 and config.get("topk_method", "greedy") == "greedy":
        n_groups = 1
    routing = {**(V3 if version == 3 else V2), "normalize_top_k": version == 3 and config.get("norm_topk_prob", True)}
    if n_groups == 1:
        del routing["group_score"]
    return DeepseekArgs(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_dense_layers=min(number_of(config, "first_k_dense_replace", 0), config["num_hidden_layers"]),
        n_heads=config["num_attention_heads"],
        vocab_size=config["vocab_size"],
        ffn_dim=config["intermediate_size"],
        q_lora_rank=number_of(config, "q_lora_rank", 0, null=0),
        kv_lora_rank=config["kv_lora_rank"],
        qk_nope_head_dim=config["qk_nope_head_dim"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        expert_dim=config["moe_intermediate_size"],
        n_experts=config["n_routed_experts"],
        n_shared_experts=config["n_shared_experts"],
        top_k=config["num_experts_per_tok"],
        n_groups=n_groups,
        top_groups=(number_of(config, "topk_group", 1, null=1) or 1) if n_groups > 1 else 1,
        route_scale=number_of(config, "routed_scaling_factor", 1.0),
        aux_loss_weight=number_of(config, "aux_loss_alpha", 0.0),
        norm_eps=number_of(config, "rms_norm_eps", 1e-6),
        rope_theta=rope_theta(config),
        rope_scaling=_scaling_from_hf(config),
        tied_embeddings=config.get("tie_word_embeddings", False),
        max_seq_len=number_of(config, "max_position_embeddings", 2048),
        n_mtp_layers=number_of(config, "num_nextn_predict_layers", 0, null=0),
        **routing,
    )


def _scaling_to_hf(scaling: YarnScaling | None) -> dict[str, Any] | None:
    return scaling and {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": scaling.factor,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "original_max_position_embeddings": scaling.original_max_seq_len,
        "mscale": scaling.mscale,
        "mscale_all_dim": scaling.mscale_all_dim,
    }


def _scaling_from_hf(config: Mapping[str, Any]) -> YarnScaling | None:
    rope = rope_of(config)
    if rope_kind(config) == "default":
        return None
    keys = ("factor", "original_max_position_embeddings")
    if rope_kind(config) != "yarn" or any(not rope.get(key) for key in keys):
        raise JobError(f"rotary scaling {dict(rope)}; allowed are none and type yarn with {', '.join(keys)}")
    check_only(rope, {"attention_factor": None, "truncate": True, "partial_rotary_factor": 1.0})
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if all_dim and not mscale:
        raise JobError(f"rotary scaling {dict(rope)}; with mscale_all_dim the model needs mscale")
    return YarnScaling(
        factor=float(rope["factor"]),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        original_max_seq_len=rope["original_max_position_embeddings"],
        # transformers multiplies turned features by mscale's factor as if it were 1, unless both are given
        mscale=float(mscale) if all_dim else 1.0,
        mscale_all_dim=float(all_dim or 0),
    )


def _as_held(args: DeepseekArgs, names: Mapping[str, str]) -> DeepseekArgs:
    """Drop depths of multi-token prediction with missing tensors: transformers writes their number, not the depths."""
    depths = [
        depth for depth in range(args.n_mtp_layers) if f"model.layers.{args.n_layers + depth}.enorm.weight" in names
    ]
    return dataclasses.replace(args, n_mtp_layers=len(depths))


CONFIG = ConfigForm(
    model_types=("deepseek_v2", "deepseek_v3"),
    to_hf=_to_hf,
    from_hf=_from_hf,
    not_compared=(*NOT_COMPUTED_WITH, "n_mtp_layers", "mtp_loss_weight"),
    as_held=_as_held,
)


FAMILY = Family(sizes=DEEPSEEK, config=CONFIG, spec="torchtitan.models.deepseek.model:SPEC", home="deepseek-ai")
