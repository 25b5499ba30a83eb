"""Gemma 3 for text: arguments, published sizes, and conversion from and to config.json (Gemma3TextConfig).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.core.files import agreed_value
from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import (
    check_supported,
    decoder_config,
    decoder_sizes,
    read_number,
    rope_config,
    rotary_config,
    scaling_from_hf,
)
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.hf.layer_kinds import FULL, SLIDING, every_nth, read_interval, rope_of_kind
from torchtitan.models.sizes import GatedArgs, Rope, RopeScaling, check_positive, check_whole_heads


@dataclass(frozen=True, kw_only=True)
class Gemma3Args(GatedArgs):
    """Local layers have a sliding window; the last of each `global_interval` layers is global and has none.

    `rope_theta` and `rope_scaling` are those of the global layers.
    """

    head_dim: int = 256
    vocab_size: int = 262208
    norm_eps: float = 1e-6
    rope_theta: float = 1000000.0
    local_rope_theta: float = 10000.0
    sliding_window: int = 1024  # number of tokens that a token of a local layer attends to, with itself
    global_interval: int = 6
    query_scalar: int = 256  # scores are divided by its square root
    tied_embeddings: bool = True
    max_seq_len: int = 131072

    qk_norm: ClassVar = True
    norm_order: ClassVar = "sandwich"
    zero_centered: ClassVar = True
    gelu: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "sliding_window", "global_interval", "query_scalar")
        check_whole_heads(self)  # transformers' config demands it

    @property
    def embedding_multiplier(self) -> float:
        return self.dim**0.5

    @property
    def query_scale(self) -> float:
        return (self.head_dim / self.query_scalar) ** 0.5

    def rope(self, layer: int) -> Rope:
        return super().rope(layer) if self.is_global(layer) else (self.local_rope_theta, None)


_debug: dict[str, Any] = dict(dim=256, n_layers=6, n_heads=4, n_kv_heads=2, head_dim=64, ffn_dim=768, vocab_size=2048)
_small: dict[str, Any] = dict(n_heads=4, n_kv_heads=1, vocab_size=262144, sliding_window=512, max_seq_len=32768)
_scaled: dict[str, Any] = dict(rope_scaling=RopeScaling(8.0, kind="linear"))
GEMMA3 = {
    "debugmodel": Gemma3Args(**_debug, sliding_window=64, global_interval=3, query_scalar=64, max_seq_len=32768),
    "270M": Gemma3Args(dim=640, n_layers=18, ffn_dim=2048, **_small),
    "1B": Gemma3Args(dim=1152, n_layers=26, ffn_dim=6912, **_small),
    # of the models that read images too, the text part
    "4B": Gemma3Args(dim=2560, n_layers=34, n_heads=8, n_kv_heads=4, ffn_dim=10240, **_scaled),
    "12B": Gemma3Args(dim=3840, n_layers=48, n_heads=16, n_kv_heads=8, ffn_dim=15360, **_scaled),
    "27B": Gemma3Args(
        dim=5376, n_layers=62, n_heads=32, n_kv_heads=16, head_dim=128, ffn_dim=21504, query_scalar=168, **_scaled
    ),
}
LOCAL, GLOBAL = SLIDING, FULL


def _to_hf(args: Gemma3Args, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Gemma3TextConfig."""
    gemma3_fields = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": args.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": args.ffn_dim,
        "layer_types": every_nth(args.n_layers, args.global_interval),
        "query_pre_attn_scalar": args.query_scalar,
        "rope_local_base_freq": args.local_rope_theta,
        "sliding_window": args.sliding_window,
        "sliding_window_pattern": args.global_interval,
    }
    shared_fields = decoder_config(args, dtype)
    del shared_fields["hidden_act"]
    return shared_fields | rotary_config(args) | gemma3_fields


def _from_hf(config: Mapping[str, Any]) -> Gemma3Args:
    only: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "use_bidirectional_attention": False,
    }
    only |= {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    check_supported(config, only, nullable=("use_bidirectional_attention",))
    local_theta = _local_theta(config)
    config = _global_part(config)
    sizes = decoder_sizes(config, 131072, "intermediate_size", theta=1000000.0)
    return Gemma3Args(
        **sizes | {"tied_embeddings": config.get("tie_word_embeddings", True)},
        rope_scaling=scaling_from_hf(config),
        local_rope_theta=local_theta,
        n_kv_heads=read_number(config, "num_key_value_heads", 4),
        ffn_dim=config["intermediate_size"],
        head_dim=read_number(config, "head_dim", 256),
        sliding_window=read_number(config, "sliding_window", 4096),
        global_interval=read_interval(config, sizes["n_layers"], "layer_types", "sliding_window_pattern", 6),
        query_scalar=read_number(config, "query_pre_attn_scalar", 256),
    )


def _local_theta(config: Mapping[str, Any]) -> float:
    """Return theta of the local layers, which transformers 4 writes as rope_local_base_freq."""
    table = rope_of_kind(config, LOCAL)
    theta = read_number(config, "rope_local_base_freq", 10000.0)
    rope = rope_config({"rope_parameters": table}, theta)
    check_supported(rope, {"rope_type": "default"})
    if "rope_local_base_freq" in config:
        sources = {f"rope_parameters's {LOCAL}": rope["rope_theta"], "rope_local_base_freq": theta}
        agreed_value("theta of the local layers", sources, "remove the one that the model was not trained with")
    return float(rope["rope_theta"])


def _global_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the rotary positions of the global layers in place of those of all."""
    scaling = config.get("rope_scaling") or {}
    if isinstance(scaling, Mapping) and "type" in scaling and "rope_type" not in scaling:
        raise JobError(
            f"rope_scaling = {scaling!r}; allowed: a table with rope_type, as transformers ignores type in this family"
        )
    return {**config, "rope_parameters": rope_of_kind(config, GLOBAL)}


USED = ("head_dim", "hidden_activation", "layer_types", "query_pre_attn_scalar", "rope_local_base_freq")
USED += ("sliding_window", "sliding_window_pattern", "_sliding_window_pattern", "use_bidirectional_attention")
USED += ("attn_logit_softcapping", "final_logit_softcapping")
CONFIG = ConfigConverter(
    model_types=("gemma3_text",),
    to_hf=_to_hf,
    from_hf=_from_hf,
    keys=config_keys(DECODER_KEYS - {"hidden_act"} | {*USED}, defaults={"hidden_act": "gelu_pytorch_tanh"}),
)


FAMILY = Family(sizes=GEMMA3, config=CONFIG, spec="torchtitan.models.gemma3.model:SPEC", publisher="google")
