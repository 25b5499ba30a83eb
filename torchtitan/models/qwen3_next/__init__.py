"""Qwen 3-Next and the text models of Qwen 3.5: arguments, published sizes, and conversion from and to config.json.

Most layers apply the gated delta rule (models/linear_attention.py); the last of each `full_interval` has gated
attention. No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import (
    check_numbers,
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
from torchtitan.models.hf.layer_kinds import every_nth, partial_rotary_factor, read_interval
from torchtitan.models.moe import PLAIN_SOFTMAX, GroupedMoEArgs, check_exported, number_of_shared_experts
from torchtitan.models.sizes import (
    DEBUG,
    NORMS,
    GatedArgs,
    GatedDecoderSizes,
    Rope,
    Sizes,
    check_positive,
    check_rotary_dim,
)


@dataclass(frozen=True, kw_only=True)
class DeltaNetArgs(GatedDecoderSizes):
    """Arguments of layers with the delta rule and of those with attention between them."""

    rotary_dim: int = 64  # features of a head that are rotated
    full_interval: int = 4  # the last of each so many layers has attention
    delta_key_heads: int = 16  # of queries and keys of the delta rule
    delta_value_heads: int = 32
    delta_key_dim: int = 128
    delta_value_dim: int = 128
    conv_taps: int = 4  # tokens that the convolution of queries, keys and values sees
    attention_gate: ClassVar = True
    qk_norm: ClassVar = True
    zero_centered: ClassVar = True
    joint_projections: ClassVar = False
    """True if the queries, keys, values and gates of a key head are rows of one matrix, as are its other numbers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "full_interval", *DELTA_SIZES)
        check_rotary_dim(self)
        if self.delta_value_heads % self.delta_key_heads:
            raise JobError(
                f"delta_value_heads = {self.delta_value_heads} with delta_key_heads = {self.delta_key_heads}: every "
                "key head serves the same number of value heads, so it must be a multiple"
            )

    def is_delta(self, layer: int) -> bool:
        """Return True if a layer applies the delta rule."""
        return (layer + 1) % self.full_interval > 0

    @property
    def n_state_layers(self) -> int:
        return sum(map(self.is_delta, range(self.n_layers)))

    def rope(self, layer: int) -> Rope | None:
        return None if self.is_delta(layer) else super().rope(layer)

    @property
    def delta_widths(self) -> dict[str, int]:
        """Width of a layer's queries, keys and values in all heads."""
        keys = self.delta_key_heads * self.delta_key_dim
        return {"q": keys, "k": keys, "v": self.delta_value_heads * self.delta_value_dim}

    def attention_linears(self, layer: int) -> Sizes:
        if not self.is_delta(layer):
            return super().attention_linears(layer)
        heads, widths = self.delta_value_heads, self.delta_widths
        widths |= {"z": widths["v"], "b": heads, "a": heads}
        if self.joint_projections:
            widths = {joint: sum(widths[part] for part in joint) for joint in ("qkvz", "ba")}
        inner = {f"attention.delta_{part}": (width, self.dim) for part, width in widths.items()}
        return inner | {"attention.delta_out": (self.dim, self.delta_widths["v"])}

    def other_sizes(self, layer: int) -> dict[str, int]:
        if not self.is_delta(layer):
            return super().other_sizes(layer)
        taps = {f"attention.conv_{part}.weight": width * self.conv_taps for part, width in self.delta_widths.items()}
        decay = dict.fromkeys(("attention.decay.log_rate", "attention.decay.step_bias"), self.delta_value_heads)
        return dict.fromkeys(NORMS, self.dim) | taps | decay | {"attention.delta_norm.weight": self.delta_value_dim}


@dataclass(frozen=True, kw_only=True)
class Qwen3NextArgs(DeltaNetArgs, GroupedMoEArgs):
    """Arguments of Qwen 3-Next, with experts in all layers."""

    n_kv_heads: int = 2
    head_dim: int = 256
    vocab_size: int = 151936
    rope_theta: float = 10000000.0
    max_seq_len: int = 262144
    n_shared_experts: int = 1  # as one feed-forward with a gate
    normalize_top_k: bool = True
    aux_loss_weight: float = 0.001
    joint_projections: ClassVar = True
    shared_gate: ClassVar = True
    mean_aux_loss: ClassVar = True


@dataclass(frozen=True, kw_only=True)
class Qwen35MoEArgs(Qwen3NextArgs):
    """Arguments of Qwen 3.5 with experts in all layers."""

    vocab_size: int = 248320
    joint_projections: ClassVar = False


@dataclass(frozen=True, kw_only=True)
class Qwen35Args(DeltaNetArgs, GatedArgs):
    """Arguments of Qwen 3.5 without experts."""

    n_kv_heads: int = 4
    head_dim: int = 256
    vocab_size: int = 248320
    norm_eps: float = 1e-6
    rope_theta: float = 10000000.0
    max_seq_len: int = 262144


DELTA_SIZES = {
    "delta_key_heads": ("linear_num_key_heads", 16),
    "delta_value_heads": ("linear_num_value_heads", 32),
    "delta_key_dim": ("linear_key_head_dim", 128),
    "delta_value_dim": ("linear_value_head_dim", 128),
    "conv_taps": ("linear_conv_kernel_dim", 4),
}
"""Numbers, and transformers' values where a config.json leaves them out."""
EXPERT_SIZES = {
    "expert_dim": ("moe_intermediate_size", 512),
    "n_experts": ("num_experts", 512),
    "top_k": ("num_experts_per_tok", 10),
    "aux_loss_weight": ("router_aux_loss_coef", 0.001),
}
QWEN3_5_EXPERT_SIZES = EXPERT_SIZES | {"n_experts": ("num_experts", 256), "top_k": ("num_experts_per_tok", 8)}
DELTA, FULL = "linear_attention", "full_attention"
"""transformers' names of the kinds of layers."""

_delta: dict[str, Any] = dict(delta_key_heads=4, delta_value_heads=8, delta_key_dim=32, delta_value_dim=32)
_debug: dict[str, Any] = DEBUG | _delta | dict(n_layers=8, rotary_dim=8)
_experts: dict[str, Any] = {name: size for name, size in _debug.items() if name != "ffn_dim"}
_experts |= dict(expert_dim=128, n_experts=8, top_k=2)
QWEN3_NEXT = {
    "debugmodel": Qwen3NextArgs(**_experts),
    "80B-A3B": Qwen3NextArgs(dim=2048, n_layers=48, n_heads=16, expert_dim=512, n_experts=512, top_k=10),
}
QWEN3_5 = {"debugmodel": Qwen35Args(**_debug)}
_large: dict[str, Any] = dict(n_heads=32, expert_dim=1024, delta_value_heads=64)
QWEN3_5_MOE = {
    "debugmodel": Qwen35MoEArgs(**_experts),
    "35B-A3B": Qwen35MoEArgs(dim=2048, n_layers=40, n_heads=16, expert_dim=512, n_experts=256, top_k=8),
    "122B-A10B": Qwen35MoEArgs(dim=3072, n_layers=48, n_experts=256, top_k=8, **_large),
    "397B-A17B": Qwen35MoEArgs(dim=4096, n_layers=60, n_experts=512, top_k=10, **_large),
}


def _delta_config(args: Any, dtype: Any) -> dict[str, Any]:
    """Return the fields that both families share."""
    return (
        decoder_config(args, dtype)
        | rotary_config(args)
        | {key: getattr(args, name) for name, (key, _) in DELTA_SIZES.items()}
        | {
            "head_dim": args.head_dim,
            "partial_rotary_factor": partial_rotary_factor(args),
            "full_attention_interval": args.full_interval,
            "layer_types": every_nth(args.n_layers, args.full_interval, FULL, DELTA),
        }
    )


def _delta_sizes(config: Mapping[str, Any], kv_heads: int, *needed: str) -> dict[str, Any]:
    """Return the arguments that `_delta_config` writes. `kv_heads`: transformers' default for an absent key."""
    check_supported(config, {"hidden_act": "silu", "attention_bias": False})
    config, factor = split_partial_rotary(config, 0.25)
    sizes = decoder_sizes(config, 32768, *needed)
    head_dim = read_number(config, "head_dim", 256)
    return sizes | {
        **{name: read_number(config, key, default) for name, (key, default) in DELTA_SIZES.items()},
        "n_kv_heads": read_number(config, "num_key_value_heads", kv_heads),
        "head_dim": head_dim,
        "rotary_dim": int(head_dim * factor),
        "rope_scaling": scaling_from_hf(config),
        "full_interval": read_interval(
            config, sizes["n_layers"], "layer_types", "full_attention_interval", 4, FULL, DELTA
        ),
    }


def _expert_config(args: Qwen3NextArgs, dtype: Any, only: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return the fields that families with experts share. Raises JobError for other routing than `only`."""
    check_exported(args, only, family, shares=True)
    sizes = {key: getattr(args, name) for name, (key, _) in EXPERT_SIZES.items()}
    width = {"shared_expert_intermediate_size": args.n_shared_experts * args.expert_dim}
    return _delta_config(args, dtype) | sizes | width


def _expert_sizes(config: Mapping[str, Any], names: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """Return the arguments that `_expert_config` writes. `names`: keys and defaults as in EXPERT_SIZES."""
    sizes = _delta_sizes(config, 2)
    sizes |= {name: read_number(config, key, default) for name, (key, default) in names.items()}
    key = "shared_expert_intermediate_size"
    width, size = read_number(config, key, 512), sizes["expert_dim"]
    return sizes | {"n_shared_experts": number_of_shared_experts(key, width, "moe_intermediate_size", size)}


def _next_to_hf(args: Qwen3NextArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Qwen3NextConfig. Raises JobError for unsupported routing."""
    return _expert_config(args, dtype, PLAIN_SOFTMAX, "Qwen 3-Next") | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "intermediate_size": args.expert_dim * args.top_k,  # of dense layers; there are none
        "norm_topk_prob": args.normalize_top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _next_from_hf(config: Mapping[str, Any]) -> Qwen3NextArgs:
    check_supported(config, {"decoder_sparse_step": 1, "mlp_only_layers": []}, nullable=("mlp_only_layers",))
    read_number(config, "decoder_sparse_step", 1)  # transformers refuses null here
    sizes = _expert_sizes(config, EXPERT_SIZES)
    return Qwen3NextArgs(**sizes, normalize_top_k=read_flag(config, "norm_topk_prob", True))


def _moe_to_hf(args: Qwen35MoEArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Qwen3_5MoeTextConfig. Raises JobError for unsupported routing."""
    return _expert_config(args, dtype, {**PLAIN_SOFTMAX, "normalize_top_k": True}, "Qwen 3.5") | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
    }


def _moe_from_hf(config: Mapping[str, Any]) -> Qwen35MoEArgs:
    return Qwen35MoEArgs(**_expert_sizes(_with_text_positions(config), QWEN3_5_EXPERT_SIZES))


def _dense_to_hf(args: Qwen35Args, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Qwen3_5TextConfig."""
    return _delta_config(args, dtype) | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "intermediate_size": args.ffn_dim,
    }


def _dense_from_hf(config: Mapping[str, Any]) -> Qwen35Args:
    check_numbers(config, ("intermediate_size",))
    return Qwen35Args(**_delta_sizes(_with_text_positions(config), 4), ffn_dim=config["intermediate_size"])


def _with_text_positions(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with one position for each token: those of a text are equal in time, height and width."""
    tables = {name: config[name] for name in ("rope_parameters", "rope_scaling") if isinstance(config.get(name), dict)}
    return dict(config) | {
        name: {key: value for key, value in table.items() if key not in IMAGE_ROPE_KEYS}
        for name, table in tables.items()
    }


IMAGE_ROPE_KEYS = ("mrope_section", "mrope_interleaved")
"""Keys of rotary positions with a height and a width."""
_USED = ("head_dim", "partial_rotary_factor", "full_attention_interval", "layer_types")
_USED += tuple(key for key, _ in DELTA_SIZES.values())
_EXPERT_KEYS = ("shared_expert_intermediate_size", *(key for key, _ in EXPERT_SIZES.values()))
_LAYERS = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
"""Keys of the router, and of the layers with experts, with the values that all models of Qwen 3.5 have."""
_NOT_COMPUTED = (
    "use_sliding_window",
    "sliding_window",
    "max_window_layers",
)  # as in transformers, no layer has a window
NEXT_CONFIG = ConfigConverter(
    model_types=("qwen3_next",),
    to_hf=_next_to_hf,
    from_hf=_next_from_hf,
    keys=config_keys(
        DECODER_KEYS - {"intermediate_size"} | {*_USED, *_EXPERT_KEYS, *_LAYERS},
        harmless=("intermediate_size", *_NOT_COMPUTED),
    ),
    aliases={"num_local_experts": "num_experts"},
)
# depths of multi-token prediction are not read, as by transformers; the type of states is of other programs
_OTHER_PROGRAMS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
_GATE = {"attn_output_gate": True}
DENSE_CONFIG = ConfigConverter(
    model_types=("qwen3_5_text",),
    to_hf=_dense_to_hf,
    from_hf=_dense_from_hf,
    keys=config_keys(DECODER_KEYS | {*_USED}, harmless=(*_OTHER_PROGRAMS, *_NOT_COMPUTED), defaults=_GATE),
)
MOE_CONFIG = ConfigConverter(
    model_types=("qwen3_5_moe_text",),
    to_hf=_moe_to_hf,
    from_hf=_moe_from_hf,
    keys=config_keys(
        DECODER_KEYS - {"intermediate_size"} | {*_USED, *_EXPERT_KEYS},
        harmless=("intermediate_size", *_OTHER_PROGRAMS, *_NOT_COMPUTED),
        defaults=_GATE | _LAYERS,
    ),
)


_SPECS = "torchtitan.models.qwen3_next.model"
DELTA_NETS = {
    "qwen3_next": Family(sizes=QWEN3_NEXT, config=NEXT_CONFIG, spec=f"{_SPECS}:NEXT_SPEC", publisher="Qwen"),
    "qwen3_5": Family(sizes=QWEN3_5, config=DENSE_CONFIG, spec=f"{_SPECS}:DENSE_SPEC", publisher="Qwen"),
    "qwen3_5_moe": Family(sizes=QWEN3_5_MOE, config=MOE_CONFIG, spec=f"{_SPECS}:MOE_SPEC", publisher="Qwen"),
}
