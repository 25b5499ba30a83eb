"""Decoders with LayerNorms, whose heads divide the width: sizes, and conversion from and to config.json. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.models.hf.config import gated_config, gated_sizes, read_number, split_partial_rotary
from torchtitan.models.hf.config_keys import DECODER_KEYS, of_family
from torchtitan.models.hf.layer_kinds import partial_rotary_factor
from torchtitan.models.sizes import GatedArgs, check_rotary_dim


@dataclass(frozen=True, kw_only=True)
class LayerNormArgs(GatedArgs):
    rotary_dim: int = 64  # features of a head that are rotated

    layer_norm: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rotary_dim(self)


KEYS = DECODER_KEYS - {"rms_norm_eps", "attention_bias"} | {"layer_norm_eps", "partial_rotary_factor"}


def layer_norm_config(args: LayerNormArgs, dtype: Any, name: str) -> dict[str, Any]:
    """Return the fields of config.json; `name`: that of transformers' classes. Raises JobError for other heads."""
    if args.head_dim * args.n_heads != args.dim:
        raise JobError(
            f"head_dim = {args.head_dim}: transformers' {name} only has dim / n_heads, here {args.dim} / {args.n_heads}"
        )
    fields = gated_config(args, dtype) | {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": name.lower(),
        "layer_norm_eps": args.norm_eps,
        "partial_rotary_factor": partial_rotary_factor(args),
    }
    return of_family(fields, KEYS)


def layer_norm_sizes(
    config: Mapping[str, Any], max_seq_len: int, rotary_factor: float, eps_key: str = "layer_norm_eps"
) -> dict[str, Any]:
    """Return the sizes that `layer_norm_config` writes. `max_seq_len`, `rotary_factor`: transformers' defaults."""
    config, factor = split_partial_rotary(config, rotary_factor)
    sizes = gated_sizes(config, max_seq_len)
    norm_eps = read_number(config, eps_key, 1e-5)
    return sizes | {"norm_eps": norm_eps, "rotary_dim": int(sizes["head_dim"] * factor)}
