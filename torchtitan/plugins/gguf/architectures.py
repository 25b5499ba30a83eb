"""llama.cpp's computation of the model types that are exported, and what a config.json must say for it to be the same.

Each was compared with transformers by the greedy text of random weights (xllamacpp 2026.10). No torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.models.hf.layer_kinds import every_nth

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Architecture:
    """llama.cpp's computation of a model type of transformers.

    `adjacent_pairs`: it rotates features 2i and 2i + 1, and transformers i and i + head_dim / 2. `only`: keys of
    config.json and the one value that it has; `only_by`: the same, if that follows from other keys. `fields`: further
    metadata, names of the writer's `add_` functions, and their keys of config.json. `scalings`: kinds of rotary
    scaling. `window`: what becomes of sliding_window, metadata ("field"), the longest context, or nothing.
    `centered_norms`: the folder's weights of norms are differences from 1.
    """

    name: str
    adjacent_pairs: bool = False
    only: Config = field(default_factory=dict)
    only_by: Callable[[Config], Config] = lambda config: {}
    fields: Mapping[str, str] = field(default_factory=dict)
    scalings: tuple[str, ...] = ()
    window: Literal["", "field", "context"] = ""
    centered_norms: bool = False


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
ARCHITECTURES = {
    "llama": Architecture("llama", adjacent_pairs=True, only=_NO_BIASES, scalings=("llama3",)),
    "mistral": Architecture("llama", adjacent_pairs=True, scalings=("llama3",), window="context"),
    "mixtral": Architecture(
        "llama", adjacent_pairs=True, fields=_EXPERTS | {"expert_count": "num_local_experts"}, window="context"
    ),
    "qwen2": Architecture("qwen2", only=_NO_WINDOW),
    "qwen2_moe": Architecture(
        "qwen2moe",
        only=_NO_WINDOW | {"norm_topk_prob": False, "mlp_only_layers": [], "qkv_bias": True},
        fields=_EXPERTS | _EXPERT_WIDTH | _SHARED_WIDTH,
    ),
    "qwen3": Architecture("qwen3", only=_NO_WINDOW),
    "qwen3_moe": Architecture(
        "qwen3moe",
        only=_NO_WINDOW | {"norm_topk_prob": True, "mlp_only_layers": []},
        fields=_EXPERTS | _EXPERT_WIDTH,
    ),
    "gemma2": Architecture("gemma2", only_by=_gemma2, fields=_CAPS, window="field", centered_norms=True),
    "gemma3_text": Architecture(
        "gemma3",
        only={"rope_local_base_freq": 10000.0},
        only_by=_gemma3,
        scalings=("linear",),
        window="field",
        centered_norms=True,
    ),
    "phi3": Architecture("phi3", window="context"),
    "olmo2": Architecture("olmo2", only=_NO_BIASES),
    "olmo3": Architecture("olmo2", only=_NO_BIASES, only_by=_olmo3, window="field"),
    "granite": Architecture("granite", adjacent_pairs=True, only=_NO_BIASES, fields=_GRANITE),
    "smollm3": Architecture("smollm3", adjacent_pairs=True, only=_NO_BIASES | _NO_WINDOW, only_by=_smollm3),
    "glm4": Architecture("glm4"),
    "glm4_moe": Architecture("glm4moe", only={"n_group": 1, "topk_group": 1}, fields=_GLM),
}
"""By model_type of config.json."""
