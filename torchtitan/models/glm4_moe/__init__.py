"""GLM 4.5 and later with experts: arguments, published sizes, and conversion from and to config.json (Glm4MoeConfig).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import (
    check_supported,
    decoder_config,
    decoder_sizes,
    read_flag,
    read_number,
    rotary_config,
    scaling_from_hf,
    split_partial_rotary,
)
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.hf.layer_kinds import partial_rotary_factor
from torchtitan.models.moe import DenseFirstArgs, GroupedMoEArgs, check_exported
from torchtitan.models.sizes import QKV, Names, check_rotary_dim


@dataclass(frozen=True, kw_only=True)
class Glm4MoEArgs(GroupedMoEArgs, DenseFirstArgs):
    """Arguments of GLM 4 with experts, which are routed as DeepSeek V3's."""

    vocab_size: int = 151552
    norm_eps: float = 1e-5
    max_seq_len: int = 131072
    n_kv_heads: int = 8
    rotary_dim: int = 64  # features of a head that are rotated
    qkv_bias: bool = True
    qk_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rotary_dim(self)

    @property
    def biases(self) -> Names:
        return QKV if self.qkv_bias else ()


V3: dict[str, Any] = dict(score="sigmoid", normalize_top_k=True, expert_bias=True, n_shared_experts=1)


def _glm(**sizes: Any) -> Glm4MoEArgs:
    return Glm4MoEArgs(**V3 | sizes)


_debug: dict[str, Any] = dict(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, head_dim=32, vocab_size=2048)
GLM4_MOE = {
    "debugmodel": _glm(**_debug, rotary_dim=16, ffn_dim=768, expert_dim=256, n_experts=8, top_k=2),
    "106B-A12B": _glm(dim=4096, n_layers=46, n_heads=96, ffn_dim=10944, expert_dim=1408, n_experts=128, top_k=8),
    "355B-A32B": _glm(
        dim=5120,
        n_layers=92,
        n_dense_layers=3,
        n_heads=96,
        ffn_dim=12288,
        expert_dim=1536,
        n_experts=160,
        top_k=8,
        route_scale=2.5,
        qk_norm=True,
    ),
}
SIZE_KEYS = {
    "ffn_dim": "intermediate_size",
    "expert_dim": "moe_intermediate_size",
    "n_experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
}
"""Sizes that every config.json has."""
ABSENT: dict[str, tuple[str, Any]] = {
    "n_kv_heads": ("num_key_value_heads", 8),
    "n_shared_experts": ("n_shared_experts", 1),
    "route_scale": ("routed_scaling_factor", 1.0),
    "n_groups": ("n_group", 1),
    "top_groups": ("topk_group", 1),
    "n_dense_layers": ("first_k_dense_replace", 1),
}
"""Numbers, and transformers' values where a config.json leaves them out."""
FLAGS = {"normalize_top_k": ("norm_topk_prob", True), "qkv_bias": ("attention_bias", False)}
FLAGS |= {"qk_norm": ("use_qk_norm", False)}


def _to_hf(args: Glm4MoEArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Glm4MoeConfig. Raises JobError for unsupported routing."""
    supported = {"score": "sigmoid", "expert_bias": True, "score_before_experts": False}
    check_exported(args, supported | ({"group_score": "top2"} if args.n_groups > 1 else {}), "GLM 4", shares=True)
    names = SIZE_KEYS | {name: key for name, (key, _) in (ABSENT | FLAGS).items()}
    return (
        decoder_config(args, dtype)
        | rotary_config(args)
        | {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "head_dim": args.head_dim,
            "partial_rotary_factor": partial_rotary_factor(args),
            "num_nextn_predict_layers": 0,
            **{key: getattr(args, name) for name, key in names.items()},
        }
    )


def _from_hf(config: Mapping[str, Any]) -> Glm4MoEArgs:
    check_supported(config, {"hidden_act": "silu"})
    config, rotary_factor = split_partial_rotary(config, 0.5)
    sizes = decoder_sizes(config, 131072, *SIZE_KEYS.values(), norm_eps=1e-5)
    sizes |= {name: config[key] for name, key in SIZE_KEYS.items()}
    sizes |= {name: read_number(config, key, default) for name, (key, default) in ABSENT.items()}
    sizes |= {name: read_flag(config, key, default) for name, (key, default) in FLAGS.items()}
    sizes["n_dense_layers"] = min(sizes["n_dense_layers"], sizes["n_layers"])
    head_dim = read_number(config, "head_dim", sizes["dim"] // sizes["n_heads"])
    groups = {"group_score": "top2"} if sizes["n_groups"] > 1 else {}
    routing = V3 | groups | sizes
    rope = {"rope_scaling": scaling_from_hf(config), "rotary_dim": int(head_dim * rotary_factor)}
    return Glm4MoEArgs(**routing, **rope, head_dim=head_dim)


USED = (*SIZE_KEYS.values(), *(key for key, _ in (ABSENT | FLAGS).values()), "head_dim", "partial_rotary_factor")
# depths of multi-token prediction are not read, as by transformers; the last are of other programs
NOT_COMPUTED = ("num_nextn_predict_layers", "num_mtp_layers", "ep_size", "seq_aux")
KEYS = config_keys(DECODER_KEYS | {*USED}, harmless=NOT_COMPUTED)
ALIASES = {"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"}
CONFIG = ConfigConverter(model_types=("glm4_moe",), to_hf=_to_hf, from_hf=_from_hf, keys=KEYS, aliases=ALIASES)


FAMILY = Family(sizes=GLM4_MOE, config=CONFIG, spec="torchtitan.models.glm4_moe.model:SPEC", publisher="zai-org")
