"""Mistral without experts, and Ministral 3: arguments, sizes, and conversion from and to config.json.

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.core.files import agreed_value
from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import check_supported, gated_config, gated_sizes, read_number, read_window
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.hf.layer_kinds import FULL, SLIDING, only_layer_type
from torchtitan.models.sizes import DEBUG, GatedArgs, RopeScaling, check_positive


@dataclass(frozen=True, kw_only=True)
class MistralArgs(GatedArgs):
    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int = 8
    ffn_dim: int = 14336
    sliding_window: int = 0  # number of tokens that a token attends to, with itself; 0: all before it
    query_growth: float = 0.0  # Ministral 3: queries grow by this times ln(1 + number of periods before them)
    query_period: int = 1  # number of positions

    may_be_zero: ClassVar = ("sliding_window", "query_growth")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "query_period")


MISTRAL = {
    "debugmodel": MistralArgs(**DEBUG, sliding_window=64),
    "7B": MistralArgs(sliding_window=4096),  # v0.1
    "7B-v0.2": MistralArgs(rope_theta=1e6),
    "7B-v0.3": MistralArgs(rope_theta=1e6, vocab_size=32768),
    "Nemo-12B": MistralArgs(dim=5120, n_layers=40, vocab_size=131072, rope_theta=1e6, max_seq_len=131072),
    "Ministral-3-8B": MistralArgs(
        n_layers=34,
        vocab_size=131072,
        rope_theta=1e6,
        rope_scaling=RopeScaling(16.0, original_max_seq_len=16384, kind="yarn", attention_factor=1.0),
        query_growth=0.1,
        query_period=16384,
        max_seq_len=262144,
    ),
}


def _to_hf(args: MistralArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' MistralConfig."""
    mistral_fields = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": args.sliding_window or None,
    }
    config = gated_config(args, dtype) | mistral_fields
    if not args.query_growth:
        return config
    rope = {"rope_type": "default", "rope_theta": config.pop("rope_theta")} | (config.pop("rope_scaling") or {})
    lengths = {LENGTH: args.query_period, GROWTH: args.query_growth}
    if rope.get(LENGTH, args.query_period) != args.query_period:
        raise JobError(f"query_period = {args.query_period}: transformers' Ministral 3 only has {rope[LENGTH]}")
    names = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
    return config | names | {"rope_parameters": rope | lengths}


LENGTH, GROWTH = "original_max_position_embeddings", "llama_4_scaling_beta"


def split_growth(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a config without the growth of queries, which is in a table of rotary positions, and the sizes of it."""
    tables = {name: config[name] for name in ("rope_parameters", "rope_scaling") if config.get(name)}
    table = agreed_value("rotary positions", tables, "remove the one that the model was not trained with")
    if not isinstance(table, Mapping):
        raise JobError(f"rope_parameters = {table!r}; allowed: an object, as of transformers' Ministral3Config")
    growth = read_number(table, GROWTH, 0.0, null=0.0)
    sizes = {"query_growth": growth, "query_period": read_number(table, LENGTH, 1)} if growth else {"query_growth": 0.0}
    if table.get("rope_theta", config.get("rope_theta")) is None:
        raise JobError(f"rope_parameters = {dict(table)!r} has no rope_theta, for which this model has no default")
    only = {GROWTH, "max_position_embeddings"}
    only |= {LENGTH} if table.get("rope_type", table.get("type")) in (None, "default") else set()
    remaining = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling")}
    return remaining | {"rope_parameters": {key: table[key] for key in table if key not in only}}, sizes


def _from_hf(config: Mapping[str, Any]) -> MistralArgs:
    grows = config["model_type"] == "ministral3"
    # what a Mistral has where they are absent is something else
    absent = {"sliding_window": None, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144}
    config, growth = split_growth(absent | config) if grows else (config, {})
    check_supported(config, {"hidden_act": "silu", "attention_bias": False})
    head_dim = 128 if grows else None
    sizes = gated_sizes(config, 131072, kv_heads=8, head_dim=head_dim, head_dim_may_be_null=not grows)
    window = read_window(config, 4096)
    # with layer_types, even null, transformers reads a Ministral, which has the window in some of the layers
    kind = only_layer_type(config)
    if kind == SLIDING and not window:
        raise JobError(f"layer_types has {SLIDING!r}, but sliding_window = {config['sliding_window']!r}")
    return MistralArgs(**sizes, **growth, sliding_window=0 if kind == FULL else window)


KEYS = config_keys(DECODER_KEYS | {"head_dim", "sliding_window", "layer_types"})
CONFIG = ConfigConverter(model_types=("mistral", "ministral3"), to_hf=_to_hf, from_hf=_from_hf, keys=KEYS)


FAMILY = Family(sizes=MISTRAL, config=CONFIG, spec="torchtitan.models.mistral.model:SPEC", publisher="mistralai")
