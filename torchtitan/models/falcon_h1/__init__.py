"""Falcon-H1: arguments, published sizes, and conversion from and to config.json (FalconH1Config).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import check_supported, gated_config, gated_sizes, read_biases, read_flag, read_number
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.mamba2 import KEYS as MIXER_KEYS
from torchtitan.models.mamba2 import Mamba2Args, mixer_config, mixer_sizes
from torchtitan.models.sizes import DEBUG, GatedArgs


@dataclass(frozen=True, kw_only=True)
class FalconH1Args(Mamba2Args, GatedArgs):
    """Sizes of Falcon-H1: in each layer attention and a Mamba-2 mixer of the same input, and factors everywhere."""

    n_kv_heads: int = 2
    vocab_size: int = 32784
    rope_theta: float = 100000000000.0
    max_seq_len: int = 262144
    attention_bias: bool = False
    mlp_bias: bool = False
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
        for name in (*FACTORS, *MLP_FACTORS, *SSM_FACTORS):
            if getattr(self, name) <= 0:
                raise JobError(f"{name} = {getattr(self, name)}: must be above 0")

    def has_state(self, layer: int) -> bool:
        return True

    @property
    def n_state_layers(self) -> int:
        return self.n_layers

    @property
    def query_scale(self) -> float:
        return self.key_multiplier  # scores are products of queries and keys

    @property
    def logits_divisor(self) -> float:
        return 1 / self.head_multiplier


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
FLAGS = {
    "ssm_out_bias": ("projectors_bias", False),
    "ssm_norm": ("mamba_rms_norm", False),
    "norm_before_gate": ("mamba_norm_before_gate", True),
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
        | {key: getattr(args, name) for name, (key, _) in FLAGS.items()}
        | mixer_config(args)
        | {
            "architectures": ["FalconH1ForCausalLM"],
            "model_type": "falcon_h1",
            "mlp_bias": args.mlp_bias,
            "mamba_d_ssm": args.ssm_widths["x"],
            "mlp_multipliers": [float(getattr(args, name)) for name in MLP_FACTORS],
            "ssm_multipliers": [float(getattr(args, name)) for name in SSM_FACTORS],
        }
    )


def _from_hf(config: Mapping[str, Any]) -> FalconH1Args:
    check_supported(config, {"hidden_act": "silu"})
    sizes = gated_sizes(config, 8192, kv_heads=8)
    width = read_number(config, "mamba_d_ssm", 1024, null=read_number(config, "mamba_expand", 2) * sizes["dim"])
    sizes |= mixer_sizes(config, width, "mamba_d_ssm, or if it is null mamba_expand x hidden_size")
    sizes |= {name: read_flag(config, key, default) for name, (key, default) in FLAGS.items()}
    sizes |= {name: _read_factor(key, config.get(key, 1.0)) for name, key in FACTORS.items()}
    sizes |= _read_factors(config, "mlp_multipliers", MLP_FACTORS) | _read_factors(
        config, "ssm_multipliers", SSM_FACTORS
    )
    sizes |= {"norm_eps": read_number(config, "rms_norm_eps", 1e-5)} | read_biases(config)
    return FalconH1Args(**sizes)


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


KEYS = config_keys(
    DECODER_KEYS
    | {"head_dim", "mlp_bias", "mamba_d_ssm", "mlp_multipliers", "ssm_multipliers"}
    | {*FACTORS.values(), *(key for key, _ in FLAGS.values()), *MIXER_KEYS},
    # of computation and generation, and one from which published folders' widths follow that they also have
    harmless=("mamba_chunk_size", "num_logits_to_keep", "mlp_expansion_factor"),
    defaults={"mamba_use_mlp": True},
)
CONFIG = ConfigConverter(model_types=("falcon_h1",), to_hf=_to_hf, from_hf=_from_hf, keys=KEYS)


FAMILY = Family(sizes=FALCON_H1, config=CONFIG, spec="torchtitan.models.falcon_h1.model:SPEC", publisher="tiiuae")
