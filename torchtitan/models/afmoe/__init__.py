"""Arcee's Trinity (AFMoE): arguments, sizes, and conversion from and to config.json (AfmoeConfig).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

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
from torchtitan.models.moe import DenseFirstArgs, GroupedMoEArgs, check_exported
from torchtitan.models.sizes import Rope, check_positive


@dataclass(frozen=True, kw_only=True)
class AfmoeArgs(GroupedMoEArgs, DenseFirstArgs):
    """Arguments of AFMoE, whose experts are routed as DeepSeek V3's.

    The last of each `global_interval` layers has neither a window nor rotary positions.
    """

    vocab_size: int = 200192
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_seq_len: int = 16384
    sliding_window: int = 1024  # number of tokens that a token of a layer with a window attends to, with itself
    global_interval: int = 4
    attention_bias: bool = False
    scaled_embeddings: bool = False  # by the square root of the width
    score: Literal["softmax", "sigmoid"] = "sigmoid"
    normalize_top_k: bool = True
    expert_bias: bool = True
    n_shared_experts: int = 1
    qk_norm: ClassVar = True
    norm_order: ClassVar = "sandwich"
    gate_matrix: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "sliding_window", "global_interval")

    @property
    def embedding_multiplier(self) -> float:
        return float(self.dim**0.5) if self.scaled_embeddings else 1.0

    def rope(self, layer: int) -> Rope | None:
        return None if self.is_global(layer) else super().rope(layer)


_debug: dict[str, Any] = dict(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, head_dim=32, vocab_size=2048)
AFMOE = {
    "debugmodel": AfmoeArgs(**_debug, ffn_dim=768, expert_dim=256, n_experts=8, top_k=2, sliding_window=64),
    # transformers' AfmoeConfig without arguments
    "19B": AfmoeArgs(
        dim=2048,
        n_layers=32,
        n_heads=16,
        n_kv_heads=16,
        ffn_dim=6144,
        expert_dim=1408,
        n_experts=64,
        top_k=6,
        n_shared_experts=2,
    ),
}
SIZE_KEYS = {"ffn_dim": "intermediate_size", "expert_dim": "moe_intermediate_size", "n_experts": "num_experts"}
SIZE_KEYS |= {"top_k": "num_experts_per_tok"}
"""Sizes that every config.json has."""
ABSENT: dict[str, Any] = {"n_shared_experts": ("num_shared_experts", 2), "n_dense_layers": ("num_dense_layers", 1)}
ABSENT |= {"head_dim": ("head_dim", 128), "route_scale": ("route_scale", 1.0)}
"""Numbers, and transformers' values where a config.json leaves them out."""
FLAGS = {"attention_bias": ("attention_bias", False), "scaled_embeddings": ("mup_enabled", False)}
ROUTING = {"score": "sigmoid", "n_groups": 1, "expert_bias": True, "score_before_experts": False}
INTERVAL = "global_attn_every_n_layers"


def _to_hf(args: AfmoeArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' AfmoeConfig. Raises JobError for unsupported routing."""
    check_exported(args, ROUTING | {"normalize_top_k": True}, "AFMoE", shares=True)
    names = SIZE_KEYS | {name: key for name, (key, _) in (ABSENT | FLAGS).items()}
    return (
        decoder_config(args, dtype)
        | rotary_config(args)
        | {
            "architectures": ["AfmoeForCausalLM"],
            "model_type": "afmoe",
            "sliding_window": args.sliding_window,
            INTERVAL: args.global_interval,
            "layer_types": every_nth(args.n_layers, args.global_interval),
            **{key: getattr(args, name) for name, key in names.items()},
        }
    )


def _from_hf(config: Mapping[str, Any]) -> AfmoeArgs:
    check_supported(config, {"hidden_act": "silu"})
    sizes = decoder_sizes(config, 16384, *SIZE_KEYS.values(), norm_eps=1e-5)
    sizes |= {name: config[key] for name, key in SIZE_KEYS.items()}
    sizes |= {name: read_number(config, key, default) for name, (key, default) in ABSENT.items()}
    sizes |= {name: read_flag(config, key, default) for name, (key, default) in FLAGS.items()}
    sizes["n_dense_layers"] = min(sizes["n_dense_layers"], sizes["n_layers"])
    heads = sizes["n_heads"]
    return AfmoeArgs(
        **sizes,
        rope_scaling=scaling_from_hf(config),
        n_kv_heads=read_number(config, "num_key_value_heads", heads, null=heads),
        sliding_window=read_window(config, 1024, nullable=False),
        global_interval=read_interval(config, sizes["n_layers"], "layer_types", INTERVAL, 4),
    )


USED = (*SIZE_KEYS.values(), *(key for key, _ in (ABSENT | FLAGS).values()), INTERVAL, "sliding_window", "layer_types")
ONLY = {"score_func": "sigmoid", "route_norm": True}
ONLY |= dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), 1)
CONFIG = ConfigConverter(
    model_types=("afmoe",),
    to_hf=_to_hf,
    from_hf=_from_hf,
    keys=config_keys(DECODER_KEYS | {*USED}, harmless=("load_balance_coeff", "use_grouped_mm"), defaults=ONLY),
    aliases={"num_local_experts": "num_experts"},
)


FAMILY = Family(sizes=AFMOE, config=CONFIG, spec="torchtitan.models.afmoe.model:SPEC", publisher="arcee-ai")
