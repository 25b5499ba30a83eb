"""gpt-oss: arguments, published sizes, and conversion from and to config.json (GptOssConfig).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import (
    check_supported,
    decoder_config,
    decoder_sizes,
    read_flag,
    read_number,
    read_window,
    rotary_config,
    scaling_from_hf,
)
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.hf.layer_kinds import every_nth, read_interval
from torchtitan.models.hf.quantization import LINEAR_METHODS, MXFP4
from torchtitan.models.moe import PLAIN_SOFTMAX, GroupedMoEArgs, check_exported
from torchtitan.models.sizes import RopeScaling, check_positive

YARN = RopeScaling(32.0, original_max_seq_len=4096, kind="yarn", truncate=False)


@dataclass(frozen=True, kw_only=True)
class GptOssArgs(GroupedMoEArgs):
    """Arguments of gpt-oss. The last of each `global_interval` layers has no window."""

    vocab_size: int = 201088
    norm_eps: float = 1e-5
    n_kv_heads: int = 8
    head_dim: int = 64
    rope_theta: float = 150000.0
    rope_scaling: RopeScaling | None = YARN
    max_seq_len: int = 131072
    attention_bias: bool = True
    normalize_top_k: bool = True
    sliding_window: int = 128  # number of tokens that a token of a layer with a window attends to, with itself
    global_interval: int = 2
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702

    sinks: ClassVar = True
    moe_biases: ClassVar = True
    mean_aux_loss: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "sliding_window", "global_interval")
        for name in ("swiglu_limit", "swiglu_alpha"):
            if getattr(self, name) <= 0:
                raise JobError(f"{name} = {getattr(self, name)}: must be above 0")


def _gpt_oss(**sizes: Any) -> GptOssArgs:
    return GptOssArgs(**{"n_heads": 64, "top_k": 4} | sizes)


_debug: dict[str, Any] = dict(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, head_dim=32, vocab_size=2048)
GPT_OSS = {
    "debugmodel": _gpt_oss(**_debug, expert_dim=256, n_experts=8, top_k=2, sliding_window=64),
    "20B": _gpt_oss(dim=2880, n_layers=24, expert_dim=2880, n_experts=32),
    "120B": _gpt_oss(dim=2880, n_layers=36, expert_dim=2880, n_experts=128),
}
SIZE_KEYS = {"expert_dim": "intermediate_size", "n_experts": "num_local_experts", "top_k": "num_experts_per_tok"}
"""Sizes that every config.json has."""
GATE_KEYS = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}


def _to_hf(args: GptOssArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' GptOssConfig. Raises JobError for unsupported routing."""
    check_exported(args, {**PLAIN_SOFTMAX, "normalize_top_k": True, "n_shared_experts": 0}, "gpt-oss")
    config = decoder_config(args, dtype) | rotary_config(args)
    config |= {"rope_scaling": config["rope_scaling"] or {"rope_type": "default"}}  # null stands for YARN
    balance = {"router_aux_loss_coef": args.aux_loss_weight} if args.aux_loss_weight else {}
    return config | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": args.head_dim,
        "sliding_window": args.sliding_window,
        "layer_types": every_nth(args.n_layers, args.global_interval),
        "output_router_logits": args.aux_loss_weight > 0,
        **balance,
        **{key: getattr(args, name) for name, key in SIZE_KEYS.items()},
        **{name: getattr(args, name) for name in GATE_KEYS},
    }


def _from_hf(config: Mapping[str, Any]) -> GptOssArgs:
    check_supported(config, {"hidden_act": "silu"})
    if all(config.get(key) is None for key in ("rope_parameters", "rope_scaling")):
        config = {**config, "rope_parameters": _YARN_TABLE}
    sizes = decoder_sizes(config, 131072, *SIZE_KEYS.values(), theta=150000.0, norm_eps=1e-5)
    heads = sizes["n_heads"]
    weight = read_number(config, "router_aux_loss_coef", 0.001)
    return GptOssArgs(
        **sizes,
        **{name: config[key] for name, key in SIZE_KEYS.items()},
        **{name: read_number(config, name, default) for name, default in GATE_KEYS.items()},
        rope_scaling=scaling_from_hf(config),
        n_kv_heads=read_number(config, "num_key_value_heads", 8, null=heads),
        head_dim=read_number(config, "head_dim", 64, null=sizes["dim"] // heads),
        attention_bias=read_flag(config, "attention_bias", True),
        sliding_window=read_window(config, 128, nullable=False),
        global_interval=read_interval(config, sizes["n_layers"], "layer_types", "", 2),
        # a published coefficient is 0.9, which transformers does not use without the flag
        aux_loss_weight=weight if read_flag(config, "output_router_logits", False) else 0.0,
    )


_YARN_TABLE = {**rotary_config(GPT_OSS["20B"])["rope_scaling"]}
"""Scaling of a config.json without any."""
USED = (*SIZE_KEYS.values(), *GATE_KEYS, "head_dim", "sliding_window", "layer_types")
USED += ("router_aux_loss_coef", "output_router_logits")
CONFIG = ConfigConverter(
    model_types=("gpt_oss",),
    to_hf=_to_hf,
    from_hf=_from_hf,
    keys=config_keys(DECODER_KEYS | {*USED}),
    packed_methods=(*LINEAR_METHODS, MXFP4),
    aliases={
        "num_experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
        "initial_context_length": "original_max_position_embeddings",
    },
)


FAMILY = Family(sizes=GPT_OSS, config=CONFIG, spec="torchtitan.models.gpt_oss.model:SPEC", publisher="openai")
