"""Cohere's Command R, R7B and Aya: arguments, published sizes, and conversion from and to config.json.

They are CohereConfig and, for models with windows, Cohere2Config. No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import (
    check_supported,
    gated_config,
    gated_sizes,
    read_flag,
    read_number,
    read_window,
)
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys, of_family
from torchtitan.models.hf.layer_kinds import every_nth, read_interval
from torchtitan.models.sizes import DEBUG, GatedArgs, Rope


@dataclass(frozen=True, kw_only=True)
class CohereArgs(GatedArgs):
    """Sizes of Cohere's models. With windows, the layers without one have no rotary positions either."""

    vocab_size: int = 256000
    max_seq_len: int = 8192
    tied_embeddings: bool = True
    logit_scale: float = 0.0625
    attention_bias: bool = False
    sliding_window: int = 0  # number of tokens that a token attends to, with itself; 0: all before it
    global_interval: int = 4  # the last of each so many layers has no window

    layer_norm: ClassVar = True
    norm_bias: ClassVar = False
    norm_order: ClassVar = "shared"
    rotates_adjacent: ClassVar = True
    may_be_zero: ClassVar = ("sliding_window",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.logit_scale <= 0:
            raise JobError(f"logit_scale = {self.logit_scale}: must be above 0")

    @property
    def logits_divisor(self) -> float:
        return 1 / self.logit_scale

    def rope(self, layer: int) -> Rope | None:
        return None if self.sliding_window and self.is_global(layer) else super().rope(layer)


_8b: dict[str, Any] = dict(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14336)
_35b: dict[str, Any] = dict(dim=8192, n_layers=40, n_heads=64, n_kv_heads=64, ffn_dim=22528)
COHERE = {
    "debugmodel": CohereArgs(**DEBUG),
    "aya-8B": CohereArgs(**_8b),
    "35B": CohereArgs(**_35b, rope_theta=8000000.0),
}
COHERE2 = {
    "debugmodel": CohereArgs(**DEBUG, sliding_window=64, global_interval=3, logit_scale=0.25),
    "7B": CohereArgs(**_8b, rope_theta=50000.0, sliding_window=4096, logit_scale=0.25),
}


def _to_hf(args: CohereArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' CohereConfig, or of its Cohere2Config if there are windows."""
    name = "Cohere2" if args.sliding_window else "Cohere"
    config = of_family(gated_config(args, dtype), USED) | {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": name.lower(),
        "layer_norm_eps": args.norm_eps,
        "logit_scale": args.logit_scale,
    }
    if not args.sliding_window:
        return config
    types = every_nth(args.n_layers, args.global_interval)
    return config | {"sliding_window": args.sliding_window, "layer_types": types}


def _from_hf(config: Mapping[str, Any]) -> CohereArgs:
    check_supported(config, {"hidden_act": "silu", "use_qk_norm": False}, nullable=["use_qk_norm"])
    has_windows, windows = config["model_type"] == "cohere2", {}
    sizes = gated_sizes(config, 8192, theta=10000.0 if has_windows else 500000.0)
    if has_windows:
        windows["sliding_window"] = read_window(config, 4096, nullable=False)
        key = "sliding_window_pattern"
        windows["global_interval"] = read_interval(config, sizes["n_layers"], "layer_types", key, 4)
        # of the program that trained it
        check_supported(config, {"layer_switch": windows["global_interval"]})
    elif unused := [key for key in WINDOWS if config.get(key) is not None]:
        raise JobError(f"{', '.join(unused)} in a cohere model, which transformers ignores; remove it")
    return CohereArgs(
        **sizes
        | {
            "norm_eps": read_number(config, "layer_norm_eps", 1e-5),
            "tied_embeddings": config.get("tie_word_embeddings", True),
        },
        **windows,
        logit_scale=read_number(config, "logit_scale", 0.0625),
        attention_bias=read_flag(config, "attention_bias", False),
    )


WINDOWS = ("sliding_window", "layer_types", "sliding_window_pattern", "_sliding_window_pattern", "layer_switch")
USED = DECODER_KEYS - {"rms_norm_eps"} | {"head_dim", "layer_norm_eps", "logit_scale", "use_qk_norm", *WINDOWS}
_TRAINERS = {"order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj"}
_TRAINERS |= {"rotary_pct": 1.0, "use_embedding_sharing": True, "use_gated_activation": True}
_TRAINERS |= {"use_parallel_block": True}
CONFIG = ConfigConverter(
    model_types=("cohere", "cohere2"),
    to_hf=_to_hf,
    from_hf=_from_hf,
    keys=config_keys(USED, harmless=("use_parallel_embedding",), defaults=_TRAINERS),
)


COHERES = {
    name: Family(sizes=sizes, config=CONFIG, spec="torchtitan.models.cohere.model:SPEC", publisher="CohereLabs")
    for name, sizes in (("cohere", COHERE), ("cohere2", COHERE2))
}
