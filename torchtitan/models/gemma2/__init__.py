"""Gemma 2: arguments, published sizes, and conversion from and to config.json (Gemma2Config).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import check_supported, gated_config, gated_sizes, read_number, read_window
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.hf.layer_kinds import every_nth, read_interval
from torchtitan.models.sizes import GatedArgs, check_not_negative, check_positive, check_whole_heads


@dataclass(frozen=True, kw_only=True)
class Gemma2Args(GatedArgs):
    """Sizes of Gemma 2. The last of each `global_interval` layers has no window."""

    head_dim: int = 256
    vocab_size: int = 256000
    norm_eps: float = 1e-6
    sliding_window: int = 4096  # number of tokens that a token attends to, with itself
    global_interval: int = 2
    query_scalar: int = 256  # scores are divided by its square root
    score_cap: float = 50.0  # attention scores s become cap tanh(s / cap); 0: they stay
    logit_cap: float = 30.0  # the logits too
    tied_embeddings: bool = True
    max_seq_len: int = 8192

    may_be_zero: ClassVar = ("score_cap", "logit_cap")
    norm_order: ClassVar = "sandwich"
    zero_centered: ClassVar = True
    gelu: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "sliding_window", "global_interval", "query_scalar")
        check_not_negative(self, "score_cap", "logit_cap")
        check_whole_heads(self)  # transformers' config demands it

    @property
    def embedding_multiplier(self) -> float:
        return self.dim**0.5

    @property
    def query_scale(self) -> float:
        return (self.head_dim / self.query_scalar) ** 0.5


_debug: dict[str, Any] = dict(dim=256, n_layers=6, n_heads=4, n_kv_heads=2, head_dim=64, ffn_dim=768, vocab_size=2048)
GEMMA2 = {
    "debugmodel": Gemma2Args(**_debug, sliding_window=64, query_scalar=64),
    "2B": Gemma2Args(dim=2304, n_layers=26, n_heads=8, n_kv_heads=4, ffn_dim=9216),
    "9B": Gemma2Args(dim=3584, n_layers=42, n_heads=16, n_kv_heads=8, ffn_dim=14336),
    "27B": Gemma2Args(dim=4608, n_layers=46, n_heads=32, n_kv_heads=16, head_dim=128, ffn_dim=36864, query_scalar=144),
}
CAPS = {"score_cap": ("attn_logit_softcapping", 50.0), "logit_cap": ("final_logit_softcapping", 30.0)}
"""Names of the caps, here and in config.json, and transformers' values where it leaves them out."""


def _to_hf(args: Gemma2Args, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Gemma2Config."""
    config = gated_config(args, dtype)
    del config["hidden_act"]
    return config | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": every_nth(args.n_layers, args.global_interval),
        "query_pre_attn_scalar": args.query_scalar,
        "sliding_window": args.sliding_window,
        **{key: getattr(args, name) or None for name, (key, _) in CAPS.items()},
    }


def _from_hf(config: Mapping[str, Any]) -> Gemma2Args:
    only = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "use_bidirectional_attention": False}
    check_supported(config, only, nullable=("use_bidirectional_attention",))
    window = read_window(config, 4096, nullable=False)
    check_supported(config, {"sliding_window_size": window})  # in published files too, and not read by transformers
    sizes = gated_sizes(config, 8192)
    sizes |= {"n_kv_heads": read_number(config, "num_key_value_heads", 4)}
    sizes |= {"head_dim": read_number(config, "head_dim", 256)}
    for name, (key, default) in CAPS.items():
        sizes[name] = read_number(config, key, default, null=0.0)
        if config.get(key) is not None and sizes[name] <= 0:
            raise JobError(f"{key} = {config[key]!r}; allowed: a number above 0, or null for no cap")
    return Gemma2Args(
        **sizes | {"tied_embeddings": config.get("tie_word_embeddings", True)},
        sliding_window=window,
        global_interval=read_interval(config, sizes["n_layers"], "layer_types", "", 2),
        query_scalar=read_number(config, "query_pre_attn_scalar", 256),
    )


USED = ("head_dim", "hidden_activation", "layer_types", "query_pre_attn_scalar", "sliding_window")
USED += ("sliding_window_size",)
USED += ("use_bidirectional_attention", *(key for key, _ in CAPS.values()))
KEYS = config_keys(DECODER_KEYS - {"hidden_act"} | {*USED}, defaults={"hidden_act": "gelu_pytorch_tanh"})
CONFIG = ConfigConverter(model_types=("gemma2",), to_hf=_to_hf, from_hf=_from_hf, keys=KEYS)


FAMILY = Family(sizes=GEMMA2, config=CONFIG, spec="torchtitan.models.gemma2.model:SPEC", publisher="google")
