"""Mixers of Mamba 2 (arXiv:2405.21060): their sizes, and those of config.json. No torch here. The other files:

layer.py     the mixer, and the layer that has it in place of attention
decoder.py   decoders with it: where it is, its place in a parallel plan, its names in the Hugging Face format
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.core.errors import JobError, LimitError
from torchtitan.models.hf.config import read_flag, read_number
from torchtitan.models.sizes import GatedDecoderSizes, Names, Sizes, check_positive

MIXER = "attention.mixer"
SSM = f"{MIXER}.ssm_"


@dataclass(frozen=True, kw_only=True)
class Mamba2Args(GatedDecoderSizes):
    """Sizes of a mixer, which each layer for which `has_state` holds has, beside attention or in its place.

    It has `ssm_heads` of `ssm_head_dim` features. Each head has a state of `ssm_state_dim` vectors of these; the heads
    of a group share what is stored under (B in Mamba's papers) and what reads it (C).
    """

    ssm_heads: int = 24
    ssm_head_dim: int = 64
    ssm_state_dim: int = 256
    ssm_groups: int = 1
    ssm_bias: bool = False  # of the mixer's inputs
    ssm_out_bias: bool = False
    ssm_norm: bool = False  # an RMS norm of each group's outputs
    norm_before_gate: bool = False  # else after it
    conv_taps: int = 4  # tokens that the mixer's convolution sees
    conv_bias: bool = True

    min_step = 0.0  # a smaller step is this one
    ssm_in_multiplier = 1.0
    ssm_z_multiplier = 1.0  # of the gates
    ssm_x_multiplier = 1.0  # of the values
    ssm_b_multiplier = 1.0
    ssm_c_multiplier = 1.0
    ssm_dt_multiplier = 1.0  # of the steps

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "ssm_heads", "ssm_head_dim", "ssm_state_dim", "ssm_groups", "conv_taps")
        if self.ssm_heads % self.ssm_groups:
            raise JobError(
                f"ssm_groups = {self.ssm_groups} with ssm_heads = {self.ssm_heads}: every group has the same number of "
                "heads, so ssm_groups must divide ssm_heads"
            )

    def limits(self, overrides: Mapping[str, Any], *, tp: int, cp: int, pp: int) -> Iterator[LimitError]:
        """Yield the limits on a job's parallel degrees: a rank has heads of whole groups, or of one."""
        if self.ssm_groups % tp and tp % self.ssm_groups:
            allowed = f"a divisor or a multiple of ssm_groups {self.ssm_groups}, as a rank reads whole groups or one"
            yield LimitError("parallelism.tensor_parallel_degree", tp, allowed, "write one of these")

    @property
    def ssm_widths(self) -> dict[str, int]:
        """Width of each part of the mixer's input in all heads: gates, values, B, C, steps."""
        values, keys = self.ssm_heads * self.ssm_head_dim, self.ssm_groups * self.ssm_state_dim
        return {"z": values, "x": values, "b": keys, "c": keys, "dt": self.ssm_heads}

    @property
    def mixer_linears(self) -> Sizes:
        inputs = {SSM + part: (width, self.dim) for part, width in self.ssm_widths.items()}
        return inputs | {f"{SSM}out": (self.dim, self.ssm_widths["x"])}

    @property
    def biases(self) -> Names:
        inputs = tuple(SSM + part for part in self.ssm_widths) if self.ssm_bias else ()
        return (*super().biases, *inputs, *((f"{SSM}out",) if self.ssm_out_bias else ()))

    def attention_linears(self, layer: int) -> Sizes:
        return super().attention_linears(layer) | (self.mixer_linears if self.has_state(layer) else {})

    def other_sizes(self, layer: int) -> dict[str, int]:
        if not self.has_state(layer):
            return super().other_sizes(layer)
        widths = self.ssm_widths
        sizes = {f"{MIXER}.conv_{part}.weight": widths[part] * self.conv_taps for part in "xbc"}
        sizes |= {f"{MIXER}.conv_{part}.bias": widths[part] for part in "xbc" if self.conv_bias}
        sizes |= dict.fromkeys((f"{MIXER}.decay.log_rate", f"{MIXER}.decay.step_bias"), self.ssm_heads)
        sizes |= {f"{MIXER}.skip.weight": self.ssm_heads}
        return super().other_sizes(layer) | sizes | ({f"{SSM}norm.weight": widths["x"]} if self.ssm_norm else {})


SIZE_KEYS = {
    "ssm_heads": ("mamba_n_heads", 128),
    "ssm_state_dim": ("mamba_d_state", 256),
    "ssm_groups": ("mamba_n_groups", 1),
    "conv_taps": ("mamba_d_conv", 4),
}
FLAG_KEYS = {"ssm_bias": ("mamba_proj_bias", False), "conv_bias": ("mamba_conv_bias", True)}
"""Names here and in config.json, and transformers' values where it leaves them out."""
KEYS = {key for key, _ in (SIZE_KEYS | FLAG_KEYS).values()} | {"mamba_d_head", "mamba_expand", "time_step_limit"}
"""Keys that `mixer_sizes` reads, with the width."""
NO_LIMITS = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
"""Of steps, as transformers 4 and 5 write them."""


def mixer_config(args: Mamba2Args) -> dict[str, Any]:
    """Return the fields that `mixer_sizes` reads."""
    fields = {key: getattr(args, name) for name, (key, _) in (SIZE_KEYS | FLAG_KEYS).items()}
    return fields | {"mamba_d_head": args.ssm_head_dim}


def mixer_sizes(config: Mapping[str, Any], width: int, width_keys: str) -> dict[str, Any]:
    """Return the sizes of mixers of a width. `width_keys`: what it follows from, for the message of another one."""
    check_step_limit(config)
    sizes = {name: read_number(config, key, default) for name, (key, default) in SIZE_KEYS.items()}
    flags = {name: read_flag(config, key, default) for name, (key, default) in FLAG_KEYS.items()}
    heads = sizes["ssm_heads"]
    even = width // max(heads, 1)
    head_dim = even if config.get("mamba_d_head") == "auto" else read_number(config, "mamba_d_head", even)
    if heads * head_dim != width:
        raise JobError(
            f"mamba_n_heads = {heads} of mamba_d_head = {head_dim} do not make up the mixer's width {width} "
            f"({width_keys}); allowed: heads that do"
        )
    return sizes | flags | {"ssm_head_dim": head_dim}


def check_step_limit(config: Mapping[str, Any]) -> None:
    """Raise JobError if steps have other limits than 0."""
    limit = config.get("time_step_limit", NO_LIMITS[0])
    if limit not in NO_LIMITS:
        raise JobError(
            f"time_step_limit = {limit!r}, but steps of this model only are above 0; allowed: [0.0, Infinity]"
        )
