"""Phi 3 and 4: arguments, published sizes, and conversion from and to config.json (Phi3Config).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import check_supported, gated_config, gated_sizes, read_number, read_window
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.sizes import DEBUG, GatedArgs


@dataclass(frozen=True, kw_only=True)
class Phi3Args(GatedArgs):
    vocab_size: int = 32064
    max_seq_len: int = 4096
    sliding_window: int = 0  # number of tokens that a token attends to, with itself; 0: all before it

    may_be_zero: ClassVar = ("sliding_window",)


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
    """Return the fields of transformers' Phi3Config. Raises JobError for scaled rotary positions."""
    if args.rope_scaling is not None:
        raise JobError(f"rope_scaling of kind {args.rope_scaling.kind!r}: transformers' Phi 3 only has 'longrope'")
    phi3_fields = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "sliding_window": args.sliding_window or None,
        "original_max_position_embeddings": args.max_seq_len,
    }
    return gated_config(args, dtype) | phi3_fields


def _from_hf(config: Mapping[str, Any]) -> Phi3Args:
    check_supported(config, {"hidden_act": "silu", "attention_bias": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0})
    for table in (config.get("rope_scaling"), config.get("rope_parameters")):
        kind = isinstance(table, Mapping) and table.get("rope_type", table.get("type"))
        if kind in ("longrope", "su", "yarn"):  # one kind, under three names
            raise JobError(
                f"rotary positions of type {kind!r}, in which the factor of each feature depends on the length of the "
                "text, are not supported; allowed: a Phi without them, such as Phi-3-mini-4k or phi-4"
            )
    # transformers reads both in every Phi, whose rotary positions then have no part without them
    read_number(config, "original_max_position_embeddings", 4096)
    read_number(config, "partial_rotary_factor", 1.0)
    sizes = gated_sizes(config, 4096)
    norm_eps = read_number(config, "rms_norm_eps", 1e-5)
    return Phi3Args(**sizes | {"norm_eps": norm_eps}, sliding_window=read_window(config, 0))


KEYS = config_keys(
    DECODER_KEYS | {"head_dim", "sliding_window", "resid_pdrop", "embd_pdrop"}, defaults={"mlp_bias": False}
)
CONFIG = ConfigConverter(model_types=("phi3",), to_hf=_to_hf, from_hf=_from_hf, keys=KEYS)


PHIS = {
    name: Family(sizes=sizes, config=CONFIG, spec="torchtitan.models.phi3.model:SPEC", publisher="microsoft")
    for name, sizes in (("phi3", PHI3), ("phi4", PHI4))
}
