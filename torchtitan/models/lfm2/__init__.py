"""LFM 2: arguments, published sizes, and conversion from and to config.json (Lfm2Config, Lfm2MoeConfig).

Most layers have a short convolution in place of attention. No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import (
    decoder_config,
    decoder_sizes,
    read_flag,
    read_number,
    rotary_config,
    scaling_from_hf,
)
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.hf.layer_kinds import FULL, read_pattern
from torchtitan.models.moe import DenseFirstArgs, GroupedMoEArgs, check_exported
from torchtitan.models.sizes import DEBUG, GatedArgs, LayerPattern, Names, Sizes, check_positive

SHORT: Names = tuple(f"attention.short_{part}" for part in ("b", "c", "x", "out"))
CONVOLUTION = "attention.conv_short"


@dataclass(frozen=True, kw_only=True)
class ShortConvArgs(LayerPattern):
    """Sizes of LFM 2. Layers with a "C" in `layer_pattern` have a short convolution in place of attention."""

    n_kv_heads: int = 8
    head_dim: int = 64
    vocab_size: int = 65536
    norm_eps: float = 1e-5
    rope_theta: float = 1000000.0
    max_seq_len: int = 128000
    tied_embeddings: bool = True
    conv_taps: int = 3  # tokens that a convolution sees
    conv_bias: bool = False  # of convolutions, and of the matrices around them

    STATE: ClassVar = "C"
    LETTERS: ClassVar = "*C"
    qk_norm: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "conv_taps")

    @property
    def biases(self) -> Names:
        return SHORT if self.conv_bias else ()

    def attention_linears(self, layer: int) -> Sizes:
        short = dict.fromkeys(SHORT, (self.dim, self.dim))
        return short if self.has_state(layer) else super().attention_linears(layer)

    def other_sizes(self, layer: int) -> dict[str, int]:
        taps = {f"{CONVOLUTION}.weight": self.dim * self.conv_taps}
        taps |= {f"{CONVOLUTION}.bias": self.dim} if self.conv_bias else {}
        return super().other_sizes(layer) | (taps if self.has_state(layer) else {})


@dataclass(frozen=True, kw_only=True)
class Lfm2Args(ShortConvArgs, GatedArgs):
    """Sizes of LFM 2 without experts."""


@dataclass(frozen=True, kw_only=True)
class Lfm2MoEArgs(ShortConvArgs, GroupedMoEArgs, DenseFirstArgs):
    """Sizes of LFM 2 with experts."""

    n_dense_layers: int = 2
    normalize_top_k: bool = True
    expert_bias: bool = True
    score: ClassVar = "sigmoid"
    weight_eps: ClassVar = 1e-6


_pattern = "CC*CC*CC*C*C*C*C"
_experts = {name: size for name, size in DEBUG.items()} | dict(expert_dim=128, n_experts=8, top_k=2)
LFM2 = {
    "debugmodel": Lfm2Args(**DEBUG, layer_pattern="CC*"),
    "350M": Lfm2Args(dim=1024, n_layers=16, n_heads=16, ffn_dim=4608, layer_pattern=_pattern),
    "700M": Lfm2Args(dim=1536, n_layers=16, n_heads=24, ffn_dim=6912, layer_pattern=_pattern),
    "1.2B": Lfm2Args(dim=2048, n_layers=16, n_heads=32, ffn_dim=8192, layer_pattern=_pattern),
}
LFM2_MOE = {
    "debugmodel": Lfm2MoEArgs(**_experts, layer_pattern="CC*"),
    "8B-A1B": Lfm2MoEArgs(
        **dict(dim=2048, n_layers=24, n_heads=32, ffn_dim=7168, expert_dim=1792, n_experts=32, top_k=4),
        layer_pattern="CC*CCC*CCC*CCC*CCC*CC*CC",
    ),
}
KINDS = {"C": "conv", "*": FULL}
"""Letters of `layer_pattern`, and transformers' names of these layers."""
EXPERT_SIZES = {
    "expert_dim": ("moe_intermediate_size", 1792),
    "n_experts": ("num_experts", 32),
    "top_k": ("num_experts_per_tok", 4),
    "n_dense_layers": ("num_dense_layers", 2),
    "route_scale": ("routed_scaling_factor", 1.0),
}
EXPERT_FLAGS = {"normalize_top_k": ("norm_topk_prob", True), "expert_bias": ("use_expert_bias", True)}
"""Names here and in config.json, and transformers' values where it leaves them out."""
_NO_FIELDS = ("rms_norm_eps", "hidden_act", "attention_bias")


def _config(args: Lfm2Args | Lfm2MoEArgs, dtype: Any) -> dict[str, Any]:
    """Return the fields that both families share."""
    fields = decoder_config(args, dtype) | rotary_config(args)
    return {key: value for key, value in fields.items() if key not in _NO_FIELDS} | {
        "head_dim": args.head_dim,
        "norm_eps": args.norm_eps,
        "intermediate_size": args.ffn_dim,
        "layer_types": [KINDS[letter] for letter in args.letters],
        "conv_L_cache": args.conv_taps,
        "conv_bias": args.conv_bias,
    }


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that `_config` writes, without the pattern of layers."""
    sizes = decoder_sizes(config, 128000, "intermediate_size", theta=1000000.0)
    return sizes | {
        "rope_scaling": scaling_from_hf(config),
        "n_kv_heads": read_number(config, "num_key_value_heads", 8),
        "head_dim": read_number(config, "head_dim", sizes["dim"] // sizes["n_heads"]),
        "ffn_dim": config["intermediate_size"],
        "norm_eps": read_number(config, "norm_eps", 1e-5),
        "tied_embeddings": config.get("tie_word_embeddings", True),
        "conv_taps": read_number(config, "conv_L_cache", 3),
        "conv_bias": read_flag(config, "conv_bias", False),
    }


def _to_hf(args: Lfm2Args, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Lfm2Config."""
    fields = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_auto_adjust_ff_dim": False}
    return _config(args, dtype) | fields


def _from_hf(config: Mapping[str, Any]) -> Lfm2Args:
    sizes = _sizes(config)
    layers = range(sizes["n_layers"])
    if config.get("layer_types") is None:
        attending = config.get("full_attn_idxs")
        attending = list(layers) if attending is None else attending
        if not isinstance(attending, list) or any(type(layer) is not int or layer not in layers for layer in attending):
            raise JobError(f"full_attn_idxs = {attending!r}; allowed: null or a list of layers, from 0 to {layers[-1]}")
        pattern = "".join("*" if layer in attending else "C" for layer in layers)
    else:
        pattern = read_pattern(config, len(layers), KINDS)
    return Lfm2Args(**sizes | {"ffn_dim": _adjusted(sizes["ffn_dim"], config)}, layer_pattern=pattern)


def _adjusted(width: int, config: Mapping[str, Any]) -> int:
    """Return the width of feed-forwards, that by default is 2/3 of the config's, rounded up."""
    multiple = read_number(config, "block_multiple_of", 256)
    factor = read_number(config, "block_ffn_dim_multiplier", 1.0)
    if not read_flag(config, "block_auto_adjust_ff_dim", True):
        return width
    if multiple < 1:
        raise JobError(f"block_multiple_of = {multiple}; allowed: at least 1")
    return multiple * -(-int(factor * int(2 * width / 3)) // multiple)


def _moe_to_hf(args: Lfm2MoEArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Lfm2MoeConfig. Raises JobError for unsupported routing."""
    check_exported(args, {"n_groups": 1, "n_shared_experts": 0, "score_before_experts": False}, "LFM 2")
    fields = {"architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe"}
    fields |= {key: getattr(args, name) for name, (key, _) in (EXPERT_SIZES | EXPERT_FLAGS).items()}
    return _config(args, dtype) | fields


def _moe_from_hf(config: Mapping[str, Any]) -> Lfm2MoEArgs:
    sizes = _sizes(config)
    sizes |= {name: read_number(config, key, default) for name, (key, default) in EXPERT_SIZES.items()}
    sizes |= {name: read_flag(config, key, default) for name, (key, default) in EXPERT_FLAGS.items()}
    sizes["n_dense_layers"] = min(sizes["n_dense_layers"], sizes["n_layers"])
    return Lfm2MoEArgs(**sizes, layer_pattern=read_pattern(config, sizes["n_layers"], KINDS))


_KEYS = DECODER_KEYS - {*_NO_FIELDS} | {"norm_eps", "head_dim", "conv_L_cache", "conv_bias", "layer_types"}
_ADJUSTED = {"block_auto_adjust_ff_dim", "block_multiple_of", "block_ffn_dim_multiplier", "full_attn_idxs"}
# of initial values, and second names that transformers does not read
_OTHERS = ("block_use_xavier_init", "block_mlp_init_scale", "block_out_init_scale", "conv_use_xavier_init", "num_heads")
_OTHERS += ("block_dim", "block_norm_eps", "conv_dim", "conv_dim_out", "theta")
_ALIASES = {"tie_embedding": "tie_word_embeddings"}
CONFIG = ConfigConverter(
    model_types=("lfm2",),
    to_hf=_to_hf,
    from_hf=_from_hf,
    keys=config_keys(_KEYS | _ADJUSTED, harmless=_OTHERS, defaults={"use_pos_enc": True, "block_use_swiglu": True}),
    aliases=_ALIASES | {"block_ff_dim": "intermediate_size"},
)
MOE_CONFIG = ConfigConverter(
    model_types=("lfm2_moe",),
    to_hf=_moe_to_hf,
    from_hf=_moe_from_hf,
    keys=config_keys(
        _KEYS | {key for key, _ in (EXPERT_SIZES | EXPERT_FLAGS).values()}, defaults={"use_pos_enc": True}
    ),
    aliases=_ALIASES,
)


_SPECS = "torchtitan.models.lfm2.model"
LFMS = {
    "lfm2": Family(sizes=LFM2, config=CONFIG, spec=f"{_SPECS}:SPEC", publisher="LiquidAI"),
    "lfm2_moe": Family(sizes=LFM2_MOE, config=MOE_CONFIG, spec=f"{_SPECS}:MOE_SPEC", publisher="LiquidAI"),
}
