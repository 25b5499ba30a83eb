"""GLM 4.7 Flash: published sizes, and conversion from and to config.json (Glm4MoeLiteConfig).

It is DeepSeek V3's model under another model type. No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.models.deepseek import CONFIG as DEEPSEEK_CONFIG
from torchtitan.models.deepseek import DEEPSEEK, USED, V3, DeepseekArgs
from torchtitan.models.family import Family
from torchtitan.models.hf.config import check_numbers, check_supported, read_flag, read_number, split_partial_rotary
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.moe import check_exported

_plain: dict[str, Any] = dict(rope_scaling=None, rope_theta=1000000.0, norm_eps=1e-5, n_shared_experts=1)
GLM4_MOE_LITE = {
    "debugmodel": replace(DEEPSEEK["debugmodel"], **_plain, q_lora_rank=96, v_head_dim=48, bias_rate=0.001),
    "30B-A3B": DeepseekArgs(
        **_plain | V3 | dict(group_score="max", normalize_top_k=True),
        dim=2048,
        n_layers=47,
        n_heads=20,
        vocab_size=154880,
        ffn_dim=10240,
        q_lora_rank=768,
        qk_nope_head_dim=192,
        v_head_dim=256,
        expert_dim=1536,
        n_experts=64,
        top_k=4,
        route_scale=1.8,
        max_seq_len=202752,
    ),
}
ABSENT: dict[str, Any] = {"num_key_value_heads": 20, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8}
ABSENT |= {"q_lora_rank": 768, "rms_norm_eps": 1e-5, "max_position_embeddings": 202752}
"""transformers' values of keys that a config leaves out, where DeepSeek V3's are others."""


def _to_hf(args: DeepseekArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Glm4MoeLiteConfig. Raises JobError for routing that it does not support."""
    check_exported(args, {"score": "sigmoid"}, "GLM 4.7 Flash")
    return DEEPSEEK_CONFIG.to_hf(args, dtype) | {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "mlp_layer_types": _layer_types(args.n_dense_layers, args.n_layers),
    }


def _layer_types(dense: int, layers: int) -> list[str]:
    return ["dense"] * dense + ["sparse"] * (layers - dense)


def _from_hf(config: Mapping[str, Any]) -> DeepseekArgs:
    check_numbers(config, ("num_hidden_layers", "num_attention_heads"))
    for name, default in ABSENT.items():  # of which DeepSeek's may be null
        read_number(config, name, default, null=0 if name == "q_lora_rank" else None)
    config, rotary_factor = split_partial_rotary(ABSENT | config, 1.0)
    check_supported({"partial_rotary_factor": rotary_factor}, {"partial_rotary_factor": 1.0})
    check_numbers(config, ("n_group", "topk_group"))
    read_flag(config, "norm_topk_prob", True)
    types, layers = config.pop("mlp_layer_types", None), config["num_hidden_layers"]
    dense = types.count("dense") if isinstance(types, list) else 1
    if types is not None and types != _layer_types(dense, layers):
        raise JobError(f"mlp_layer_types = {types!r}; allowed: {layers} entries, 'dense' for the first, then 'sparse'")
    first = "first_k_dense_replace"
    if (stated := read_number(config, first, dense)) != dense:  # other programs read this key, transformers the types
        raise JobError(f"{first} = {stated}, but mlp_layer_types or its default has {dense}; correct the wrong one")
    return DEEPSEEK_CONFIG.from_hf(config | {"model_type": "deepseek_v3", first: dense})


KEYS = config_keys(
    DECODER_KEYS | {*USED, "mlp_layer_types", "partial_rotary_factor"}, harmless=("ep_size", "seq_aux", "qk_head_dim")
)
CONFIG = replace(
    DEEPSEEK_CONFIG,
    model_types=("glm4_moe_lite",),
    to_hf=_to_hf,
    from_hf=_from_hf,
    keys=KEYS,
    aliases={"num_local_experts": "n_routed_experts"},
)


FAMILY = Family(
    sizes=GLM4_MOE_LITE, config=CONFIG, spec="torchtitan.models.glm4_moe_lite.model:SPEC", publisher="zai-org"
)
