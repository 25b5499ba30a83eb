"""Phi 3 and 4: arguments, published sizes, and conversion from and to config.json (Phi3Config).

No torch here, so `torchtitan check` stays quick.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.core.files import agreed_value
from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import (
    check_supported,
    gated_config,
    gated_sizes,
    read_number,
    read_window,
    split_partial_rotary,
)
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.hf.layer_kinds import partial_rotary_factor
from torchtitan.models.sizes import DEBUG, GatedArgs, LongRope, Rope, check_positive, check_rotary_dim


@dataclass(frozen=True, kw_only=True)
class Phi3Args(GatedArgs):
    vocab_size: int = 32064
    max_seq_len: int = 4096
    sliding_window: int = 0  # number of tokens that a token attends to, with itself; 0: all before it
    rotary_factor: float = 1.0  # share of the features of a head that are rotated
    longrope: LongRope | None = None  # of Phi 3 for long texts, and of Phi 4 mini

    may_be_zero: ClassVar = ("sliding_window",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rotary_dim(self)
        if self.longrope is not None:
            self._check_longrope(self.longrope)

    def _check_longrope(self, scaling: LongRope) -> None:
        if self.rope_scaling is not None:
            raise JobError("longrope and rope_scaling are both set; leave one of them out")
        check_positive(scaling, "original_max_seq_len")
        for name in ("short_factors", "long_factors"):
            factors = getattr(scaling, name)
            if len(factors) != self.rotary_dim // 2 or not all(0 < factor < math.inf for factor in factors):
                raise JobError(
                    f"longrope has {name} = {factors}; must be {self.rotary_dim // 2} numbers above 0, one for each "
                    "pair of features that is rotated"
                )

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_factor)

    def rope(self, layer: int) -> Rope:
        return self.rope_theta, self.longrope or self.rope_scaling


PHI3 = {
    "debugmodel": Phi3Args(**DEBUG),
    "mini-4k": Phi3Args(
        dim=3072, n_layers=32, n_heads=32, n_kv_heads=32, head_dim=96, ffn_dim=8192, sliding_window=2047
    ),
}
PHI4 = {
    "debugmodel": Phi3Args(**DEBUG),
    "14B": Phi3Args(
        dim=5120,
        n_layers=40,
        n_heads=40,
        n_kv_heads=10,
        ffn_dim=17920,
        vocab_size=100352,
        rope_theta=250000.0,
        max_seq_len=16384,
    ),
}


def _to_hf(args: Phi3Args, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Phi3Config. Raises JobError for other scaled rotary positions."""
    if args.rope_scaling is not None:
        raise JobError(f"rope_scaling of kind {args.rope_scaling.kind!r}: transformers' Phi 3 only has 'longrope'")
    long = args.longrope
    phi3_fields = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "sliding_window": args.sliding_window or None,
        LENGTH: long.original_max_seq_len if long else args.max_seq_len,
        "partial_rotary_factor": partial_rotary_factor(args),
    }
    if long:
        table = {"type": "longrope"} | {key: list(getattr(long, name)) for name, key in FACTORS.items()}
        # transformers 4 refuses a table with a fourth entry
        is_usual = long.attention_factor == _usual_factor(args.max_seq_len, long.original_max_seq_len)
        phi3_fields["rope_scaling"] = table | ({} if is_usual else {"attention_factor": long.attention_factor})
    return gated_config(args, dtype) | phi3_fields


LENGTH = "original_max_position_embeddings"
FACTORS = {"short_factors": "short_factor", "long_factors": "long_factor"}


def _from_hf(config: Mapping[str, Any]) -> Phi3Args:
    check_supported(config, {"hidden_act": "silu", "attention_bias": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0})
    for name, default in {LENGTH: 4096, "resid_pdrop": 0.0, "embd_pdrop": 0.0}.items():
        read_number(config, name, default)  # transformers refuses null here
    config, rotary_factor = split_partial_rotary(config, 1.0)
    config, long = _split_longrope(config)
    sizes = gated_sizes(config, 4096)
    if sizes["rope_scaling"] is not None:
        kind = sizes["rope_scaling"].kind
        raise JobError(f"rotary positions of type {kind!r}: transformers' Phi 3 only has 'longrope'")
    if long is not None and sizes["head_dim"] * sizes["n_heads"] != sizes["dim"]:
        raise JobError(f"head_dim = {sizes['head_dim']} with longrope; allowed: hidden_size / num_attention_heads")
    norm_eps = read_number(config, "rms_norm_eps", 1e-5)
    rotary = {"rotary_factor": rotary_factor, "longrope": long}
    return Phi3Args(**sizes | {"norm_eps": norm_eps}, **rotary, sliding_window=read_window(config, 0))


def _split_longrope(config: dict[str, Any]) -> tuple[dict[str, Any], LongRope | None]:
    """Return a config with plain rotary positions, and the factors of others."""
    tables = {name: config[name] for name in ("rope_scaling", "rope_parameters") if config.get(name)}
    kinds = ("longrope", "su", "yarn")  # one kind, under three names
    scaled = {
        name: table
        for name, table in tables.items()
        if isinstance(table, Mapping) and table.get("rope_type", table.get("type")) in kinds
    }
    if not scaled:
        return config, None
    # another table beside it contradicts it
    factors = {name: _long_factors(table, config) if name in scaled else table for name, table in tables.items()}
    plain = {
        name: {key: table[key] for key in table if key not in LONGROPE_KEYS} | {"rope_type": "default"}
        for name, table in scaled.items()
    }
    long = agreed_value("rotary positions", factors, "remove the one that the model was not trained with")
    return config | plain, long


LONGROPE_KEYS = ("rope_type", "type", "factor", "attention_factor", LENGTH, *FACTORS.values())


def _long_factors(table: Mapping[str, Any], config: Mapping[str, Any]) -> LongRope:
    kinds = {key: table.get(key) for key in ("rope_type", "type")}
    agreed_value("the type of rotary positions", kinds, "remove the wrong one")
    length = read_number(config, LENGTH, 4096)
    if length < 2:
        raise JobError(f"{LENGTH} = {length}; allowed: at least 2")
    if table.get(LENGTH, length) != length:  # transformers prefers the other one, or its default
        raise JobError(f"{LENGTH} = {table[LENGTH]!r} of rotary positions, but the model's is {length}; remove it")
    factors = {name: _numbers(key, table.get(key)) for name, key in FACTORS.items()}
    ratio = read_number(config, "max_position_embeddings", 4096) / length
    usual = _usual_factor(length * read_number(table, "factor", ratio, null=ratio), length)
    return LongRope(
        **factors,
        attention_factor=read_number(table, "attention_factor", usual, null=usual),
        original_max_seq_len=length,
    )


def _usual_factor(length: float, original: int) -> float:
    """Return the factor of rotated features for texts of `length` tokens (arXiv:2402.13753, section 3.4)."""
    return math.sqrt(1 + math.log(length / original) / math.log(original)) if length > original else 1.0


def _numbers(key: str, values: Any) -> tuple[float, ...]:
    if not isinstance(values, list) or any(type(value) not in (int, float) for value in values):
        raise JobError(f"{key} = {values!r}; allowed: a list of numbers, one for each pair of features that is rotated")
    return tuple(map(float, values))


# modules and factors of the model's own code, which transformers has not
_OTHER_CODE = {"mlp_bias": False, "lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1}
KEYS = config_keys(
    DECODER_KEYS | {"head_dim", "sliding_window", "resid_pdrop", "embd_pdrop", "partial_rotary_factor"},
    defaults=_OTHER_CODE,
)
CONFIG = ConfigConverter(model_types=("phi3",), to_hf=_to_hf, from_hf=_from_hf, keys=KEYS)


PHIS = {
    name: Family(sizes=sizes, config=CONFIG, spec="torchtitan.models.phi3.model:SPEC", publisher="microsoft")
    for name, sizes in (("phi3", PHI3), ("phi4", PHI4))
}
