"""Falcon-H1: arguments, published sizes, and conversion from and to config.json (FalconH1Config).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.core.errors import JobError, LimitError
from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import check_supported, gated_config, gated_sizes, read_biases, read_flag, read_number
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.sizes import DEBUG, GatedArgs, Names, Sizes, check_positive

MIXER = "attention.mixer"
SSM = f"{MIXER}.ssm_"


@dataclass(frozen=True, kw_only=True)
class FalconH1Args(GatedArgs):
    """Sizes of Falcon-H1: in each layer attention and a Mamba-2 mixer of the same input, and factors everywhere.

    The mixer has `ssm_heads` of `ssm_head_dim` features. Each head has a state of `ssm_state_dim` vectors of these; the
    heads of a group share what is stored under (B in Mamba's papers) and what reads it (C).
    """

    n_kv_heads: int = 2
    vocab_size: int = 32784
    rope_theta: float = 100000000000.0
    max_seq_len: int = 262144
    attention_bias: bool = False
    mlp_bias: bool = False
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
    embedding_multiplier: float = 1.0
    head_multiplier: float = 1.0  # of the logits
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    ssm_z_multiplier: float = 1.0  # of the gates
    ssm_x_multiplier: float = 1.0  # of the values
    ssm_b_multiplier: float = 1.0
    ssm_c_multiplier: float = 1.0
    ssm_dt_multiplier: float = 1.0  # of the steps
    gate_multiplier: float = 1.0  # of the feed-forward's gates, before silu
    down_multiplier: float = 1.0  # of its outputs

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "ssm_heads", "ssm_head_dim", "ssm_state_dim", "ssm_groups", "conv_taps")
        for name in (*FACTORS, *MLP_FACTORS, *SSM_FACTORS):
            if getattr(self, name) <= 0:
                raise JobError(f"{name} = {getattr(self, name)}: must be above 0")
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
    def query_scale(self) -> float:
        return self.key_multiplier  # scores are products of queries and keys

    @property
    def logits_divisor(self) -> float:
        return 1 / self.head_multiplier

    @property
    def n_state_layers(self) -> int:
        return self.n_layers

    @property
    def ssm_widths(self) -> dict[str, int]:
        """Width of each part of the mixer's input in all heads: gates, values, B, C, steps."""
        values, keys = self.ssm_heads * self.ssm_head_dim, self.ssm_groups * self.ssm_state_dim
        return {"z": values, "x": values, "b": keys, "c": keys, "dt": self.ssm_heads}

    @property
    def biases(self) -> Names:
        inputs = tuple(SSM + part for part in self.ssm_widths) if self.ssm_bias else ()
        return (*super().biases, *inputs, *((f"{SSM}out",) if self.ssm_out_bias else ()))

    def attention_linears(self, layer: int) -> Sizes:
        inputs = {SSM + part: (width, self.dim) for part, width in self.ssm_widths.items()}
        return super().attention_linears(layer) | inputs | {f"{SSM}out": (self.dim, self.ssm_widths["x"])}

    def other_sizes(self, layer: int) -> dict[str, int]:
        widths = self.ssm_widths
        sizes = {f"{MIXER}.conv_{part}.weight": widths[part] * self.conv_taps for part in "xbc"}
        sizes |= {f"{MIXER}.conv_{part}.bias": widths[part] for part in "xbc" if self.conv_bias}
        sizes |= dict.fromkeys((f"{MIXER}.decay.log_rate", f"{MIXER}.decay.step_bias"), self.ssm_heads)
        sizes |= {f"{MIXER}.skip.weight": self.ssm_heads}
        return super().other_sizes(layer) | sizes | ({f"{SSM}norm.weight": widths["x"]} if self.ssm_norm else {})


FACTORS = {
    "embedding_multiplier": "embedding_multiplier",
    "head_multiplier": "lm_head_multiplier",
    "key_multiplier": "key_multiplier",
    "attention_in_multiplier": "attention_in_multiplier",
    "attention_out_multiplier": "attention_out_multiplier",
    "ssm_in_multiplier": "ssm_in_multiplier",
    "ssm_out_multiplier": "ssm_out_multiplier",
}
"""Names of the factors, here and in config.json."""
MLP_FACTORS = ("gate_multiplier", "down_multiplier")
SSM_FACTORS = tuple(f"ssm_{part}_multiplier" for part in ("z", "x", "b", "c", "dt"))
"""Factors that a list in config.json has, in its order: `mlp_multipliers` and `ssm_multipliers`."""
SSM_SIZES = {
    "ssm_heads": ("mamba_n_heads", 128),
    "ssm_state_dim": ("mamba_d_state", 256),
    "ssm_groups": ("mamba_n_groups", 1),
    "conv_taps": ("mamba_d_conv", 4),
}
SSM_FLAGS = {
    "ssm_bias": ("mamba_proj_bias", False),
    "ssm_out_bias": ("projectors_bias", False),
    "ssm_norm": ("mamba_rms_norm", False),
    "norm_before_gate": ("mamba_norm_before_gate", True),
    "conv_bias": ("mamba_conv_bias", True),
}
"""Names here and in config.json, and transformers' values where it leaves them out."""


_published: dict[str, Any] = dict(embedding_multiplier=32**0.5, ssm_out_multiplier=0.23570226039551587)
_published |= dict(ssm_z_multiplier=8**-0.5, ssm_x_multiplier=0.25, ssm_b_multiplier=32**-0.5, ssm_c_multiplier=0.5)
_published |= dict(ssm_dt_multiplier=8**-0.5, ssm_norm=True)
FALCON_H1 = {
    "debugmodel": FalconH1Args(
        **DEBUG, ssm_heads=8, ssm_head_dim=32, ssm_state_dim=32, ssm_groups=2, ssm_norm=True, rope_theta=10000.0
    ),
    "0.5B": FalconH1Args(
        **_published | dict(ssm_norm=False, ssm_state_dim=128, ssm_b_multiplier=8**-0.5, max_seq_len=16384),
        **dict(dim=1024, n_layers=36, n_heads=8, head_dim=64, ffn_dim=2048, head_multiplier=0.0390625),
        **dict(key_multiplier=0.39062499999999994, attention_out_multiplier=0.9375, ssm_in_multiplier=1.25),
        **dict(gate_multiplier=0.8838834764831844, down_multiplier=0.5859375),
    ),
    "1.5B-Deep": FalconH1Args(
        **_published | dict(vocab_size=65537, max_seq_len=131072),
        **dict(dim=1280, n_layers=66, n_heads=6, ffn_dim=3072, head_multiplier=0.03125),
        **dict(key_multiplier=0.17677669529663687, attention_out_multiplier=0.5),
        **dict(gate_multiplier=0.7071067811865476, down_multiplier=0.3125),
    ),
    "7B": FalconH1Args(
        **_published | dict(vocab_size=130049, ssm_head_dim=128, ssm_out_multiplier=0.11785113019775793),
        **dict(dim=3072, n_layers=44, n_heads=12, ffn_dim=12288, head_multiplier=0.013020833333333334),
        **dict(key_multiplier=0.030690398488999456, attention_out_multiplier=0.10416666666666667),
        **dict(gate_multiplier=0.2946278254943948, down_multiplier=0.032552083333333336),
        ssm_in_multiplier=0.4166666666666667,
    ),
    "34B": FalconH1Args(
        **_published | dict(vocab_size=261120, ssm_head_dim=128, ssm_out_multiplier=0.08838834764831845),
        **dict(dim=5120, n_layers=72, n_heads=20, n_kv_heads=4, ffn_dim=21504, head_multiplier=0.0078125),
        **dict(key_multiplier=0.011048543456039804, attention_out_multiplier=0.0375, ssm_in_multiplier=0.25),
        **dict(gate_multiplier=0.1767766952966369, down_multiplier=0.011160714285714284, ssm_heads=32, ssm_groups=2),
    ),
}


def _to_hf(args: FalconH1Args, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' FalconH1Config."""
    return (
        gated_config(args, dtype)
        | {key: float(getattr(args, name)) for name, key in FACTORS.items()}  # transformers refuses whole ones
        | {key: getattr(args, name) for name, (key, _) in (SSM_SIZES | SSM_FLAGS).items()}
        | {
            "architectures": ["FalconH1ForCausalLM"],
            "model_type": "falcon_h1",
            "mlp_bias": args.mlp_bias,
            "mamba_d_ssm": args.ssm_widths["x"],
            "mamba_d_head": args.ssm_head_dim,
            "mlp_multipliers": [float(getattr(args, name)) for name in MLP_FACTORS],
            "ssm_multipliers": [float(getattr(args, name)) for name in SSM_FACTORS],
        }
    )


def _from_hf(config: Mapping[str, Any]) -> FalconH1Args:
    check_supported(config, {"hidden_act": "silu"})
    limit = config.get("time_step_limit", NO_LIMITS[0])
    if limit not in NO_LIMITS:
        raise JobError(
            f"time_step_limit = {limit!r}, but steps of this model only are above 0; allowed: [0.0, Infinity]"
        )
    sizes = gated_sizes(config, 8192, kv_heads=8)
    sizes |= {name: read_number(config, key, default) for name, (key, default) in SSM_SIZES.items()}
    sizes |= {name: read_flag(config, key, default) for name, (key, default) in SSM_FLAGS.items()}
    sizes |= {name: _read_factor(key, config.get(key, 1.0)) for name, key in FACTORS.items()}
    sizes |= _read_factors(config, "mlp_multipliers", MLP_FACTORS) | _read_factors(
        config, "ssm_multipliers", SSM_FACTORS
    )
    sizes |= {"norm_eps": read_number(config, "rms_norm_eps", 1e-5)} | read_biases(config)
    return FalconH1Args(**sizes, ssm_head_dim=_read_head_dim(config, sizes["dim"], sizes["ssm_heads"]))


def _read_head_dim(config: Mapping[str, Any], dim: int, heads: int) -> int:
    """Return the features of a head of the mixer. Raises JobError unless its heads make up its width."""
    width = read_number(config, "mamba_d_ssm", 1024, null=read_number(config, "mamba_expand", 2) * dim)
    even = width // max(heads, 1)
    head_dim = even if config.get("mamba_d_head") == "auto" else read_number(config, "mamba_d_head", even)
    if heads * head_dim != width:
        raise JobError(
            f"mamba_n_heads = {heads} of mamba_d_head = {head_dim} do not make up the mixer's width {width} "
            "(mamba_d_ssm, or if it is null mamba_expand x hidden_size); allowed: heads that do"
        )
    return head_dim


def _read_factors(config: Mapping[str, Any], key: str, names: tuple[str, ...]) -> dict[str, float]:
    """Return the factors of a list, 1 without it. Raises JobError for another length."""
    factors = config.get(key)
    factors = [1.0] * len(names) if factors is None else factors
    if not isinstance(factors, list) or len(factors) != len(names):
        raise JobError(f"{key} = {factors!r}; allowed: null or {len(names)} numbers")
    return {name: _read_factor(key, factor) for name, factor in zip(names, factors, strict=True)}


def _read_factor(key: str, factor: Any) -> float:
    """Return a factor. Raises JobError for what is no number, and for a whole one, as transformers does."""
    if type(factor) is int:
        raise JobError(
            f"{key} = {factor}; allowed: a number with a decimal point, as transformers has it; write {factor}.0"
        )
    return read_number({key: factor}, key, 1.0)


NO_LIMITS = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
"""Of steps, as transformers 4 and 5 write them."""
KEYS = config_keys(
    DECODER_KEYS
    | {"head_dim", "mlp_bias", "mamba_d_ssm", "mamba_d_head", "mamba_expand", "mlp_multipliers", "ssm_multipliers"}
    | {*FACTORS.values(), *(key for key, _ in (SSM_SIZES | SSM_FLAGS).values()), "time_step_limit"},
    # of computation and generation, and one from which published folders' widths follow that they also have
    harmless=("mamba_chunk_size", "num_logits_to_keep", "mlp_expansion_factor"),
    defaults={"mamba_use_mlp": True},
)
CONFIG = ConfigConverter(model_types=("falcon_h1",), to_hf=_to_hf, from_hf=_from_hf, keys=KEYS)


FAMILY = Family(sizes=FALCON_H1, config=CONFIG, spec="torchtitan.models.falcon_h1.model:SPEC", publisher="tiiuae")
