"""Gemma 4 for text, without embeddings of layers: arguments, published sizes, and conversion from and to
config.json (Gemma4TextConfig, Gemma4UnifiedTextConfig).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torchtitan.core.errors import JobError
from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.gemma import GELU
from torchtitan.models.hf.config import (
    check_numbers,
    check_supported,
    decoder_config,
    gated_sizes,
    read_flag,
    read_number,
    read_window,
)
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.hf.layer_kinds import FULL, SLIDING, every_nth, rope_of_kind
from torchtitan.models.moe import PLAIN_SOFTMAX, GroupedMoEArgs, check_exported, number_of_shared_experts
from torchtitan.models.sizes import (
    QK_NORMS,
    GatedArgs,
    GatedDecoderSizes,
    PartialRope,
    Rope,
    Sizes,
    check_even,
    check_not_negative,
    check_positive,
    grouped_attention,
)


class AttentionSizes(NamedTuple):
    """The sizes of a layer's attention."""

    dim: int
    n_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float


@dataclass(frozen=True, kw_only=True)
class Gemma4Sizes(GatedDecoderSizes):
    """Sizes of Gemma 4 with experts and without.

    The last of each `global_interval` layers, and the last of all, have no window; n_kv_heads and head_dim are those of
    the others. `rope_theta` is that of the global layers. An interval longer than the model is kept as n_layers.
    """

    vocab_size: int = 262144
    head_dim: int = 256
    norm_eps: float = 1e-6
    tied_embeddings: bool = True
    rope_theta: float = 1000000.0
    local_rope_theta: float = 10000.0
    sliding_window: int = 1024  # number of tokens that a token of a layer with a window attends to, with itself
    global_interval: int = 6
    global_head_dim: int = 512
    global_kv_heads: int
    global_rotary_dim: int = 128  # features of a head that are rotated
    keys_are_values: bool = False  # values of global layers are the keys before norm and rotation
    logit_cap: float = 0.0  # logits l become cap tanh(l / cap); 0: they stay
    max_seq_len: int = 131072

    may_be_zero: ClassVar = ("logit_cap",)
    norm_order: ClassVar = "sandwich"
    qk_norm: ClassVar = True
    activation: ClassVar = "gelu_tanh"

    def __post_init__(self) -> None:
        check_positive(self, "sliding_window", "global_interval", "global_head_dim", "global_kv_heads")
        check_positive(self, "global_rotary_dim")
        super().__post_init__()
        check_not_negative(self, "logit_cap")
        check_even(self, "global_head_dim")
        check_even(self, "global_rotary_dim")
        if self.global_rotary_dim > self.global_head_dim:
            raise JobError(
                f"global_rotary_dim = {self.global_rotary_dim}: must be at most global_head_dim = "
                f"{self.global_head_dim}"
            )
        if self.n_heads % self.global_kv_heads:
            raise JobError(
                f"global_kv_heads = {self.global_kv_heads} with n_heads = {self.n_heads}: every key/value head serves "
                "the same number of query heads, so global_kv_heads must divide n_heads"
            )
        object.__setattr__(self, "global_interval", min(self.global_interval, self.n_layers))

    @property
    def embedding_multiplier(self) -> float:
        return float(self.dim**0.5)

    def is_global(self, layer: int) -> bool:
        return super().is_global(layer) or layer == self.n_layers - 1

    def rope(self, layer: int) -> Rope:
        if not self.is_global(layer):
            return self.local_rope_theta, None
        return self.rope_theta, PartialRope(self.global_rotary_dim)

    def rope_width(self, layer: int) -> int:
        return self.attention_sizes(layer).head_dim

    def attention_sizes(self, layer: int) -> AttentionSizes:
        sizes = (
            (self.global_kv_heads, self.global_head_dim) if self.is_global(layer) else (self.n_kv_heads, self.head_dim)
        )
        return AttentionSizes(self.dim, self.n_heads, *sizes, self.norm_eps)

    def attention_linears(self, layer: int) -> Sizes:
        sizes = grouped_attention(*self.attention_sizes(layer)[:4])
        if self.keys_are_values and self.is_global(layer):
            del sizes["attention.wv"]
        return sizes

    def other_sizes(self, layer: int) -> dict[str, int]:
        return super().other_sizes(layer) | dict.fromkeys(QK_NORMS, self.attention_sizes(layer).head_dim)


@dataclass(frozen=True, kw_only=True)
class Gemma4Args(Gemma4Sizes, GatedArgs):
    """Sizes of Gemma 4 without experts."""


EXPERT_NORMS = ("moe.router.norm", "moe.norm", "moe.post_norm", "moe.shared_post_norm")
SCALE = "moe.router.scale.weight"
"""The factors of experts' weights."""


@dataclass(frozen=True, kw_only=True)
class Gemma4MoEArgs(Gemma4Sizes, GroupedMoEArgs):
    """Sizes of Gemma 4 with experts in all layers, and a feed-forward beside them.

    The router has a norm of its input, and each expert a factor of its weights. There are norms of the experts' input,
    of their output, and of that of the feed-forward.
    """

    n_shared_experts: int = 3  # as one feed-forward
    normalize_top_k: bool = True
    may_be_zero: ClassVar = ("aux_loss_weight", "bias_rate", *Gemma4Sizes.may_be_zero)
    gelu_experts: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "n_shared_experts")

    def other_sizes(self, layer: int) -> dict[str, int]:
        norms = {f"{name}.weight": self.dim for name in EXPERT_NORMS}
        return super().other_sizes(layer) | norms | {SCALE: self.n_experts}


_debug: dict[str, Any] = dict(dim=256, n_layers=6, n_heads=4, n_kv_heads=2, head_dim=64, vocab_size=2048)
_debug |= dict(sliding_window=64, global_interval=3, global_head_dim=128, global_kv_heads=1, global_rotary_dim=32)
_large: dict[str, Any] = dict(logit_cap=30.0, keys_are_values=True, max_seq_len=262144)
GEMMA4 = {
    "debugmodel": Gemma4Args(**_debug, ffn_dim=768, keys_are_values=True),
    "debugmodel_moe": Gemma4MoEArgs(**_debug, expert_dim=256, n_experts=8, top_k=2, keys_are_values=True),
    "26B-A4B": Gemma4MoEArgs(
        **_large | dict(dim=2816, n_layers=30, n_heads=16, n_kv_heads=8, global_kv_heads=2),
        **dict(expert_dim=704, n_experts=128, top_k=8),
    ),
    "31B": Gemma4Args(
        **_large | dict(dim=5376, n_layers=60, n_heads=32, n_kv_heads=16, global_kv_heads=4, ffn_dim=21504)
    ),
}
EXPERTS = {"n_experts": "num_experts", "top_k": "top_k_experts", "expert_dim": "moe_intermediate_size"}
"""Sizes and their keys, which have no effect if enable_moe_block is false."""
ONLY: dict[str, Any] = {"hidden_activation": GELU, "attention_bias": False}
ONLY |= {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
"""Keys of config.json with the one value that is here."""


def _to_hf(args: Gemma4Args | Gemma4MoEArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Gemma4TextConfig. Raises JobError for heads or routing that it lacks."""
    if not args.keys_are_values and args.global_kv_heads != args.n_kv_heads:
        raise JobError(
            f"global_kv_heads = {args.global_kv_heads}: without keys_are_values transformers' Gemma 4 only has "
            f"n_kv_heads = {args.n_kv_heads}"
        )
    config = decoder_config(args, dtype) | _widths(args)
    for key in ("hidden_act", "rope_theta"):
        del config[key]
    factor = args.global_rotary_dim / args.global_head_dim
    tables = {SLIDING: {"rope_type": "default", "rope_theta": args.local_rope_theta}}
    tables[FULL] = {"rope_type": "proportional", "partial_rotary_factor": factor, "rope_theta": args.rope_theta}
    return config | {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_activation": GELU,
        "head_dim": args.head_dim,
        "num_key_value_heads": args.n_kv_heads,
        "global_head_dim": args.global_head_dim,
        "num_global_key_value_heads": args.global_kv_heads,
        "attention_k_eq_v": args.keys_are_values,
        "rope_parameters": tables,
        "sliding_window": args.sliding_window,
        "layer_types": _kinds(args.n_layers, args.global_interval),
        "final_logit_softcapping": args.logit_cap or None,
        "hidden_size_per_layer_input": 0,
    }


def _widths(args: Gemma4Args | Gemma4MoEArgs) -> dict[str, Any]:
    """Return the fields of the feed-forward, and of experts if there are any."""
    if isinstance(args, Gemma4Args):
        return {"intermediate_size": args.ffn_dim, "enable_moe_block": False}
    check_exported(args, {**PLAIN_SOFTMAX, "normalize_top_k": True}, "Gemma 4")
    widths = {"intermediate_size": args.n_shared_experts * args.expert_dim, "enable_moe_block": True}
    return widths | {key: getattr(args, name) for name, key in EXPERTS.items()}


def _kinds(n_layers: int, interval: int) -> list[str]:
    """Return transformers' kind of each layer, of which the last one is always global."""
    return [*every_nth(n_layers, interval)[:-1], FULL]


def _from_hf(config: Mapping[str, Any]) -> Gemma4Args | Gemma4MoEArgs:
    unified = config["model_type"] == "gemma4_unified_text"
    if not unified:
        config = {"hidden_size_per_layer_input": 256, **config}  # transformers' value of an absent key
    check_supported(config, ONLY)
    if (direction := config.get("use_bidirectional_attention")) not in (None, "vision"):  # the latter is of images
        raise JobError(f"use_bidirectional_attention = {direction!r}; allowed: null or 'vision'")
    sizes = gated_sizes(
        {key: value for key, value in config.items() if key != "rope_parameters"},
        262144 if unified else 131072,
        head_dim=256,
    )
    kv_heads = read_number(config, "num_key_value_heads", 4)
    cap = read_number(config, "final_logit_softcapping", 0.0, null=0.0)
    if config.get("final_logit_softcapping") is not None and cap <= 0:
        raise JobError(f"final_logit_softcapping = {cap}; allowed: a number above 0, or null for no cap")
    interval = _interval(config, sizes["n_layers"])
    for key in EXPERTS.values():
        read_number(config, key, 0, null=0)
    for key in ("num_kv_shared_layers", "hidden_size_per_layer_input"):  # null is an error of transformers
        read_number(config, key, 0)
    args_type: type[Gemma4Args | Gemma4MoEArgs] = Gemma4Args
    if read_flag(config, "enable_moe_block", False):
        args_type = Gemma4MoEArgs
        sizes |= _expert_sizes(config, sizes.pop("ffn_dim"))
    return args_type(
        **sizes
        | {"n_kv_heads": kv_heads, "tied_embeddings": config.get("tie_word_embeddings", True)}
        | _global_sizes(config, kv_heads, _kinds(sizes["n_layers"], interval)),
        local_rope_theta=_rope(config, SLIDING, {"rope_type": "default", "rope_theta": 10000.0})["rope_theta"],
        sliding_window=read_window(config, 1024 if unified else 512, nullable=False),
        global_interval=interval,
        logit_cap=cap,
    )


def _expert_sizes(config: Mapping[str, Any], width: int) -> dict[str, int]:
    """Return the sizes of experts beside a feed-forward of `width` features."""
    check_numbers(config, EXPERTS.values())
    sizes = {name: config[key] for name, key in EXPERTS.items()}
    shared = number_of_shared_experts("intermediate_size", width, "moe_intermediate_size", sizes["expert_dim"])
    return sizes | {"n_shared_experts": shared}


def _interval(config: Mapping[str, Any], n_layers: int) -> int:
    kinds = config.get("layer_types")
    if kinds is None:
        return 6
    first = kinds.index(FULL) + 1 if isinstance(kinds, list) and FULL in kinds else n_layers
    for interval in (first, n_layers):
        if isinstance(kinds, list) and [*kinds[:-1], FULL] == _kinds(n_layers, interval):
            return interval
    raise JobError(
        f"layer_types = {kinds!r}; allowed: {n_layers} entries, {FULL!r} for every n-th layer and the last one, and "
        f"{SLIDING!r} for all others"
    )


def _global_sizes(config: Mapping[str, Any], kv_heads: int, kinds: list[str]) -> dict[str, Any]:
    """Return the sizes of the layers without a window."""
    shares = read_flag(config, "attention_k_eq_v", False)
    head_dim = read_number(config, "global_head_dim", 512)
    heads = read_number(config, "num_global_key_value_heads", kv_heads, null=kv_heads) if shares else kv_heads
    layers = [layer for layer, kind in enumerate(kinds) if kind == FULL]
    if "per_layer_config" in config:  # in files of transformers 5, which prefers it
        by_layer = {} if config["per_layer_config"] is None else config["per_layer_config"]
        first = next(iter(by_layer.values()), {}) if isinstance(by_layer, Mapping) else None  # empty: all are alike
        is_known = isinstance(first, Mapping) and not first.keys() - {"head_dim", "num_key_value_heads"}
        if (
            not is_known
            or (by_layer and [(key.lstrip("0") or "0") for key in by_layer] != [*map(str, layers)])
            or any(table != first for table in by_layer.values())
        ):
            allowed = f"the same head_dim and num_key_value_heads for the layers {layers} of {FULL}, and no others"
            raise JobError(f"per_layer_config = {by_layer!r}; allowed: {allowed}")
        head_dim = read_number(first, "head_dim", config.get("head_dim", 256))
        heads = read_number(first, "num_key_value_heads", kv_heads)
    table = _rope(config, FULL, {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25})
    rotated = 2 * int(table.get("partial_rotary_factor", 1.0) * head_dim // 2)
    return {
        "global_head_dim": head_dim,
        "global_kv_heads": heads,
        "global_rotary_dim": rotated,
        "keys_are_values": shares,
        "rope_theta": table["rope_theta"],
    }


def _rope(config: Mapping[str, Any], kind: str, default: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary positions of a kind of layers; those of the default without any table."""
    if config.get("rope_parameters") is None:
        return dict(default)
    table = rope_of_kind(config, kind)
    unknown = table.keys() - default.keys() - {"factor"} if isinstance(table, Mapping) else True
    if unknown or table.get("rope_type") != default["rope_type"] or table.get("factor", 1.0) != 1.0:
        raise JobError(f"rope_parameters has {kind} = {table!r}; allowed: {dict(default)} with other numbers")
    read_number(table, "partial_rotary_factor", 1.0)
    return {**table, "rope_theta": read_number(table, "rope_theta", 10000.0)}


USED = DECODER_KEYS - {"hidden_act", "rope_scaling", "rope_theta"} | {*ONLY, "head_dim", "layer_types"}
USED |= {"global_head_dim", "num_global_key_value_heads", "per_layer_config", "attention_k_eq_v", "sliding_window"}
USED |= {"final_logit_softcapping", "use_bidirectional_attention", "enable_moe_block", *EXPERTS.values()}
KEYS = config_keys(
    USED,
    harmless=("vocab_size_per_layer_input", "use_double_wide_mlp"),
    defaults={"expert_intermediate_size": None},  # of the first files, for moe_intermediate_size
)
TYPES = ("gemma4_text", "gemma4_unified_text")
CONFIG = ConfigConverter(model_types=TYPES, to_hf=_to_hf, from_hf=_from_hf, keys=KEYS)


FAMILY = Family(sizes=GEMMA4, config=CONFIG, spec="torchtitan.models.gemma4.model:SPEC", publisher="google")
