"""Stretched rotary wavelengths as a config.json has them, alike in all families that have RopeScaling. No torch."""

from collections.abc import Mapping
from typing import Any

from torchtitan.errors import JobError
from torchtitan.models.hf.config import check_only, rope_kind, rope_of
from torchtitan.models.rope_scaling import RopeScaling

FIELDS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_seq_len",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
KINDS = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
}
"""What transformers has for each kind, by its names; of yarn the last two may be missing."""


def rotary_config(args: Any) -> dict[str, Any]:
    """What `scaling_from_hf` reads, of a family's arguments, and theta, which ntk changes."""
    scaling = args.rope_scaling
    return {
        "rope_theta": scaling.theta(args.rope_theta, args.head_dim) if scaling else args.rope_theta,
        "rope_scaling": scaling and _to_hf(scaling),
    }


def _to_hf(scaling: RopeScaling) -> dict[str, Any] | None:
    """None for ntk, which is another theta."""
    if scaling.kind == "ntk":
        return None
    return {"rope_type": scaling.kind} | {key: getattr(scaling, FIELDS[key]) for key in KINDS[scaling.kind]}


def scaling_from_hf(config: Mapping[str, Any]) -> RopeScaling | None:
    """JobError for a kind that is not here."""
    rope, kind = rope_of(config), rope_kind(config)
    if kind == "default":
        return None
    given = {key: rope[key] for key in KINDS.get(kind, ()) if rope.get(key) is not None}
    if kind not in KINDS or set(KINDS[kind]) - set(given) - {"beta_fast", "beta_slow"}:
        kinds = "; ".join(f"{name} with {', '.join(keys)}" for name, keys in KINDS.items())
        raise JobError(f"rotary scaling {dict(rope)}; allowed are none and types {kinds}")
    check_only(rope, {"attention_factor": None, "truncate": True, "mscale": None, "mscale_all_dim": None})
    return RopeScaling(kind=kind, **{FIELDS[key]: value for key, value in given.items()})
