"""OLMo 2 and 3: arguments, published sizes, and conversion from and to config.json. No torch, for a quick check."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import check_supported, gated_config, gated_sizes, read_flag, read_window, rope_config
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.hf.layer_kinds import FULL, SLIDING, check_full_attention, every_nth, read_interval, rope_of_kind
from torchtitan.models.sizes import DEBUG, GatedArgs, Rope


@dataclass(frozen=True, kw_only=True)
class OlmoArgs(GatedArgs):
    """Sizes of OLMo. With a window it is an OLMo 3, where `rope_scaling` is of the layers without one."""

    vocab_size: int = 100352
    norm_eps: float = 1e-6
    rope_theta: float = 500000.0
    max_seq_len: int = 4096
    attention_bias: bool = False
    sliding_window: int = 0  # number of tokens that a token attends to, with itself; 0: all before it
    global_interval: int = 4  # the last of each so many layers has no window

    may_be_zero: ClassVar = ("sliding_window",)
    qk_norm: ClassVar = True
    qk_norm_over_heads: ClassVar = True
    norm_order: ClassVar = "output"

    def rope(self, layer: int) -> Rope:
        return self.rope_theta, self.rope_scaling if self.is_global(layer) else None


_7b: dict[str, Any] = dict(dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, ffn_dim=11008)
OLMO2 = {
    "debugmodel": OlmoArgs(**DEBUG),
    "1B": OlmoArgs(dim=2048, n_layers=16, n_heads=16, n_kv_heads=16, ffn_dim=8192),
    "7B": OlmoArgs(**_7b),
    "13B": OlmoArgs(dim=5120, n_layers=40, n_heads=40, n_kv_heads=40, ffn_dim=13824),
    "32B": OlmoArgs(dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, ffn_dim=27648),
}
OLMO3 = {
    "debugmodel": OlmoArgs(**DEBUG, sliding_window=64, global_interval=3),
    # before its training on long texts
    "7B": OlmoArgs(**_7b, vocab_size=100278, sliding_window=4096, max_seq_len=8192),
}


def _to_hf(args: OlmoArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Olmo2Config, or of its Olmo3Config if there are windows."""
    config = gated_config(args, dtype)
    if not args.sliding_window:
        return config | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
    theta, scaling = config.pop("rope_theta"), config.pop("rope_scaling")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    return config | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": args.sliding_window,
        "layer_types": every_nth(args.n_layers, args.global_interval),
        "rope_parameters": {SLIDING: rope | {"rope_theta": args.rope_theta}, FULL: rope | (scaling or {})},
    }


def _from_hf(config: Mapping[str, Any]) -> OlmoArgs:
    check_supported(config, {"hidden_act": "silu"})
    has_windows, windows = config["model_type"] == "olmo3", {}
    if has_windows:
        config = _rope_of_full_layers(config)
    sizes = gated_sizes({"rms_norm_eps": 1e-5} | config, 2048, theta=500000.0 if has_windows else 10000.0)
    if not has_windows:
        check_full_attention(config)
    else:
        windows["sliding_window"] = read_window(config, 4096, nullable=False)
        windows["global_interval"] = read_interval(config, sizes["n_layers"], "layer_types", "", 4)
    return OlmoArgs(**sizes, **windows, attention_bias=read_flag(config, "attention_bias", False))


def _rope_of_full_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return an OLMo 3's config as if rotary positions were alike. JobError if those with a window have others."""
    if config.get("rope_parameters") is None:  # of transformers 4: scaling is of the layers without a window alone
        return dict(config)
    full, windowed = (
        rope_config({"rope_parameters": rope_of_kind(config, kind)}, 500000.0) for kind in (FULL, SLIDING)
    )
    check_supported(windowed, {"rope_type": "default", "rope_theta": full["rope_theta"]})
    return {**config, "rope_parameters": full}


KEYS = config_keys(DECODER_KEYS | {"head_dim", "sliding_window", "layer_types"})
CONFIG = ConfigConverter(model_types=("olmo2", "olmo3"), to_hf=_to_hf, from_hf=_from_hf, keys=KEYS)


OLMOS = {
    name: Family(sizes=sizes, config=CONFIG, spec="torchtitan.models.olmo.model:SPEC", publisher="allenai")
    for name, sizes in (("olmo2", OLMO2), ("olmo3", OLMO3))
}
