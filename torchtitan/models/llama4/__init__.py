"""Llama 4 for text: arguments, published sizes, and conversion from and to config.json (Llama4TextConfig).

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
    rotary_config,
    scaling_from_hf,
)
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.hf.layer_kinds import CHUNKED, FULL, every_nth, read_interval
from torchtitan.models.moe import GroupedMoEArgs, check_exported
from torchtitan.models.sizes import Rope, RopeScaling, Sizes, check_positive, gated


@dataclass(frozen=True, kw_only=True)
class Llama4Args(GroupedMoEArgs):
    """Arguments of Llama 4.

    The last of each `no_rope_interval` layers has no rotary positions and attends to all tokens before it, others to
    those of its chunk of `chunk_size` tokens. The last of each `moe_interval` layers has experts, others a feed-forward
    of `ffn_dim`.
    """

    vocab_size: int = 202048
    norm_eps: float = 1e-5
    n_kv_heads: int = 8
    rope_theta: float = 500000.0
    max_seq_len: int = 131072
    ffn_dim: int = 16384
    chunk_size: int = 8192
    no_rope_interval: int = 4
    moe_interval: int = 1
    attention_bias: bool = False
    unit_heads: bool = True  # queries and keys of rotated layers are divided by their root mean square
    query_growth: float = 0.1  # in layers without rotary positions, as in GatedDecoderSizes
    query_period: int = 8192

    rotates_adjacent: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "ffn_dim", "chunk_size", "no_rope_interval", "moe_interval", "query_period")

    def rope(self, layer: int) -> Rope | None:
        return super().rope(layer) if (layer + 1) % self.no_rope_interval else None

    @property
    def n_global_layers(self) -> int:
        return self.n_layers // self.no_rope_interval

    @property
    def expert_layers(self) -> int:
        return self.n_layers // self.moe_interval

    def ffn_linears(self, layer: int) -> Sizes:
        has_experts = (layer + 1) % self.moe_interval == 0
        return super().ffn_linears(layer) if has_experts else gated("feed_forward", self.dim, self.ffn_dim)

    def _ffn_matrices(self, moe: int) -> int:
        dense = self.n_layers - self.expert_layers
        return dense * 3 * self.dim * self.ffn_dim + super()._ffn_matrices(moe)


ROUTING: dict[str, Any] = dict(score="sigmoid", score_before_experts=True, n_shared_experts=1)


def _llama4(**sizes: Any) -> Llama4Args:
    return Llama4Args(**ROUTING | dict(top_k=1) | sizes)


_debug: dict[str, Any] = dict(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, head_dim=32, vocab_size=2048)
_debug |= dict(ffn_dim=768, expert_dim=256, n_experts=8, moe_interval=2, chunk_size=128)
_17b: dict[str, Any] = dict(dim=5120, n_layers=48, n_heads=40, expert_dim=8192)
LLAMA4 = {
    "debugmodel": _llama4(**_debug),
    "scout": _llama4(**_17b, n_experts=16, rope_scaling=RopeScaling(16.0, 1.0, 1.0, 8192), max_seq_len=10485760),
    "maverick": _llama4(**_17b, n_experts=128, moe_interval=2, unit_heads=False, max_seq_len=1048576),
}
SIZE_KEYS = {
    "ffn_dim": ("intermediate_size_mlp", 16384),
    "n_experts": ("num_local_experts", 16),
    "top_k": ("num_experts_per_tok", 1),
    "chunk_size": ("attention_chunk_size", 8192),
    "query_period": ("floor_scale", 8192),
}
"""Numbers, and transformers' values where a config.json leaves them out."""


def _to_hf(args: Llama4Args, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Llama4TextConfig. Raises JobError for unsupported routing."""
    only = ROUTING | dict(normalize_top_k=False, n_groups=1, route_scale=1.0, expert_bias=False)
    check_exported(args, only, "Llama 4")
    return (
        decoder_config(args, dtype)
        | rotary_config(args)
        | {
            "architectures": ["Llama4ForCausalLM"],
            "model_type": "llama4_text",
            "head_dim": args.head_dim,
            "intermediate_size": args.expert_dim,
            "use_qk_norm": args.unit_heads,
            "attn_temperature_tuning": args.query_growth > 0,
            "attn_scale": args.query_growth or 0.1,
            "no_rope_layer_interval": args.no_rope_interval,
            "no_rope_layers": every_nth(args.n_layers, args.no_rope_interval, 0, 1),
            "layer_types": every_nth(args.n_layers, args.no_rope_interval, FULL, CHUNKED),
            "interleave_moe_layer_step": args.moe_interval,
            "moe_layers": _nth(args.n_layers, args.moe_interval),
            **{key: getattr(args, name) for name, (key, _) in SIZE_KEYS.items()},
        }
    )


def _nth(n_layers: int, interval: int) -> list[int]:
    return [*range(interval - 1, n_layers, interval)]


def _from_hf(config: Mapping[str, Any]) -> Llama4Args:
    check_supported(config, {"hidden_act": "silu"})
    sizes = decoder_sizes(config, 131072, "intermediate_size", theta=500000.0, norm_eps=1e-5)
    heads, head_dim = sizes["n_heads"], sizes["dim"] // sizes["n_heads"]
    sizes |= {name: read_number(config, key, default) for name, (key, default) in SIZE_KEYS.items()}
    args = Llama4Args(
        **ROUTING,
        **sizes,
        rope_scaling=scaling_from_hf(config),
        n_kv_heads=read_number(config, "num_key_value_heads", 8, null=heads),
        head_dim=read_number(config, "head_dim", 128, null=head_dim),
        expert_dim=config["intermediate_size"],
        attention_bias=read_flag(config, "attention_bias", False),
        unit_heads=read_flag(config, "use_qk_norm", True),
        query_growth=_growth(config),
        no_rope_interval=_no_rope_interval(config, sizes["n_layers"]),
        moe_interval=_moe_interval(config, sizes["n_layers"]),
    )
    kinds = every_nth(args.n_layers, args.no_rope_interval, FULL, CHUNKED)
    if config.get("layer_types") not in (None, kinds):
        raise JobError(
            f"layer_types = {config['layer_types']!r}; allowed: {CHUNKED!r} for layers with rotary positions and "
            f"{FULL!r} for those without: {kinds}"
        )
    return args


def _growth(config: Mapping[str, Any]) -> float:
    growth, key = read_number(config, "attn_scale", 0.1), "attn_temperature_tuning"
    if type(config.get(key)) is int:  # 4 in files of transformers 4.51, which takes any number but 0 for true
        config = {**config, key: config[key] != 0}
    return growth if read_flag(config, key, True) else 0.0


def _no_rope_interval(config: Mapping[str, Any], n_layers: int) -> int:
    key = "no_rope_layers"
    if config.get(key) == []:  # as in published files: transformers takes it for absent
        config = {**config, key: None}
    return read_interval(config, n_layers, key, "no_rope_layer_interval", 4, 0, 1)


def _moe_interval(config: Mapping[str, Any], n_layers: int) -> int:
    step, layers = read_number(config, "interleave_moe_layer_step", 1), config.get("moe_layers")
    if step < 1:
        raise JobError(f"interleave_moe_layer_step = {step}; allowed: at least 1")
    if layers is None or layers == _nth(n_layers, step):
        return step
    first = layers[0] if isinstance(layers, list) and layers else n_layers
    if type(first) is not int or first < 0 or layers != _nth(n_layers, first + 1):
        raise JobError(f"moe_layers = {layers!r}; allowed: the last of each n layers, such as [1, 3, 5], or none")
    return first + 1


USED = (*(key for key, _ in SIZE_KEYS.values()), "head_dim", "use_qk_norm", "attn_temperature_tuning", "attn_scale")
USED += ("no_rope_layers", "no_rope_layer_interval", "layer_types", "interleave_moe_layer_step", "moe_layers")
KEYS = config_keys(DECODER_KEYS | {*USED}, harmless=("for_llm_compressor",))
CONFIG = ConfigConverter(model_types=("llama4_text",), to_hf=_to_hf, from_hf=_from_hf, keys=KEYS)


FAMILY = Family(sizes=LLAMA4, config=CONFIG, spec="torchtitan.models.llama4.model:SPEC", publisher="meta-llama")
