"""Mistral 4 (text): arguments, published sizes, and conversion from and to config.json (Mistral4Config).

It is DeepSeek V2's model with queries that grow with their position, and normalized routing weights. No torch here, so
`torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.models.deepseek import CONFIG as DEEPSEEK_CONFIG
from torchtitan.models.deepseek import USED, DeepseekArgs, YarnScaling
from torchtitan.models.family import Family
from torchtitan.models.hf.config import check_numbers, check_supported, read_flag, read_number, split_partial_rotary
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.mistral import GROWTH, LENGTH, split_growth
from torchtitan.models.moe import check_exported
from torchtitan.models.sizes import check_not_negative, check_positive


@dataclass(frozen=True, kw_only=True)
class Mistral4Args(DeepseekArgs):
    n_dense_layers: int = 0
    q_lora_rank: int = 1024
    kv_lora_rank: int = 256
    qk_nope_head_dim: int = 64
    n_shared_experts: int = 1
    normalize_top_k: bool = True
    rope_scaling: YarnScaling | None = YarnScaling(factor=128.0, original_max_seq_len=8192)
    query_growth: float = 0.1  # queries grow by this times ln(1 + number of periods before them)
    query_period: int = 8192  # number of positions
    max_seq_len: int = 1048576
    may_be_zero = (*DeepseekArgs.may_be_zero, "query_growth")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "query_period")
        check_not_negative(self, "query_growth")
        if self.n_mtp_layers:
            raise JobError(f"n_mtp_layers = {self.n_mtp_layers}: Mistral 4 has no multi-token prediction; write 0")


MISTRAL4 = {
    "debugmodel": Mistral4Args(
        dim=256,
        n_layers=6,
        n_heads=8,
        vocab_size=2048,
        ffn_dim=1024,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=48,
        expert_dim=256,
        n_experts=8,
        top_k=3,
        rope_scaling=YarnScaling(factor=2.0, original_max_seq_len=8192),
        max_seq_len=16384,
    ),
    "Small-119B": Mistral4Args(
        dim=4096, n_layers=36, n_heads=32, vocab_size=131072, ffn_dim=12288, expert_dim=2048, n_experts=128, top_k=4
    ),
}
ABSENT: dict[str, Any] = {"vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 12288, "n_group": 1}
ABSENT |= {"moe_intermediate_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 32}
ABSENT |= {"n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0, "kv_lora_rank": 256}
ABSENT |= {"q_lora_rank": 1024, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 64, "topk_group": 1}
ABSENT |= {"num_experts_per_tok": 4, "first_k_dense_replace": 0, "max_position_embeddings": 1048576}
ABSENT |= {"rms_norm_eps": 1e-6}
"""transformers' values of keys that a config leaves out."""
TABLE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, LENGTH: 8192, "mscale_all_dim": 1.0}
TABLE |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, GROWTH: 0.1}
"""transformers' rotary positions, where a config has none."""
UNUSED = {"moe_layer_freq", "scoring_func", "topk_method", "seq_aux", "aux_loss_alpha", "num_nextn_predict_layers"}
"""Keys of DeepSeek's models that Mistral 4 lacks."""
MOVED = {"rope_theta", "rope_scaling"}
ONLY: dict[str, Any] = {"score": "softmax", "expert_bias": False, "score_before_experts": False}


def _to_hf(args: Mistral4Args, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Mistral4Config. Raises JobError for what it does not support."""
    groups = {"group_score": "top2"} if args.n_groups > 1 else {}
    check_exported(args, ONLY | groups, "Mistral 4", shares=True)
    config = DEEPSEEK_CONFIG.to_hf(replace(args, normalize_top_k=False, group_score="max"), dtype)
    if args.rope_scaling is None:
        raise JobError("rope_scaling is not set: transformers' Mistral 4 has YaRN always")
    if args.query_growth and args.query_period != (length := args.rope_scaling.original_max_seq_len):
        raise JobError(f"query_period = {args.query_period}: transformers' Mistral 4 only has {length}")
    rope = {"rope_theta": args.rope_theta, GROWTH: args.query_growth}
    rope |= {"partial_rotary_factor": args.qk_rope_head_dim / args.qk_head_dim}
    return {key: value for key, value in config.items() if key not in UNUSED | MOVED} | {
        "architectures": ["Mistral4ForCausalLM"],
        "model_type": "mistral4",
        "norm_topk_prob": args.normalize_top_k,
        "rope_interleave": True,
        "rope_parameters": config["rope_scaling"] | rope,
    }


def _from_hf(config: Mapping[str, Any]) -> Mistral4Args:
    heads = read_number(config, "num_attention_heads", 32)
    for name, default in ABSENT.items():
        read_number(config, name, default, null={"q_lora_rank": 0, "num_key_value_heads": heads}.get(name))
    if all(config.get(name) is None for name in ("rope_parameters", "rope_scaling")):
        config = {**config, "rope_parameters": TABLE}
    config, growth = split_growth(ABSENT | config)
    numbers = ("hidden_size", "num_attention_heads", "n_group", "topk_group", "qk_rope_head_dim", "qk_nope_head_dim")
    check_numbers(config, numbers)
    check_supported(config, {"rope_interleave": True})
    width = config["qk_rope_head_dim"] + config["qk_nope_head_dim"]
    # transformers makes rotary positions for heads as wide as this key says
    if (head_dim := read_number(config, "head_dim", width, null=config["hidden_size"] // heads)) != width:
        raise JobError(f"head_dim = {head_dim}; allowed: qk_nope_head_dim + qk_rope_head_dim = {width}; leave it out")
    rotated = config["qk_rope_head_dim"] / width
    config, rotary_factor = split_partial_rotary(config, rotated)
    check_supported({"partial_rotary_factor": rotary_factor}, {"partial_rotary_factor": rotated})
    normalize_top_k = read_flag(config, "norm_topk_prob", True)
    plain = {key: value for key, value in config.items() if key not in ("norm_topk_prob", "rope_interleave")}
    sizes = vars(DEEPSEEK_CONFIG.from_hf(plain | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"}))
    if sizes["rope_scaling"] is None:
        raise JobError("rope_parameters has rope_type 'default'; allowed: 'yarn', which transformers' Mistral 4 needs")
    groups = {"group_score": "top2"} if sizes["n_groups"] > 1 else {}
    return Mistral4Args(**sizes | groups | growth | {"normalize_top_k": normalize_top_k})


CONFIG = replace(
    DEEPSEEK_CONFIG,
    model_types=("mistral4",),
    to_hf=_to_hf,
    from_hf=_from_hf,
    keys=config_keys(DECODER_KEYS | {*USED, "partial_rotary_factor", "head_dim"} - UNUSED, harmless=("qk_head_dim",)),
    aliases={"num_local_experts": "n_routed_experts"},
)


FAMILY = Family(sizes=MISTRAL4, config=CONFIG, spec="torchtitan.models.mistral4.model:SPEC", publisher="mistralai")
