"""llama.cpp's computation of the model types that are exported, and what a config.json must say for it to be the same.

Each was compared with transformers by the log-probabilities of random weights (xllamacpp 2026.10).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.models.hf.layer_kinds import FULL, SLIDING, every_nth
from torchtitan.plugins.gguf.layouts import (
    Layout,
    adjacent_pairs,
    afmoe,
    centered_norms,
    delta_net,
    falcon_h1,
    gemma4,
    gpt2,
    gpt_oss,
    granite_hybrid,
    joint_by_head,
    latent,
    llama4,
    plain,
    short_convolution,
    stacked_latent,
    stacked_norms,
)

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Architecture:
    """llama.cpp's computation of a model type of transformers.

    `parts`: what becomes of a tensor of the folder (layouts.py). `only`: keys of config.json and the one value that it
    has; `only_by`: the same, if that follows from other keys. `fields`: further metadata, names of the writer's `add_`
    functions, and their keys of config.json; `fields_of`: the same, with values that follow from keys. `scalings`:
    kinds of rotary scaling, of which YaRN's factor of rotated features is 1 with rope_scaling_yarn_log_mul, else the
    usual one. `window`: what becomes of sliding_window, metadata ("field"), the longest context, or nothing. `aliases`:
    usual keys, and those that stand for them here.
    """

    name: str
    parts: Layout = plain
    only: Config = field(default_factory=dict)
    only_by: Callable[[Config], Config] = lambda config: {}
    fields: Mapping[str, str] = field(default_factory=dict)
    scalings: tuple[str, ...] = ()
    window: Literal["", "field", "context"] = ""
    fields_of: Callable[[Config], Config] = lambda config: {}
    aliases: Mapping[str, str] = field(default_factory=dict)


def head_dim_of(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _query_scale(config: Config, wide: int) -> Config:
    """Return the only scale of queries of a Gemma, where those of `wide` layers, the largest, have another."""
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {"query_pre_attn_scalar": per_head if config["num_hidden_layers"] == wide else head_dim_of(config)}


def _gemma2(config: Config) -> Config:
    return _query_scale(config, 46) | {"layer_types": every_nth(config["num_hidden_layers"], 2)}


def _gemma3(config: Config) -> Config:
    return _query_scale(config, 62) | {"layer_types": every_nth(config["num_hidden_layers"], 6)}


def _olmo3(config: Config) -> Config:
    return {"layer_types": every_nth(config["num_hidden_layers"], 4)}


def _smollm3(config: Config) -> Config:
    return {"no_rope_layers": every_nth(config["num_hidden_layers"], 4, 0, 1)}


_NO_BIASES = {"attention_bias": False, "mlp_bias": False}
_UNTIED = {"tie_word_embeddings": False}
"""Of models of which llama.cpp demands a head."""
_NO_WINDOW = {"use_sliding_window": False}
_CAPS = {f"{name}_logit_softcapping": f"{name}_logit_softcapping" for name in ("attn", "final")}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_EXPERT_WIDTH = {"expert_feed_forward_length": "moe_intermediate_size"}
_SHARED_WIDTH = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_GRANITE = {"attention_scale": "attention_multiplier", "embedding_scale": "embedding_multiplier"}
_GRANITE |= {"residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}
_GLM = _EXPERTS | _EXPERT_WIDTH | {"expert_count": "n_routed_experts", "expert_shared_count": "n_shared_experts"}
_GLM |= {"leading_dense_block_count": "first_k_dense_replace", "expert_weights_scale": "routed_scaling_factor"}
_GLM |= {"expert_weights_norm": "norm_topk_prob"}
_GPT_OSS = _EXPERTS | {"expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size"}
_LATENT = _GLM | {"kv_lora_rank": "kv_lora_rank", "value_length": "kv_lora_rank"}
_LATENT |= {"rope_dimension_count": "qk_rope_head_dim", "value_length_mla": "v_head_dim"}


def _only_deepseek(config: Config) -> Config:
    """Return what llama.cpp demands: queries of V2-Lite alone are not compressed, and groups are those of V3.

    Its YaRN has one factor, and was not the same with equal betas (Kimi K2).
    """
    only: dict[str, Any] = {} if config["q_lora_rank"] else {"num_hidden_layers": 27}
    for key in ("rope_scaling", "rope_parameters"):
        if rope := config.get(key):
            fast = 32.0 if rope["beta_fast"] == rope["beta_slow"] else rope["beta_fast"]
            only[key] = rope | {"mscale": rope["mscale_all_dim"], "beta_fast": fast}
    only["num_nextn_predict_layers"] = 0
    return only | ({"n_group": 1} if config["model_type"] == "deepseek_v2" else {})


def _deepseek(config: Config) -> Config:
    """Return the sizes of keys, which are computed from one latent vector for all heads, and YaRN's factor."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rotary = config["qk_rope_head_dim"]
    fields = {"head_count_kv": 1, "key_length": config["kv_lora_rank"] + rotary}
    fields["key_length_mla"] = config["qk_nope_head_dim"] + rotary
    fields |= {"q_lora_rank": config["q_lora_rank"]} if config["q_lora_rank"] else {}
    if config["n_group"] > 1:
        fields |= {"expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"]}
    return fields | ({"rope_scaling_yarn_log_mul": 0.1 * rope["mscale_all_dim"]} if rope else {})


def _ministral(config: Config) -> Config:
    """Return the growth of queries, whose period is the length before the scaling, with or without YaRN."""
    rope = config["rope_parameters"]
    fields = {"attn_temperature_scale": rope["llama_4_scaling_beta"]}
    fields["rope_scaling_orig_ctx_len"] = rope["original_max_position_embeddings"]
    return fields | ({"rope_scaling_yarn_log_mul": 1.0} if rope["rope_type"] == "yarn" else {})


_DELTA = {"ssm_conv_kernel": "linear_conv_kernel_dim", "ssm_state_size": "linear_key_head_dim"}
_DELTA |= {"ssm_group_count": "linear_num_key_heads", "ssm_time_step_rank": "linear_num_value_heads"}
_DELTA_EXPERTS = _DELTA | _EXPERTS | _EXPERT_WIDTH | _SHARED_WIDTH
_SSM = {"ssm_conv_kernel": "mamba_d_conv", "ssm_state_size": "mamba_d_state", "ssm_inner_size": "mamba_d_ssm"}
_FALCON = dict.fromkeys(("mamba_norm_before_gate", "mamba_proj_bias", "projectors_bias"), False)
_FALCON |= {"mamba_conv_bias": True}
_SSM |= {"ssm_group_count": "mamba_n_groups", "ssm_time_step_rank": "mamba_n_heads"}


def _falcon_h1(config: Config) -> Config:
    """Factors are in the weights, so that one matrix cannot have those of the embedding and of the head."""
    alike = config["embedding_multiplier"] == config["lm_head_multiplier"]
    return {} if alike else {"tie_word_embeddings": False}


_LAYER_NORM, _LOGITS = {"layer_norm_eps": "layer_norm_eps"}, {"logit_scale": "logit_scale"}
_PARALLEL = {"parallel_residual": "use_parallel_residual"}
_LFM2 = {"layer_norm_rms_eps": "norm_eps", "shortconv_l_cache": "conv_L_cache"}
_LFM2_EXPERTS = _LFM2 | _EXPERTS | _EXPERT_WIDTH | {"leading_dense_block_count": "num_dense_layers"}
_GRANITE_STATE = {"ssm_conv_kernel": "mamba_d_conv", "ssm_state_size": "mamba_d_state"}
_GRANITE_STATE |= {"ssm_group_count": "mamba_n_groups", "ssm_time_step_rank": "mamba_n_heads"}
_GRANITE_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_GPT_NEOX = {"num_key_value_heads": "num_attention_heads", "rope_theta": "rotary_emb_base"}
_GPT_NEOX |= {"partial_rotary_factor": "rotary_pct"}
_ROTARY_FALCON = {"alibi": False, "bias": False, "parallel_attn": True}
_FALCON_KEYS = {"num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"}
_EPSILON = {"layer_norm_eps": "layer_norm_epsilon"}
_GPT2 = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
_GPT2 |= {"num_key_value_heads": "n_head", "max_position_embeddings": "n_positions"}


def _gpt2(config: Config) -> Config:
    return {"feed_forward_length": config.get("n_inner") or 4 * config["n_embd"]}


def _key_heads(config: Config) -> Config:
    """Return the key heads of each layer; none where it has a state in place of attention."""
    attends = [kind == FULL for kind in config["layer_types"]]
    return {"head_count_kv": [config["num_key_value_heads"] * attention for attention in attends]}


def _sigmoid(config: Config) -> Config:
    import gguf

    return {"expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID}


def _lfm2_moe(config: Config) -> Config:
    return _key_heads(config) | _sigmoid(config)


def _afmoe(config: Config) -> Config:
    return {"layer_types": every_nth(config["num_hidden_layers"], 4)}


_LLAMA4: dict[str, Any] = {"attention_bias": False, "attn_temperature_tuning": True, "attn_scale": 0.1}
_LLAMA4 |= {"floor_scale": 8192, "attention_chunk_size": 8192}


def _llama4(config: Config) -> Config:
    positions = every_nth(config["num_hidden_layers"], 4, 0, 1)
    return {"no_rope_layers": positions, "use_qk_norm": config["num_local_experts"] != 128}


def _gemma4(config: Config) -> Config:
    """Return the sizes and positions of the layers with a window, and of those without, and of experts."""
    windows = [kind == SLIDING for kind in config["layer_types"]]
    wide, narrow = config["global_head_dim"], config["head_dim"]
    heads = {True: config["num_key_value_heads"], False: config["num_global_key_value_heads"]}
    fields: dict[str, Any] = {"sliding_window_pattern": windows, "head_count_kv": [heads[window] for window in windows]}
    fields |= dict.fromkeys(("key_length", "value_length", "rope_dimension_count"), wide)
    fields |= dict.fromkeys(("key_length_swa", "value_length_swa", "rope_dimension_count_swa"), narrow)
    fields |= {"rope_freq_base_swa": config["rope_parameters"][SLIDING]["rope_theta"]}
    fields |= {"embedding_length_per_layer_input": 0, "shared_kv_layers": 0}
    fields |= {"final_logit_softcapping": config["final_logit_softcapping"] or 0.0}  # without one it is 30
    names = _EXPERT_WIDTH | {"expert_count": "num_experts", "expert_used_count": "top_k_experts"}
    return fields | ({name: config[key] for name, key in names.items()} if config["enable_moe_block"] else {})


def _mistral4(config: Config) -> Config:
    """Return the growth of queries and the kind of scores too."""
    import gguf

    rope = config["rope_parameters"]
    fields = {"attn_temperature_scale": rope["llama_4_scaling_beta"]}
    fields |= {"attn_temperature_length": rope["original_max_position_embeddings"]}
    return _deepseek(config) | fields | {"expert_gating_func": gguf.ExpertGatingFuncType.SOFTMAX}


_MINIMAX = _GPT_OSS | {"rope_dimension_count": "rotary_dim"}
_AFMOE = _EXPERTS | _EXPERT_WIDTH | {"expert_shared_count": "num_shared_experts"}
_AFMOE |= {"leading_dense_block_count": "num_dense_layers", "expert_weights_scale": "route_scale"}


def _granite4(config: Config) -> Config:
    """Return whether attention is rotated, and the width of the feed-forward that all tokens have."""
    fields = {"rope_scaling_finetuned": config["position_embedding_type"] == "rope"}
    if config["num_local_experts"] > 0:
        fields["expert_shared_feed_forward_length"] = config["shared_intermediate_size"]
    else:
        fields["feed_forward_length"] = config["shared_intermediate_size"]
    return fields


def _granite_hybrid(config: Config) -> Config:
    """Return the sizes of the state too."""
    return _key_heads(config) | _granite4(config) | {"ssm_inner_size": config["mamba_n_heads"] * config["mamba_d_head"]}


def _delta_net(config: Config) -> Config:
    fields = {"ssm_inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"]}
    fields["full_attention_interval"] = config["full_attention_interval"]
    is_joint = config["model_type"] == "qwen3_next"
    return fields | ({} if is_joint else {"rope_dimension_sections": [11, 11, 10, 0]})


ARCHITECTURES = {
    "llama": Architecture("llama", parts=adjacent_pairs, only=_NO_BIASES, scalings=("llama3", "yarn")),
    "mistral": Architecture("llama", parts=adjacent_pairs, scalings=("llama3",), window="context"),
    "mixtral": Architecture(
        "llama", parts=adjacent_pairs, fields=_EXPERTS | {"expert_count": "num_local_experts"}, window="context"
    ),
    "qwen2": Architecture("qwen2", only=_NO_WINDOW, scalings=("yarn",)),
    "qwen2_moe": Architecture(
        "qwen2moe",
        only=_NO_WINDOW | _UNTIED | {"norm_topk_prob": False, "mlp_only_layers": [], "qkv_bias": True},
        fields=_EXPERTS | _EXPERT_WIDTH | _SHARED_WIDTH,
    ),
    "qwen3": Architecture("qwen3", only=_NO_WINDOW, scalings=("yarn",)),
    "qwen3_moe": Architecture(
        "qwen3moe",
        only=_NO_WINDOW | {"norm_topk_prob": True, "mlp_only_layers": []},
        fields=_EXPERTS | _EXPERT_WIDTH,
    ),
    "gemma2": Architecture("gemma2", only_by=_gemma2, fields=_CAPS, window="field", parts=centered_norms),
    "gemma3_text": Architecture(
        "gemma3",
        only={"rope_local_base_freq": 10000.0},
        only_by=_gemma3,
        scalings=("linear",),
        window="field",
        parts=centered_norms,
    ),
    "phi3": Architecture("phi3", window="context"),
    "olmo2": Architecture("olmo2", only=_NO_BIASES | _UNTIED),
    "olmo3": Architecture("olmo2", only=_NO_BIASES | _UNTIED, only_by=_olmo3, window="field"),
    "granite": Architecture("granite", parts=adjacent_pairs, only=_NO_BIASES, fields=_GRANITE),
    "smollm3": Architecture("smollm3", parts=adjacent_pairs, only=_NO_BIASES | _NO_WINDOW, only_by=_smollm3),
    "seed_oss": Architecture("seed_oss", only={"attention_out_bias": False, "mlp_bias": False}),
    "glm": Architecture("chatglm"),
    "glm4": Architecture("glm4"),
    "gpt_oss": Architecture(
        "gpt-oss",
        parts=gpt_oss,
        only_by=lambda config: {"layer_types": every_nth(config["num_hidden_layers"], 2)},
        only=_UNTIED | {"attention_bias": True, "swiglu_limit": 7.0},
        fields=_GPT_OSS,
        scalings=("yarn",),
        window="field",
    ),
    **{
        model_type: Architecture(
            "deepseek2",
            parts=latent,
            only_by=_only_deepseek,
            fields=_LATENT,
            fields_of=_deepseek,
            scalings=("yarn",),
        )
        for model_type in ("deepseek_v2", "deepseek_v3", "kimi_k2")
    },
    "qwen3_next": Architecture(
        "qwen3next",
        parts=delta_net,
        only={"norm_topk_prob": True},
        fields=_DELTA_EXPERTS,
        fields_of=_delta_net,
    ),
    "qwen3_5_text": Architecture("qwen35", parts=delta_net, fields=_DELTA, fields_of=_delta_net),
    "qwen3_5_moe_text": Architecture("qwen35moe", parts=delta_net, fields=_DELTA_EXPERTS, fields_of=_delta_net),
    "falcon_h1": Architecture("falcon-h1", parts=falcon_h1, only=_NO_BIASES | _FALCON, only_by=_falcon_h1, fields=_SSM),
    "gpt2": Architecture("gpt2", parts=gpt2, fields=_EPSILON, fields_of=_gpt2, aliases=_GPT2),
    "ministral3": Architecture(
        "mistral3", parts=adjacent_pairs, fields_of=_ministral, scalings=("yarn",), window="context"
    ),
    "glm4_moe": Architecture("glm4moe", only={"n_group": 1, "topk_group": 1}, fields=_GLM),
    "gemma": Architecture("gemma", only=_NO_BIASES, parts=centered_norms),
    "arcee": Architecture("arcee", only=_NO_BIASES, parts=adjacent_pairs, scalings=("yarn",)),
    "starcoder2": Architecture(
        "starcoder2", only={"use_bias": True}, fields={"layer_norm_eps": "norm_epsilon"}, window="context"
    ),
    "stablelm": Architecture("stablelm", only=_UNTIED, fields=_LAYER_NORM | _PARALLEL, parts=stacked_norms),
    "phi": Architecture("phi2", only=_UNTIED | {"qk_layernorm": False}, fields=_LAYER_NORM),
    "gpt_neox": Architecture(
        "gptneox",
        parts=joint_by_head,
        only=_UNTIED | {"attention_bias": True},
        fields=_LAYER_NORM | _PARALLEL,
        aliases=_GPT_NEOX,
    ),
    "falcon": Architecture("falcon", parts=joint_by_head, only=_ROTARY_FALCON, fields=_EPSILON, aliases=_FALCON_KEYS),
    "cohere": Architecture("command-r", only=_NO_BIASES, fields=_LAYER_NORM | _LOGITS),
    "cohere2": Architecture(
        "cohere2",
        only=_NO_BIASES,
        only_by=lambda config: {"layer_types": every_nth(config["num_hidden_layers"], 4)},
        fields=_LAYER_NORM | _LOGITS,
        window="field",
    ),
    "nemotron": Architecture(
        "nemotron", only=_NO_BIASES | _UNTIED, fields={"layer_norm_eps": "norm_eps"}, parts=centered_norms
    ),
    "lfm2": Architecture(
        "lfm2", parts=short_convolution, only={"conv_bias": False}, fields=_LFM2, fields_of=_key_heads
    ),
    "lfm2_moe": Architecture(
        "lfm2moe",
        parts=short_convolution,
        only={"conv_bias": False, "norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0},
        fields=_LFM2_EXPERTS,
        fields_of=_lfm2_moe,
    ),
    "granitemoehybrid": Architecture(
        "granitehybrid",
        parts=granite_hybrid,
        only={"attention_bias": False, "mamba_proj_bias": False, "mamba_conv_bias": True},
        fields=_GRANITE | _GRANITE_STATE | _GRANITE_EXPERTS,
        fields_of=_granite_hybrid,
    ),
    "hunyuan_v1_dense": Architecture("hunyuan-dense", only=_NO_BIASES, scalings=("ntk",)),
    "minimax_m2": Architecture("minimax-m2", only=_UNTIED, fields=_MINIMAX, fields_of=_sigmoid),
    "afmoe": Architecture(
        "afmoe",
        parts=afmoe,
        only={"attention_bias": False, "mup_enabled": True},
        only_by=_afmoe,
        fields=_AFMOE,
        fields_of=lambda config: {"expert_weights_norm": True},
        window="field",
    ),
    "llama4_text": Architecture(
        "llama4",
        parts=llama4,
        only=_LLAMA4,
        only_by=_llama4,
        fields=_GPT_OSS | {"interleave_moe_layer_step": "interleave_moe_layer_step"},
        scalings=("llama3",),
        fields_of=lambda config: {"feed_forward_length": config["intermediate_size_mlp"]},
    ),
    "mistral4": Architecture(
        "mistral4",
        parts=stacked_latent,
        only_by=_only_deepseek,
        fields=_LATENT | {"q_lora_rank": "q_lora_rank"},
        fields_of=_mistral4,
        scalings=("yarn",),
    ),
    "gemma4_text": Architecture("gemma4", parts=gemma4, fields_of=_gemma4, window="field"),
}
"""By model_type of config.json."""


def architecture_of(config: Config) -> Architecture | None:
    """Return llama.cpp's computation of a config; None for one that it is not compared with.

    Granite 4 without a layer with a state is Granite 3 there, which has no state.
    """
    architecture = ARCHITECTURES.get(config["model_type"])
    if config["model_type"] != "granitemoehybrid" or any(kind != FULL for kind in config["layer_types"]):
        return architecture
    has_experts, only = config["num_local_experts"] > 0, dict[str, Any](attention_bias=False)
    return Architecture(
        "granitemoe" if has_experts else "granite",
        parts=granite_hybrid,
        only=only | ({"position_embedding_type": "rope"} if has_experts else {}),
        fields=_GRANITE | _GRANITE_EXPERTS,
        fields_of=_granite4,
    )
