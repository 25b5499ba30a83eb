"""Gemma 2: arguments, published sizes, and conversion from and to config.json (Gemma2Config).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.models import gemma
from torchtitan.models.family import CLASS_KEYS, ConfigConverter, Family, read_num_classes, task_fields
from torchtitan.models.gemma import GELU, GemmaArgs
from torchtitan.models.hf.config import check_supported, gated_config, gated_sizes, read_number, read_window
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.hf.layer_kinds import every_nth, read_interval
from torchtitan.models.sizes import check_not_negative, check_positive, check_whole_heads


@dataclass(frozen=True, kw_only=True)
class WindowedGemmaArgs(GemmaArgs):
    """Sizes of Gemma 2 and 3. The last of each `global_interval` layers has no window."""

    sliding_window: int  # number of tokens that a token of a layer with a window attends to, with itself
    global_interval: int
    query_scalar: int = 256  # scores are divided by its square root

    norm_order: ClassVar = "sandwich"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "sliding_window", "global_interval", "query_scalar")
        check_whole_heads(self)  # transformers' config demands it

    @property
    def query_scale(self) -> float:
        return (self.head_dim / self.query_scalar) ** 0.5


@dataclass(frozen=True, kw_only=True)
class Gemma2Args(WindowedGemmaArgs):
    """Sizes of Gemma 2."""

    vocab_size: int = 256000
    sliding_window: int = 4096
    global_interval: int = 2
    score_cap: float = 50.0  # attention scores s become cap tanh(s / cap); 0: they stay
    logit_cap: float = 30.0  # the logits too
    max_seq_len: int = 8192
    n_classes: int = 0  # 0: the head predicts words

    may_be_zero: ClassVar = ("score_cap", "logit_cap", "n_classes")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self, "score_cap", "logit_cap")


DEBUG = gemma.DEBUG | dict(sliding_window=64, query_scalar=64)
GEMMA2 = {
    "debugmodel": Gemma2Args(**DEBUG),
    "2B": Gemma2Args(dim=2304, n_layers=26, n_heads=8, n_kv_heads=4, ffn_dim=9216),
    "9B": Gemma2Args(dim=3584, n_layers=42, n_heads=16, n_kv_heads=8, ffn_dim=14336),
    "27B": Gemma2Args(dim=4608, n_layers=46, n_heads=32, n_kv_heads=16, head_dim=128, ffn_dim=36864, query_scalar=144),
}
CAPS = {"score_cap": ("attn_logit_softcapping", 50.0), "logit_cap": ("final_logit_softcapping", 30.0)}
"""Names of the caps, here and in config.json, and transformers' values where it leaves them out."""


def gemma_config(args: WindowedGemmaArgs, dtype: Any) -> dict[str, Any]:
    """Return the fields that `gemma_sizes` reads."""
    config = gated_config(args, dtype)
    del config["hidden_act"]
    return config | {
        "hidden_activation": GELU,
        "layer_types": every_nth(args.n_layers, args.global_interval),
        "query_pre_attn_scalar": args.query_scalar,
        "sliding_window": args.sliding_window,
    }


def gemma_sizes(
    config: Mapping[str, Any], max_seq_len: int, interval_key: str, interval: int, theta: float = 10000.0
) -> dict[str, Any]:
    """Return the arguments of `WindowedGemmaArgs`.

    `max_seq_len`, `interval` and `theta` are transformers' defaults for absent keys, and `interval_key` is that of
    the interval of layers without a window, if there is one beside `layer_types`.
    """
    only = {"hidden_activation": GELU, "attention_bias": False, "use_bidirectional_attention": False}
    check_supported(config, only, nullable=("use_bidirectional_attention",))
    sizes = gated_sizes(config, max_seq_len, head_dim=256, theta=theta)
    return sizes | {
        "n_kv_heads": read_number(config, "num_key_value_heads", 4),  # never null
        "tied_embeddings": config.get("tie_word_embeddings", True),
        "sliding_window": read_window(config, 4096, nullable=False),
        "global_interval": read_interval(config, sizes["n_layers"], "layer_types", interval_key, interval),
        "query_scalar": read_number(config, "query_pre_attn_scalar", 256),
    }


def _to_hf(args: Gemma2Args, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Gemma2Config."""
    return gemma_config(args, dtype) | {
        **task_fields("Gemma2", args),
        "model_type": "gemma2",
        **{key: getattr(args, name) or None for name, (key, _) in CAPS.items()},
    }


def _from_hf(config: Mapping[str, Any]) -> Gemma2Args:
    sizes = gemma_sizes(config, 8192, "", 2)
    # in published files too, and not read by transformers
    check_supported(config, {"sliding_window_size": sizes["sliding_window"]})
    for name, (key, default) in CAPS.items():
        sizes[name] = read_number(config, key, default, null=0.0)
        if config.get(key) is not None and sizes[name] <= 0:
            raise JobError(f"{key} = {config[key]!r}; allowed: a number above 0, or null for no cap")
    return Gemma2Args(**sizes, n_classes=read_num_classes(config))


USED = DECODER_KEYS - {"hidden_act"} | {"head_dim", "hidden_activation", "layer_types", "query_pre_attn_scalar"}
USED |= {"sliding_window", "use_bidirectional_attention", *(key for key, _ in CAPS.values())}
DEFAULTS = {"hidden_act": GELU}
KEYS = config_keys(USED | {"sliding_window_size"} | CLASS_KEYS, defaults=DEFAULTS)
CONFIG = ConfigConverter(model_types=("gemma2",), to_hf=_to_hf, from_hf=_from_hf, keys=KEYS)


FAMILY = Family(sizes=GEMMA2, config=CONFIG, spec="torchtitan.models.gemma2.model:SPEC", publisher="google")
